"""kvtool: endless chats and streams with llama.cpp in constant memory.

The names in `__all__` are the Python library; docs/python.md shows how to use them. Each name is imported at
its first use, so that the command line starts without importing all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.api import chat as chat
    from kvtool.api import generate as generate
    from kvtool.api import load_model as load_model
    from kvtool.api import load_policy as load_policy
    from kvtool.chats.conversation import Conversation as Conversation
    from kvtool.config.opening import open_run as open_run
    from kvtool.config.run import RunOptions as RunOptions
    from kvtool.engine.cells import Cells as Cells
    from kvtool.engine.loop import Engine as Engine
    from kvtool.engine.settings import Settings as Settings
    from kvtool.errors import KvtoolError as KvtoolError
    from kvtool.llama.loaded.model import Model as Model
    from kvtool.policy import Policy as Policy

__version__ = "0.1.0"

_MODULES = {
    "Cells": "engine.cells",
    "Conversation": "chats.conversation",
    "Engine": "engine.loop",
    "KvtoolError": "errors",
    "Model": "llama.loaded.model",
    "Policy": "policy",
    "RunOptions": "config.run",
    "Settings": "engine.settings",
    "chat": "api",
    "generate": "api",
    "load_model": "api",
    "load_policy": "api",
    "open_run": "config.opening",
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
