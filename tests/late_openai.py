"""The openai package, which is imported when something of it is used: that takes a second of each worker."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name):
    return getattr(import_module("openai"), name)
