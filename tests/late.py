"""Clients of a server, imported when something of them is used: that takes a second of each worker."""

from __future__ import annotations

from importlib import import_module


class _Late:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(import_module(self._name), name)


openai, anthropic = _Late("openai"), _Late("anthropic")
