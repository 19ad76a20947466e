"""The commands of a chat: lines that start with a slash."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.archive import archive_line, archive_record
from kvtool.cli.explain import may_lose_system, policy_line, unpinned
from kvtool.cli.keeper import turns
from kvtool.cli.utf8 import shown
from kvtool.errors import KvtoolError, SessionError

if TYPE_CHECKING:
    from kvtool.cli.chat_terminal import Terminal

HELP = """\
/help          show this help
/stats         show what the cache holds, its size in bytes, and the speed
/undo          take back the last turn, /reset, /system or /load; type it again
               to go further back
/save FILE     write the chat to a session file; asks before replacing a chat
/load FILE     continue the chat in a session file
/cells [N]     show the last N tokens; the darker, the more rows still hold it
/reset         forget everything and start over; the system prompt stays
/system        show the system prompt
/system TEXT   start over under another system prompt
/exit          leave; so does Ctrl-D
Ctrl-C stops a reply and keeps the chat.
/undo goes back up to 10 steps. Its copies take at most 512 MiB of disk, without
the archive of --policy recall, and are deleted when you leave.
With --session FILE, the file is written after every reply and every /undo.
/reset, /system and /load do not touch it: the next reply first moves the chat
that is in it to FILE.1 (FILE.2, ...)."""


class Commands:
    """Runs a user's commands on the chat of a terminal. What is wrong is one line, and the chat goes on."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.conversation = terminal.conversation
        self.keeper = terminal.keeper
        self.engine = terminal.engine
        self._plain: dict[str, Callable[[], None]] = {
            "/help": lambda: terminal.console.print(HELP),
            "/stats": self._stats,
            "/undo": self._undo,
            "/reset": self._reset,
        }
        self._with_text: dict[str, Callable[[str], None]] = {
            "/save": self._save,
            "/load": self._load,
            "/cells": self._cells,
            "/system": self._system,
        }

    def run(self, line: str) -> bool:
        """Does what a line says; returns False to leave the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        # a command is short, and must not be left half done
        signal.signal(signal.SIGINT, lambda *_: None)
        try:
            if name in self._with_text:
                self._with_text[name](rest)
            elif name not in self._plain and name not in ("/exit", "/quit"):
                self.terminal.error(f"there is no command {name}; /help lists them")
            elif rest:
                self.terminal.error(f"{name} takes nothing after it")
            elif name in self._plain:
                self._plain[name]()
            else:
                return False
        except KvtoolError as error:
            self.terminal.error(error)
        except KeyboardInterrupt:
            # while a model is hashed, for the first session
            self.terminal.note("stopped")
        return True

    def _undo(self) -> None:
        change = self.conversation.undo()
        if change is None:
            self.terminal.note("there is nothing to take back")
            return
        n_more = len(self.conversation.copies)
        more = f"; /undo can go back {n_more} more" if n_more else ""
        self.terminal.note(f"took back {change}; the chat has {turns(self.conversation.n_turn)}{more}")
        self.keeper.keep_session(undone=True)
        self.terminal.saved()

    def _reset(self) -> None:
        if self._remember("/reset"):
            self.conversation.reset(self.conversation.system)
            self._note_new("started over")

    def _system(self, text: str) -> None:
        if not text:
            self.terminal.console.print(self.conversation.system or "(none)")
        else:
            text = shown(text)
            self.conversation.check(text)
            if self._remember("/system"):
                self.conversation.reset(text)
                self.conversation.pin_system()
                self._note_new("started over under the new system prompt")
                if may_lose_system(self.conversation):
                    self.terminal.note(unpinned("the system prompt"))

    def _save(self, name: str) -> None:
        path = _path("/save", name)

        def may_replace(what: str) -> bool:
            return self.terminal.confirm(f"{what}. Replace it?")

        if self.keeper.save(path, may_replace):
            self.terminal.note(f"saved to {path}")
            self.terminal.saved()
        else:
            self.terminal.note("not saved")

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        meta, arrays = self.keeper.read(path)
        if not self._remember(f"/load {name}"):
            return
        self.conversation.restore(meta, arrays)
        self._note_new(f"continuing after {turns(self.conversation.n_turn)} of {path}")

    def _remember(self, change: str) -> bool:
        """Copies the chat for /undo; without room for a copy, asks whether to go on."""
        return self.conversation.remember(change) or self.terminal.confirm(
            f"There is no room for a copy, so /undo could not take {change} back. Go on?"
        )

    def _note_new(self, what: str) -> None:
        """Says that the chat is another one now, and where the one before is."""
        path = self.keeper.path
        kept = f"; {path} holds the previous chat until the next reply" if self.keeper.has_previous else ""
        self.terminal.note(f"{what}{kept}; /undo takes this back")

    def _cells(self, last: str) -> None:
        from kvtool.cli import inspect
        from kvtool.measure import holdings

        if last and not (last.isdecimal() and int(last)):
            self.terminal.error(f"/cells takes a number of tokens, like /cells {inspect.LAST}")
        elif not self.engine.n_past:
            self.terminal.note("nothing has been read yet")
        else:
            texts = holdings.texts(self.engine.model, self.conversation.writer.tokens)
            share, archived = self.engine.cells().share(), holdings.is_archived(self.engine)
            inspect.show(self.terminal.console, texts, share, archived, int(last or inspect.LAST))

    def _stats(self) -> None:
        from rich.table import Table

        from kvtool.measure.holdings import n_forgotten
        from kvtool.system.memory import rss_bytes
        from kvtool.units import format_bytes

        engine, copies = self.engine, self.conversation.copies
        resident = rss_bytes()
        rows = {
            "model": engine.model.path.name,
            "policy": policy_line(engine, self.terminal.policy),
            "tokens so far": f"{engine.n_past:,}",
            "cells": f"{engine.mean_kv:,.0f} of {engine.policy.budget:,} per row",
            "rows": str(engine.context.n_row),
            "pinned": f"{engine.n_pinned:,} tokens",
            "evicted": f"{engine.n_evicted:,} per row",
            "forgotten": f"{n_forgotten(engine):,} tokens, which "
            + ("neither a row nor the archive holds" if engine.policy.recall else "no row holds"),
            "positions": f"{engine.settings.positions}, gaps closed {engine.n_restart} times",
            "cache": format_bytes(engine.cache_bytes),
            "policy state": format_bytes(engine.host_bytes),
        }
        if engine.context.archive:
            rows["archive"] = archive_line(archive_record(engine))
        rows |= {
            "process memory": format_bytes(resident) if resident else "unknown",
            "copies for /undo": f"{len(copies)}, {format_bytes(copies.n_bytes)} on disk",
            "speed": f"{self.terminal.tokens_per_s:.1f} tokens/s",
        }
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        self.terminal.console.print(table)


def _path(command: str, name: str) -> Path:
    """The file that a command names. Raises SessionError where it names none."""
    if not name:
        raise SessionError(f"{command} needs a file")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise SessionError(f"there is no home folder for {name}") from None
