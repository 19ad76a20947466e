"""Shows Markdown in a terminal while it is being written."""

from __future__ import annotations

import errno
import os
import time

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

_EVERY_S = 1 / 12
"""Seconds from one drawing to the next."""


class MarkdownStream:
    """Redraws the paragraph that is being written; finished ones stay as they are.

    Only the last paragraph is redrawn, so a long answer scrolls like any other text.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        # drawn by this thread: one of its own would keep errors to itself
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible", transient=True)
        self._drawn = 0.0

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        self._print(self._text)

    def write(self, piece: str) -> None:
        """Adds a piece. Raises OSError once the terminal is gone."""
        self._text += piece
        done, rest = self._split()
        if done:
            self._live.update("", refresh=True)
            self._print(done)
            self._text = rest
        now = time.monotonic()
        if now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        if not self._console.is_terminal:
            # it is gone, and rich draws nothing where there is none
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._live.update(Markdown(self._text), refresh=True)

    def _split(self) -> tuple[str, str]:
        """The finished blocks, and the open one. A blank line inside a code fence ends no block."""
        end = self._text.rfind("\n\n")
        while end >= 0:
            if self._text[:end].count("```") % 2 == 0:
                return self._text[:end], self._text[end + 2 :]
            end = self._text.rfind("\n\n", 0, end)
        return "", self._text

    def _print(self, block: str) -> None:
        if block.strip():
            self._console.print(Markdown(block))
            self._console.print()
