"""A chat in a terminal: replies, notes, and a status line."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.chats.conversation import Conversation
from kvtool.chats.thinking import without_thought
from kvtool.cli.chat.files import ChatFiles, turns
from kvtool.cli.chat.input import confirmed, marks_in, typed_as, with_files
from kvtool.cli.chat.keys import Keys
from kvtool.cli.console import plain_console
from kvtool.cli.writing import end_note
from kvtool.errors import InputError, ModelError, StreamEnd, UsageError
from kvtool.system import interrupt
from kvtool.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from kvtool.chats.undo import LastTurn
    from kvtool.cli.explain import Notice
    from kvtool.engine.loop import Engine

_CANCELLED = "cancelled; the chat is as it was before"

_N_LINES = 8
"""When a chat is continued, at most this many lines of the last turn are shown."""


@dataclass
class Terminal:
    """A chat in a terminal: reads turns, and shows the replies.

    Attributes
    ----------
    policy
        Name of the policy, as the user typed it.
    notice
        Reports that the archive is full. None to report nothing.
    tokens_per_s
        Speed of the last reply; 0 if the reply has at most one token.
    typed
        Text to put at the next prompt.
    edits
        True if the next turn replaces the last turn.
    typed_of
        Maps turns to the texts that the user typed for them in this process. In a turn, each @FILE is
        replaced by the text of the file.
    """

    conversation: Conversation
    files: ChatFiles
    policy: str
    notice: Notice | None = None
    plain: bool = False
    hide_thinking: bool = False
    thought: str = ""
    typed: str = ""
    edits: bool = False
    tokens_per_s: float = 0.0
    typed_of: dict[str, str] = field(default_factory=dict)
    console: Console = field(default_factory=plain_console)
    keys: Keys = field(default_factory=Keys)
    # `version` of the chat when the user last wanted to leave it with unsaved turns, or None
    _left: int | None = None

    def __post_init__(self) -> None:
        if self.plain:
            self.console = plain_console(color_system=None)

    @property
    def engine(self) -> Engine:
        return self.conversation.writer.engine

    def note(self, text: str) -> None:
        self.console.print(text, style="dim")

    def error(self, text: object) -> None:
        self.console.print(f"{text}", style="red")

    def confirm(self, question: str) -> bool:
        """Ask a question. Return True if the answer is "y" or "yes"."""
        try:
            with interrupt.raising(), self.keys.normal():
                return confirmed(f"{question} [y/N] ")
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return False

    def status(self) -> str:
        """Return a line about the chat: its length, where its tokens are, the cache size and the speed."""
        from kvtool.measure.holdings import n_forgotten

        engine = self.engine
        parts = [
            whereabouts(engine.n_past, engine.mean_live, engine.n_archived, n_forgotten(engine)),
            f"cache {format_bytes(engine.cache_bytes)}",
            f"{self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else "",
        ]
        return " \u00b7 ".join(filter(None, parts))

    def saved(self) -> None:
        """Report an error of the last save, and the new names of files that the save moved."""
        if self.files.unsaved:
            self.error(self.files.unsaved)
        if self.files.previous_path:
            self.note(f"the previous chat of {self.files.path} is now in {self.files.previous_path.name}")
        if moved := self.files.moved_line():
            self.note(moved)
        for spare in self.files.recovered:
            # if `spare` is FILE.1, its stem is FILE
            self.note(f"the chat of {spare.name} is in {spare.stem} again")

    def may_leave(self) -> bool:
        """Return True if the chat may end. If turns could not be saved, return False once, and say how to."""
        n, version = self.files.n_unsaved, self.conversation.version
        if not n or self._left == version:
            return True
        self._left = version
        self.error(
            f"{turns(n)} {'was' if n == 1 else 'were'} not saved; /save FILE saves the chat in another file, "
            "and /exit leaves without them"
        )
        return False

    def show_last(self) -> None:
        """Show the last turn and its reply again."""
        from kvtool.cli.chat.reply import ReplyView

        user, reply = [each["content"] for each in self.conversation.messages][-2:]
        lines = user.split("\n")
        # the first lines are enough to recognize a long text
        lines[_N_LINES:] = ["..."] * (len(lines) > _N_LINES)
        self.console.print("\n> " + "\n  ".join(lines) + "\n")
        hides = self.hide_thinking or not self.plain
        splitter = self.conversation.splitter_of(reply)
        with ReplyView(self.console, splitter, plain=self.plain, hide=hides) as out:
            out.write(reply)

    def say(self, text: str, *, again: bool = False) -> None:
        """Read a turn, and show the reply while the model writes it.

        again: the turn replaces the last turn.
        """
        notes = list[str]()
        replaced = self.conversation.last_turn() if again else None
        turn = self.conversation.newest_turn if again else None
        # this turn may have words of a file that an earlier process inserted: they insert no other file
        kept = marks_in(turn) if turn and turn not in self.typed_of else ()

        def note(path: Path, text: str) -> None:
            n = len(self.engine.model.tokenize(text, start=False))
            notes.append(f"inserted {path}, {format_tokens(n)}")

        try:
            # reading a long file and counting its tokens takes seconds
            with interrupt.raising():
                sent = with_files(
                    text,
                    note,
                    lambda name: notes.append(f"there is no file {name}; it is sent as typed"),
                    kept,
                )
        except KeyboardInterrupt:
            self.note(_CANCELLED)
            self._offer_again(text, again)
            return
        except (InputError, UsageError) as error:
            self.error(f"{error}; nothing was sent")
            self._offer_again(text, again)
            return
        for line in notes:
            self.note(line)
        if not kept:
            self.typed_of.setdefault(sent, text)
        self._turn(text, sent, replaced)

    def reply_again(self, turn: str, begun: str = "") -> None:
        """Let the model write another reply to the last turn. begun: see `Conversation.read_turn`."""
        self._turn(self.typed_of.get(turn, turn), turn, self.conversation.last_turn(), begun)

    def _turn(self, text: str, sent: str, replaced: LastTurn | None, begun: str = "") -> None:
        """Read a turn, show and save its reply, and print notes. For the arguments, see `_replied`."""
        writer = self.conversation.writer
        signal.signal(signal.SIGINT, lambda *_: setattr(writer, "stop", True))
        with interrupt.terminating(writer) as ended:
            if not self._replied(text, sent, replaced, begun, ended):
                return
            if writer.stop:
                # Ctrl-C may come after the end of the reply
                goes_on = writer.unfinished is not None
                self.note("stopped" + "; /continue goes on" * goes_on)
            elif why := end_note(
                writer,
                self.files.generation,
                "reply",
                is_empty=self._is_empty,
                thought=bool(self.thought),
                in_terminal=True,
            ):
                self.note(why)
            if self.notice and (full := self.notice.after()):
                self.note(full)
            self.saved()
            self.note(self.status())

    def _replied(
        self, text: str, sent: str, replaced: LastTurn | None, begun: str, ended: Callable[[], bool]
    ) -> bool:
        """Read a turn, show the reply, and save the turn with its reply.

        If the turn was taken back, restore the state before it, print a note, and return False.

        text: the typed turn. sent: the turn in which each @FILE is replaced by the file's text.
        replaced: the turn that this turn replaces, or None. begun: see `Conversation.read_turn`.
        ended: a function that returns True if a signal ends the process after the turn.
        """
        conversation, again = self.conversation, replaced is not None
        continued = replaced.messages if replaced and begun else ()
        keep = partial(self.files.keep, undone=again, continued=continued)
        # the number of turns, and the thought, if this turn is taken back
        n_others, thought = conversation.n_turn - again, self.thought
        self.thought, self.tokens_per_s = "", 0.0
        try:
            is_read = self._read_turn(sent, replaced, begun)
            if is_read:
                # the blank line also separates the reply from lines about the reading
                self.console.print()
                self._answer(keep)
            # if a signal ends the process, a turn that was read stays
            is_cancelled = conversation.writer.stop and not (ended() or conversation.has_written)
            if not is_read or is_cancelled:
                self._restore(replaced, n_others, thought)
                self.note(_CANCELLED)
                if replaced and sent != conversation.newest_turn:
                    # keep the edited turn at the prompt: the user can send it again, or press Ctrl-C
                    self._offer_again(text, again)
                return False
        except (ModelError, StreamEnd, UsageError) as error:
            why = self.files.advice(error) if isinstance(error, StreamEnd) else error
            undo = "take back turns with /undo N, or " if isinstance(error, StreamEnd) and n_others else ""
            self.error(f"{why}; or {undo}start over with /reset")
            # the error may come before the turn is in the chat; a turn without a reply does not stay there
            is_added = conversation.n_turn > n_others
            if not is_added or (self._is_empty and not self.thought):
                self._restore(replaced, n_others, thought)
                self.note("the turn was not answered; the chat is as it was before")
                if not begun:
                    self._offer_again(text, again)
                return False
        keep()
        return True

    def _read_turn(self, text: str, replaced: LastTurn | None, begun: str) -> bool:
        """Read a turn and show the progress. Return False if the user stopped reading."""
        from rich.text import Text

        from kvtool.cli.progress import ProgressLine

        writer, progress, stopping = self.conversation.writer, ProgressLine("reading"), Text("stopping")

        def show(done: int, n: int) -> None:
            line.update(stopping if writer.stop else Text(progress.line(done, n)))

        with (
            self.console.status(Text("reading")) as line,
            interrupt.notifying(lambda: line.update(stopping)),
            writer.showing(show),
        ):
            return self.conversation.read_turn(text, replaced, begun)

    def _answer(self, keep: Callable[[], None]) -> None:
        """Show the reply while the model writes it. If the terminal is closed meanwhile, call `keep`."""
        from kvtool.cli.chat.reply import ReplyView

        writer, splitter = self.conversation.writer, self.conversation.splitter_after_begun()
        view = ReplyView(self.console, splitter, plain=self.plain, hide=self.hide_thinking)
        view.resume(self.conversation.splitter().feed(self.conversation.header.begun))
        started = time.monotonic()
        writer.ends_loops = self.files.generation.stop_loops == "on"
        try:
            # if the terminal is closed, `view.write` raises an error. `closing` then closes the generator
            # `pieces`, which adds the reply so far to the chat
            with view, closing(self.conversation.answer(self.files.generation.n)) as pieces:
                if self.plain and not self.hide_thinking:
                    view.write(self.conversation.opening)
                for piece in pieces:
                    view.write(piece)
        except OSError:
            if not self._is_empty:
                keep()
            raise
        finally:
            n, seconds = writer.n_written - 1, time.monotonic() - started
            self.tokens_per_s = n / seconds if n > 0 and seconds > 0 else 0.0
            self.thought = view.thought

    @property
    def _is_empty(self) -> bool:
        """True if the last reply has no answer."""
        content = self.conversation.messages[-1]["content"]
        return not without_thought(content, self.conversation.splitter_of(content)).strip()

    def _offer_again(self, text: str, again: bool) -> None:
        """Put a refused turn at the next prompt.

        again: True if the turn was to replace the last turn. The user can then edit the refused turn, and the
        next turn still replaces the last turn. False for a new turn. It is put at the prompt only if it is a
        single line.
        """
        self.typed = typed_as(text) if again or "\n" not in text else ""
        self.edits = again

    def offer(self, turn: str) -> None:
        """Put a turn at the next prompt, as the user typed it."""
        self.typed = typed_as(self.typed_of.get(turn, turn))

    def _restore(self, replaced: LastTurn | None, n_others: int, thought: str) -> None:
        """Take a turn back, and restore the state before it. n_others: number of turns without this turn."""
        if replaced:
            self.conversation.put_back(replaced)
        elif self.conversation.n_turn > n_others:
            self.conversation.undo_turn()
        self.thought = thought


def whereabouts(n: int, n_held: float, n_archived: int, n_forgotten: int) -> str:
    """Return a line about a chat of n tokens: the shares that are cached, archived and forgotten.

    If the KV heads have cached different tokens, these three shares do not add up to 100 %. The line then has
    two shares: how much a KV head has cached in the mean, and how much is forgotten.

    n_held: mean number of tokens that a KV head of a layer has cached. n_forgotten: number of tokens that no
    KV head has cached and that are not archived.
    """
    held, forgotten = share(n_held / max(n, 1)), share(n_forgotten / max(n, 1))
    if n_held + n_archived + n_forgotten != n:
        return f"{n:,} tokens: each KV head keeps {held}, {forgotten} is forgotten"
    archived = f"{share(n_archived / n)} archived, " if n_archived else ""
    return f"{n:,} tokens: {held} in the cache, {archived}{forgotten} forgotten"


def share(part: float) -> str:
    """Format a share in percent. The text is "100 %" only for 1, and "0 %" only for 0."""
    percent = 100 * part if part in (0, 1) else min(max(100 * part, 0.1), 99.9)
    return f"{percent:.0f} %" if part in (0, 1) else f"{percent:.1f} %"
