"""kvtool: endless chats and streams with llama.cpp in constant memory, by evicting from the KV cache.

The names in `__all__` are the library, and docs/python.md shows how to use them. Each is imported when it is
first used, because the command line starts without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.api import chat as chat
    from kvtool.api import generate as generate
    from kvtool.api import load_model as load_model
    from kvtool.api import load_policy as load_policy
    from kvtool.chats.conversation import Conversation as Conversation
    from kvtool.engine.cells import Cells as Cells
    from kvtool.engine.loop import Engine as Engine
    from kvtool.engine.settings import Settings as Settings
    from kvtool.errors import KvtoolError as KvtoolError
    from kvtool.llama.model import Model as Model
    from kvtool.options.run import Run as Run
    from kvtool.policy import Policy as Policy
    from kvtool.runs.opening import open_run as open_run

__version__ = "0.1.0"

_MODULES = {
    "Cells": "engine.cells",
    "Conversation": "chats.conversation",
    "Engine": "engine.loop",
    "KvtoolError": "errors",
    "Model": "llama.model",
    "Policy": "policy",
    "Run": "options.run",
    "Settings": "engine.settings",
    "chat": "api",
    "generate": "api",
    "load_model": "api",
    "load_policy": "api",
    "open_run": "runs.opening",
}

__all__ = [*_MODULES]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__():
        return [*globals(), *__all__]
