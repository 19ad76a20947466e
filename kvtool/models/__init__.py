"""Models as files: names, downloads, headers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.models.fetch import Progress


def _show_nothing(name: str) -> AbstractContextManager[None]:
    return nullcontext()


show_download: Callable[[str], AbstractContextManager[Progress | None]] = _show_nothing
"""Function that takes a model's name and returns a context that shows the progress of its download.

The command line replaces it by a function that draws a bar.
"""
