"""Advice about a model: it is not made for chats, a better one fits, or a text is too long for it."""

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
"""Minimum length, in tokens, of texts about which small models answer badly."""

_SMALL_BYTES = 300_000_000
"""Size below which a model is small.

SmolLM2 135M (98 MB) fails at summaries and questions that Qwen2.5 0.5B (491 MB) answers.
"""

_TOY_BYTES = 20_000_000
"""Size below which a model is made for tests and gets no advice."""


def base_model(path: Path) -> str | None:
    """Return advice if models.txt marks this file as a base model, else None."""
    from kvtool.models.catalogue import registry

    for entry in registry().values():
        if entry.file == path.name and (of_base := entry.of_base):
            return f"{entry.name} is {of_base}; `kvtool generate --raw` continues a text"
    return None


def better_model() -> str | None:
    """Return advice to use a better model, once per user.

    None if the user has seen it, if that cannot be remembered in a file, or if no model is better.
    """
    try:
        path = user_state_path("kvtool", appauthor=False) / "first-chat"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (OSError, RuntimeError):
        return None
    from kvtool.cli import fits
    from kvtool.models.catalogue import registry

    if not (entry := fits.best(registry().values(), fits.room())):
        return None
    return f"a better model fits here: kvtool chat -m {entry.name}{_download(entry)}"


def too_much(info: ModelInfo, n: int, n_before: int = 0) -> str | None:
    """Return advice if a text of n tokens is too long for a model, else None.

    It names a larger model of models.txt that fits this machine, if there is one.
    n_before: tokens that precede the text in its stream.
    """
    n_all, name = n_before + n, info.path.stem
    if info.size < _TOY_BYTES or n_all <= info.n_ctx_train and (info.size >= _SMALL_BYTES or n < _LONG):
        return None
    if n_all > info.n_ctx_train:
        reason = f"{name} was trained for {info.n_ctx_train:,} tokens, not for {n_all:,}: it may miss facts"
    else:
        reason = f"{name} is too small for questions about long texts"
    from kvtool.cli import fits
    from kvtool.models.catalogue import registry

    with suppress(KvtoolError):
        larger = (entry for entry in registry().values() if (entry.about_bytes or 0) > info.size)
        if better := fits.best(larger, fits.room(), n_all):
            return f"{reason}; -m {better.name} does better on this machine{_download(better)}"
    return reason


def _download(entry: Entry) -> str:
    return "" if entry.here else f" (downloads {format_bytes(entry.about_bytes or 0)})"
