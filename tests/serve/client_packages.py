"""The openai and anthropic packages.

They are imported at their first use, because the import takes a second.
"""

from __future__ import annotations

from importlib import import_module


class _LazyModule:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(import_module(self._name), name)


openai, anthropic = _LazyModule("openai"), _LazyModule("anthropic")
