"""Show a reply in a terminal.

The thought is dimmed. When the thought ends, a single line replaces it, and the answer follows this line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvtool.chats.thinking import Splitter
from kvtool.cli.chat.markdown import ReplyStream

_EVERY_S = 1 / 12
"""Minimum time between two updates of the thought on the screen, in seconds."""

_MAX_LINES = 8
"""While the model thinks, at most this many of the newest lines of its thought are shown."""


class ReplyView:
    """Prints the pieces of one reply.

    splitter: separates the thought from the answer. hide: True to show only that the model is thinking, and
    not the thought. plain: True to show the rest of the text exactly as the model writes it.
    """

    def __init__(
        self, console: Console, splitter: Splitter, *, plain: bool = False, hide: bool = False
    ) -> None:
        self.thought = ""
        """The reply's thought so far."""
        self._console = console
        self._splitter = splitter
        self._is_plain = plain
        self._hides = hide
        self._out = ReplyStream(console, plain=plain)
        self._live: Live | None = None
        self._started = self._drawn = 0.0

    def __enter__(self) -> ReplyView:
        return self

    def __exit__(self, *_: object) -> None:
        for is_thought, text in self._splitter.end():
            self._show(is_thought, text)
        self._fold()
        self._out.end()

    def resume(self, parts: Iterable[tuple[bool, str]]) -> None:
        """Continue a reply, of which these parts were printed before: (is it of the thought?, text)."""
        answer = ""
        for is_thought, text in parts:
            if is_thought:
                self.thought += text
            else:
                answer += text
        self._out.resume(answer)

    def write(self, piece: str) -> None:
        """Print a piece. Raises OSError if the terminal is closed."""
        if self._is_plain and not self._hides:
            self._out.write(piece)
            return
        for is_thought, text in self._splitter.feed(piece):
            self._show(is_thought, text)

    def _show(self, is_thought: bool, text: str) -> None:
        if is_thought:
            self._think(text)
            return
        self._fold()
        self._out.write(text)

    def _think(self, text: str) -> None:
        self.thought += text
        if self._live is None:
            self._started = time.monotonic()
            # do not let rich draw in a thread: errors in this thread would be lost
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        now = time.monotonic()
        if now - self._drawn >= _EVERY_S:
            self._drawn = now
            self._live.update(self._newest(), refresh=True)

    def _newest(self) -> Text:
        if self._hides:
            return Text("thinking", style="dim")
        n = max(min(_MAX_LINES, self._console.height // 2), 1)
        # wrap only the end of the thought: as many characters as n lines of the terminal can show
        end = self.thought[-n * self._console.width :].strip()
        lines = Text(end, style="dim").wrap(self._console, self._console.width)
        return Text("\n").join(lines[-n:])

    def _fold(self) -> None:
        """Remove the finished thought from the terminal. If thoughts are shown, print a line in its place."""
        if self._live is None:
            return
        self._live.update("", refresh=True)
        self._live.stop()
        self._live = None
        if not self._hides:
            seconds, n = time.monotonic() - self._started, len(self.thought.split())
            words = f"{n:,} word{'s' * (n != 1)}"
            line = f"thought for {seconds:.0f} s, {words}; /show thought shows it"
            self._console.print(line, style="dim")
