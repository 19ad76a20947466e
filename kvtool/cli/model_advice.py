"""Lines about a model: it is not for chats, a better one would run, or a text is too much for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_state_path

from kvtool.errors import KvtoolError
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.models.catalogue import Entry
    from kvtool.models.header import ModelInfo

_LONG = 1000
"""Tokens of a text about which a small model answers badly."""

_SMALL_BYTES = 300_000_000
"""A small model: SmolLM2 135M (98 MB) fails at summaries and questions that Qwen2.5 0.5B (491 MB) answers."""

_TOY_BYTES = 20_000_000
"""A model of less is made for tests: nobody expects sense of it."""


def base_model(path: Path) -> str | None:
    """The line about a model that models.txt says is not for chats; None for any other. path: of its file."""
    from kvtool.models.catalogue import registry

    for entry in registry().values():
        if entry.file == path.name and (of_base := entry.of_base):
            return f"{entry.name} is {of_base}; `kvtool generate --raw` continues a text"
    return None


def better_model() -> str | None:
    """The line about it; None where it was said before, or where that cannot be written down."""
    try:
        path = user_state_path("kvtool", appauthor=False) / "first-chat"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (OSError, RuntimeError):
        return None
    from kvtool.cli import fits
    from kvtool.models.catalogue import registry

    if not (found := fits.best(registry().values(), fits.room())):
        return None
    return f"a better model fits here: kvtool chat -m {found.name}{_download(found)}"


def too_much(info: ModelInfo, n: int, n_before: int = 0) -> str | None:
    """The line about a text of n tokens that is too much for a model; None if it is not.

    It names a model of models.txt that fits this machine and can do it. n_before: tokens that precede the
    text in its stream.
    """
    n_all, name = n_before + n, info.path.stem
    if info.size < _TOY_BYTES or n_all <= info.n_ctx_train and (info.size >= _SMALL_BYTES or n < _LONG):
        return None
    if n_all > info.n_ctx_train:
        why = f"{name} was trained for {info.n_ctx_train:,} tokens, not for {n_all:,}: it may miss facts"
    else:
        why = f"{name} is too small for questions about long texts"
    from kvtool.cli import fits
    from kvtool.models.catalogue import registry

    with suppress(KvtoolError):
        larger = (each for each in registry().values() if (each.about_bytes or 0) > info.size)
        if found := fits.best(larger, fits.room(), n_all):
            return f"{why}; -m {found.name} does better on this machine{_download(found)}"
    return why


def _download(entry: Entry) -> str:
    return "" if entry.here else f" (downloads {format_bytes(entry.about_bytes or 0)})"
