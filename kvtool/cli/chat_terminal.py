"""The chat that a person sees in a terminal: a prompt, replies as Markdown, a status line after each."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvtool.chats.conversation import Conversation
from kvtool.cli.archive import archive_limit
from kvtool.cli.chat_commands import Commands
from kvtool.cli.console import plain_console
from kvtool.cli.keeper import Keeper, turns
from kvtool.cli.utf8 import shown
from kvtool.errors import ModelError, StreamEnd, UsageError
from kvtool.system import interrupt


class Terminal:
    """Reads a user's lines until they leave; each is a command or a turn.

    Attributes
    ----------
    policy
        The policy's name, for the user.
    n_max
        Maximum tokens of a reply, or None.
    tokens_per_s
        Speed of the last reply of more than one token.
    """

    def __init__(self, conversation: Conversation, keeper: Keeper, policy: str, n_max: int | None) -> None:
        self.conversation = conversation
        self.keeper = keeper
        self.engine = conversation.writer.engine
        self.policy = policy
        self.n_max = n_max
        self.tokens_per_s = 0.0
        self.console = plain_console()
        self._keys = _Keys()

    def run(self) -> None:
        from rich.text import Text

        engine, commands = self.engine, Commands(self)
        self.console.print(
            Text.assemble(
                (engine.model.path.stem, "bold"),
                " with policy ",
                (self.policy, "bold"),
                ", ".join(
                    filter(
                        None, [f", {engine.policy.budget:,} cells", archive_limit(engine), "/help for help"]
                    )
                ),
            )
        )
        if n := self.conversation.n_turn:
            self.note(f"continuing after {turns(n)}, {engine.n_past:,} tokens")
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        while (line := self._ask()) is not None:
            line = line.strip()
            with self._keys.waiting():
                if line.startswith("/"):
                    if not commands.run(line):
                        break
                elif line:
                    # what a terminal without UTF-8 sends must not end the chat
                    self._answer(shown(line))

    def note(self, text: str) -> None:
        self.console.print(text, style="dim")

    def error(self, text: object) -> None:
        self.console.print(f"{text}", style="red")

    def confirm(self, question: str) -> bool:
        """Asks a question that only "y" or "yes" answers with yes."""
        interrupt.raises()
        with self._keys.normal():
            try:
                return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return False

    def status(self) -> str:
        """One line: tokens, cells, bytes and speed."""
        from kvtool.measure.holdings import n_forgotten
        from kvtool.units import format_bytes

        engine = self.engine
        archived = f"{engine.n_archived:,} archived, " if engine.context.archive else ""
        return (
            f"{engine.n_past:,} tokens, {archived}{n_forgotten(engine):,} forgotten \u00b7 "
            f"{engine.mean_kv:,.0f}/{engine.policy.budget:,} cells \u00b7 "
            f"cache {format_bytes(engine.cache_bytes)} \u00b7 {self.tokens_per_s:.1f} tokens/s"
        )

    def saved(self) -> None:
        """Says what could not be saved, and where another chat was put."""
        if self.keeper.unsaved:
            self.error(self.keeper.unsaved)
        if self.keeper.aside:
            self.note(f"the previous chat of {self.keeper.path} is now in {self.keeper.aside.name}")

    def _ask(self) -> str | None:
        """The user's next line; None to leave."""
        interrupt.raises()
        while True:
            try:
                return input("\n> ")
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print()
                self.note("Ctrl-D or /exit leaves")

    def _answer(self, text: str) -> None:
        from rich.text import Text

        from kvtool.cli.markdown import MarkdownStream

        writer = self.conversation.writer
        signal.signal(signal.SIGINT, lambda *_: setattr(writer, "stop", True))
        started = None
        self.console.print()
        try:
            pieces = self.conversation.reply(text, self.n_max)
            with self.console.status(Text("reading")):
                first = next(pieces, "")
            started = time.monotonic()
            with MarkdownStream(self.console) as out:
                out.write(first)
                for piece in pieces:
                    out.write(piece)
        except (ModelError, StreamEnd, UsageError) as error:
            self.error(f"{error}; or start over with /reset")
        if started is not None:
            n = writer.n_written - 1
            seconds = time.monotonic() - started
            self.tokens_per_s = n / seconds if n > 0 and seconds > 0 else self.tokens_per_s
        if writer.stop:
            self.note("stopped")
        self.keeper.keep()
        self.saved()
        self.note(self.status())


class _Keys:
    """Hides what is typed while the chat is busy; the next prompt gets it."""

    def __init__(self) -> None:
        self._before: Any = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Typed characters would break what is drawn: they are not shown inside."""
        try:
            import termios
        except ImportError:
            yield
            return
        self._before = termios.tcgetattr(sys.stdin)
        waiting = termios.tcgetattr(sys.stdin)
        waiting[3] &= ~termios.ECHO
        # else the terminal itself swallows Ctrl-D, and the prompt never gets it
        waiting[6][termios.VEOF] = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE") & 0xFF])
        termios.tcsetattr(sys.stdin, termios.TCSANOW, waiting)
        try:
            yield
        finally:
            # a terminal that is gone cannot be set back
            with suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)
            self._before = None

    @contextmanager
    def normal(self) -> Iterator[None]:
        """Inside `waiting`, for a question: typed characters are shown again."""
        if self._before is None:
            yield
            return
        import termios

        waiting = termios.tcgetattr(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)
        try:
            yield
        finally:
            with suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, waiting)
