"""Advice about base models, about texts that are too long for a model, and about better models."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_state_path

from kvtool.cli import fits
from kvtool.errors import KvtoolError
from kvtool.models.catalogue import Entry, registry
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo

_LONG = 1000
"""Small models answer questions badly if a text has at least this many tokens."""

_SMALL_BYTES = 300_000_000
"""A model with fewer bytes is called small.

SmolLM2 135M (98 MB) fails at summaries and questions that Qwen2.5 0.5B (491 MB) answers.
"""

_TOY_BYTES = 20_000_000
"""A model with fewer bytes is treated as a model for tests. There is no advice about such a model."""


def base_model(path: Path) -> str | None:
    """Return advice if models.txt marks this file as a base model, else None."""
    for entry in registry().values():
        if entry.file == path.name and (of_base := entry.of_base):
            return f"{entry.name} is {of_base}; `kvtool generate --raw` continues a text"
    return None


def better_model() -> str | None:
    """Return advice to use the best model for this machine, or None.

    The first call creates a file, so that each user gets the advice only once. The result is None if the file
    exists, if it cannot be written, or if no model fits.
    """
    try:
        path = user_state_path("kvtool", appauthor=False) / "first-chat"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (OSError, RuntimeError):
        return None
    if not (entry := fits.best(registry().values(), fits.room())):
        return None
    return f"a better model fits here: kvtool chat -m {entry.name}{_download(entry)}"


def too_much(info: ModelInfo, n: int, n_before: int = 0) -> str | None:
    """Return advice if a text of n tokens is too long for a model, else None.

    If a larger model of models.txt fits this machine, the advice names it. n_before: number of tokens that
    precede the text in its stream.
    """
    n_all, name = n_before + n, info.path.stem
    if info.size < _TOY_BYTES or n_all <= info.n_ctx_train and (info.size >= _SMALL_BYTES or n < _LONG):
        return None
    if n_all > info.n_ctx_train:
        reason = f"{name} was trained for {info.n_ctx_train:,} tokens, not for {n_all:,}: it may miss facts"
    else:
        reason = f"{name} is too small for questions about long texts"
    with suppress(KvtoolError):
        larger = (entry for entry in registry().values() if (entry.about_bytes or 0) > info.size)
        if better := fits.best(larger, fits.room(), n_all):
            return f"{reason}; -m {better.name} does better on this machine{_download(better)}"
    return reason


def _download(entry: Entry) -> str:
    return "" if entry.here else f" (downloads {format_bytes(entry.about_bytes or 0)})"
