"""The commands of a chat: lines that start with a slash."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from kvtool.chats.undo import turn_label
from kvtool.cli.chat import show
from kvtool.cli.chat.files import rereading, turns
from kvtool.cli.explain import may_lose_system, unpinned
from kvtool.config.generation import EFFORTS, GenerationOptions
from kvtool.errors import KvtoolError, SessionError, UsageError, suggestion
from kvtool.options import declared
from kvtool.system import interrupt
from kvtool.system.paths import expanded
from kvtool.system.texts import shown, with_lf

if TYPE_CHECKING:
    from kvtool.cli.chat.screen import Terminal

_DEFAULT = "default"
"""`/think default` returns to the default of the model's chat template, `/set NAME default` to kvtool's."""

_HOT = 2
"""Above this temperature, replies make no sense.

kvtool and llama.cpp allow higher values, but other programs refuse them.
"""

_MORE = "more"
"""A topic of /help that is not the name of a command."""

KEYS = 'Ctrl-C stops a reply. @FILE inserts a text. """ begins and ends a turn of several lines.'
NOTES = (
    "A pasted text is one turn. To type several lines, end a line with a backslash, press Alt-Enter, or put "
    'the text between """ and """. @FILE inserts the text of a file. // begins a turn with a slash. Tab '
    "completes commands and paths; Ctrl-R searches what you typed before. Ctrl-C stops a reply and keeps it; "
    "while a turn is read, it takes the turn back. Ctrl-Z suspends kvtool.",
    "/undo takes back any number of turns, also those of a session's earlier runs (after --reread only the "
    "last one), and up to 3 changes by /reset, /system and /load. For these changes it keeps copies of the "
    "chat on disk, and deletes them when you leave.",
    "With --session FILE, the file is written after every reply and /undo. /reset, /system and /load "
    "do not change it: the next reply first moves the chat in it to FILE.1 (FILE.2, ...).",
)


class Slash(NamedTuple):
    """A command of a chat. `SLASHES` lists all commands.

    Attributes
    ----------
    usage
        Names of the command, separated by ", ", and its argument if it takes one: "/undo [N]".
    help
        What /help shows next to the usage.
    run
        Called with the commands and, if the command takes one, the typed argument, which is "" if the user
        typed none. None for the command that leaves the chat.

        The argument may contain surrogates, because a terminal without UTF-8 may send invalid bytes. A path
        needs them; any other text has to go through `shown`.
    words
        Function that returns the words that may follow the command. None if a session file follows.
    """

    usage: str
    help: str
    run: Callable[..., None] | None
    words: Callable[[], Iterable[str]] | None = tuple

    @property
    def names(self) -> list[str]:
        return re.findall(r"/[\w?-]+", self.usage)

    @property
    def takes_text(self) -> bool:
        return " " in self.usage.split(", ")[-1]


class Commands:
    """Runs commands of a chat in a terminal. An error is reported in one line, and the chat continues."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.conversation = terminal.conversation
        self.files = terminal.files

    def run(self, line: str) -> bool:
        """Run the command in a line. Return False if the user leaves the chat."""
        typed, *text = line.split(maxsplit=1)
        rest = "".join(text)
        command = OF_NAME.get(typed.lower())
        # ignore Ctrl-C, so that no command stops halfway
        interrupt.ignores()
        try:
            if command is None:
                self._refuse(typed, shown(line))
            elif rest and not command.takes_text:
                self.terminal.error(f"{typed} takes no argument")
            elif command.run is None:
                return False
            elif command.takes_text:
                command.run(self, rest)
            else:
                command.run(self)
        except KvtoolError as error:
            self.terminal.error(error)
        except KeyboardInterrupt:
            # Ctrl-C raises this error only while the model is hashed
            self.terminal.note("stopped")
        return True

    def _refuse(self, name: str, line: str) -> None:
        """Report an unknown command.

        If its name contains another slash, it may be a path with which a turn begins. In that case, ask the
        user whether to send the line to the model.
        """
        if "/" in name[1:]:
            if self.terminal.confirm(f"There is no command {name}. Send the line to the model?"):
                self.terminal.say(line)
        else:
            self.terminal.error(f"there is no command '{name}'{self._meant(name.lower())}")

    @staticmethod
    def _meant(name: str) -> str:
        """Return the end of the message about an unknown command: what the user may have meant.

        If the name without its slash is an argument of a command, this is the command with this argument,
        such as "/set temp" for "/temp". Otherwise it is the commands with similar names.
        """
        for command, its in OF_NAME.items():
            if its.words is not None and name[1:] in its.words():
                return f". Did you mean {command} {name[1:]}?"
        shown = {command[1:]: command for command in OF_NAME}
        hint = suggestion(name[1:], shown, shown)
        return f".{hint}" if hint else "; /help lists them"

    def _help(self, topic: str) -> None:
        """Show help on all commands, on one command, or on typing and files ("more").

        topic: a command, "more", or "" for all commands. Raises UsageError for any other text.
        """
        name = f"/{topic.removeprefix('/').lower()}"
        chosen = [each for each in SLASHES if not topic or name in each.names]
        if topic == _MORE:
            texts: Sequence[str] = NOTES
        elif not chosen:
            raise UsageError(f"/help takes a command or `{_MORE}`; there is no command {topic}")
        else:
            show.two_columns(self.terminal, {each.usage: each.help for each in chosen}, dim=False)
            texts = () if topic else (KEYS,)
        for text in texts:
            self.terminal.console.print(text)

    def _undo(self, text: str) -> None:
        n = show.count(text, 1, "/undo takes a number of changes, like /undo 2")
        n_all = len(self.conversation.undo_stack)
        if 0 < n_all < n:
            raise UsageError(f"/undo can take back at most {n_all} change{'s' * (n_all != 1)}, not {n}")
        changes = [change for _ in range(min(n, n_all)) if (change := self._undo_one()) is not None]
        if not changes:
            n_turn = self.conversation.n_turn
            stay = f"/undo cannot go back further: the chat still has {turns(n_turn)}"
            self.terminal.note(stay if n_turn else "there is nothing to undo")
            return
        n_more = len(self.conversation.undo_stack)
        more = f"; /undo can take back {n_more} more" if n_more else ""
        undone = (
            changes[0] if len(changes) == 1 else f"{len(changes)} changes, the oldest of them {changes[-1]}"
        )
        self.files.keep_session(undone=True)
        has = f"the chat has {turns(self.conversation.n_turn)}"
        self.terminal.note(f"took back {undone}; {has}{more}{self._previous()}")
        self.terminal.saved()

    def _undo_one(self) -> str | None:
        """Take back the last change, and return its name; None if there is none. See `Conversation.undo`."""
        if (turn := self.conversation.undo_turn()) is not None:
            return turn_label(self.terminal.typed_of.get(turn, turn))
        return self.conversation.undo()

    def _retry(self) -> None:
        self.terminal.reply_again(self._last_turn())

    def _continue(self) -> None:
        self.terminal.reply_again(self._last_turn(), self.conversation.unfinished_reply())

    def _edit_last(self) -> None:
        self.terminal.offer(self._last_turn())
        self.terminal.edits = True
        self.terminal.note("send the edited turn to replace the last one, or press Ctrl-C to keep it")

    def _last_turn(self) -> str:
        """Return the last turn. Raises UsageError if it cannot be changed."""
        text = self.conversation.newest_turn
        if text is None:
            raise UsageError(
                "the last turn can no longer be changed"
                if self.conversation.n_turn
                else "the chat has no turns"
            )
        return text

    def _edit(self, text: str) -> None:
        import click

        try:
            written = click.edit(shown(text), extension=".md")
        except UnicodeDecodeError as error:
            raise UsageError(f"the editor returned a text that is not UTF-8 (byte {error.start})") from None
        except click.ClickException as error:
            why = error.message
            if isinstance(error.__cause__, OSError):
                # click's message ends with Python's error text and number; give only the reason instead
                why = f"{why.partition(':')[0]} cannot be started: {error.__cause__.strerror}"
            raise UsageError(f"{why}; set $EDITOR to an editor that works") from None
        if text := with_lf(written or "").strip():
            self.terminal.console.print("> " + text.replace("\n", "\n  "))
            self.terminal.say(text)
        else:
            self.terminal.note("the editor returned no text, so nothing was sent")

    def _set(self, text: str) -> None:
        name, given = _name_and_value(text)
        value = given[1:-1] if len(given) > 1 and given[0] == given[-1] in "\"'" else given
        if not text:
            show.settings(self.terminal)
            return
        self._check_start(name, value)
        name = GenerationOptions.field(name)
        if name == "think":
            self._think(value)
            return
        # a text in quotes is never the word `default`
        new = None if given.lower() == _DEFAULT else value
        if given and name == "think_budget":
            # some templates put the thinking budget into the prompt: if it changes, the model has to read the
            # chat again
            budget = self.files.generation.set(name, new).think_budget
            if not self._rethink(self.conversation.effort, budget, f"/set {name} {value}"):
                return
        if given:
            self.files.set(name, new)
        self.terminal.note(f"{name}  {show.setting(self.terminal, name)}")
        if given and name == "temp" and self.files.generation.temp > _HOT:
            self.terminal.note(
                f"above {_HOT} a reply is mostly random words; the default is {GenerationOptions.temp:g}"
            )

    def _check_start(self, name: str, value: str) -> None:
        """Raise UsageError if `name` is an option of kvtool chat that cannot change while the chat runs."""
        if name == "system":
            raise UsageError("/system TEXT starts over with another system prompt")
        for option in declared(type(self.files.run)).values():
            if option.is_called(name):
                path = self.files.path if self.conversation.n_turn else None
                again = rereading(path) if path else None
                call = " ".join(filter(None, ("kvtool chat", again, option.name, value and quote(value))))
                raise UsageError(f"{name} is fixed when a chat starts; leave with /exit and start `{call}`")

    def _reset(self) -> None:
        if self._remember("/reset"):
            self.conversation.reset(self.conversation.system)
            self._note_new("started over")

    def _system(self, text: str) -> None:
        if not text:
            show.system(self.terminal)
        else:
            text = shown(text)
            self.conversation.check_system(text)
            if self._remember("/system"):
                self.conversation.reset(text)
                self.conversation.pin_system()
                self._note_new("started over under the new system prompt")
                if may_lose_system(self.conversation):
                    self.terminal.note(unpinned("the system prompt"))

    def _think(self, text: str) -> None:
        chat = self.conversation
        if text:
            option = declared(GenerationOptions)["think"]
            effort = None if text.lower() == _DEFAULT else option.parse(text)
            option.check(effort, "/think")
            if not self._rethink(effort, chat.thought_budget, f"/think {text}"):
                return
        taken = f"the model's chat template takes {chat.efforts.taken}"
        does = taken if chat.efforts.has_thoughts or chat.efforts.levels else "this model does not think"
        self.terminal.note(f"think  {show.setting(self.terminal, 'think')}; {does}")

    def _rethink(self, effort: str | None, budget: int | None, change: str) -> bool:
        """Change how much the model thinks before a reply. Return False if nothing was changed.

        If the model's template then renders earlier turns differently, the chat is first copied: see
        `_remember`.

        change: the command that the user typed. /undo shows it.
        """
        chat = self.conversation
        again = chat.rereads(effort, budget)
        if again and not self._remember(change):
            return False
        chat.set_effort(effort, budget)
        if again:
            self.terminal.note("the next turn first reads the chat again, because its text has changed")
        return True

    def _save(self, name: str) -> None:
        path = _path("/save", name)
        if self.files.save(path, lambda description: self.terminal.confirm(f"{description}. Replace it?")):
            self.terminal.note(f"saved to {path}")
            self.terminal.saved()
        else:
            self.terminal.note("not saved")

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        meta, arrays = self.files.read(path)
        if not self._remember(f"/load {name}"):
            return
        before = self.files.generation
        self.files.continue_chat(meta, arrays)
        self._note_new(f"continuing after {turns(self.conversation.n_turn)} of {path}")
        # effort and budget are the session's; the other settings stay
        for setting in ("think", "think_budget"):
            if getattr(before, setting) != getattr(self.files.generation, setting):
                self.terminal.note(f"{setting}  {show.setting(self.terminal, setting)}")
        if self.conversation.n_turn:
            self.terminal.show_last()

    def _remember(self, change: str) -> bool:
        """Copy the chat for /undo.

        If the disk has no room for a copy, ask the user whether to go on without a copy. Return False if the
        user does not want to go on. change: the command that is about to change the chat.
        """
        return self.conversation.remember(change) or self.terminal.confirm(
            f"There is no disk space for a copy, so /undo could not take {change} back. Continue?"
        )

    def _note_new(self, change: str) -> None:
        """Tell the user that another chat has begun, and which file holds the previous chat."""
        # /undo first takes back the turns of a loaded chat
        n = len(self.conversation.undo_stack.turn_ends)
        self.terminal.note(f"{change}{self._previous()}; /undo{f' {n + 1}' if n else ''} takes this back")

    def _previous(self) -> str:
        """Return the end of a note: the file that holds the previous chat. "" if there is no such file."""
        path, has_it = self.files.path, self.files.has_previous
        return f"; {path} holds the previous chat until the next reply" if has_it else ""


SLASHES: tuple[Slash, ...] = (
    Slash(
        "/help, /? [NAME]",
        "show this help; /help more explains typing, /undo and sessions",
        Commands._help,
        lambda: (_MORE, *(name.removeprefix("/") for name in OF_NAME)),
    ),
    Slash(
        "/stats",
        "show what the cache holds, its size in bytes, and the speed",
        lambda self: show.stats(self.terminal),
    ),
    Slash(
        "/show NAME",
        "show system, settings, template, policy, thought or last (turn)",
        lambda self, name: show.show(self.terminal, name),
        lambda: show.SHOWN,
    ),
    Slash(
        "/set [NAME X]",
        "show or change a sampling setting or n; `default` resets it",
        Commands._set,
        lambda: declared(GenerationOptions),
    ),
    Slash("/retry", "take back the last reply and write another one", Commands._retry),
    Slash("/continue", "go on with a reply that Ctrl-C or the limit n has cut", Commands._continue),
    Slash("/edit-last", "edit the last turn; the new turn replaces it", Commands._edit_last),
    Slash("/edit [TEXT]", "write the next turn in $EDITOR", Commands._edit),
    Slash("/undo [N]", "take back the last N changes: turns, /reset, /system, /load", Commands._undo),
    Slash(
        "/save FILE",
        "save the chat to a file; asks before replacing another chat",
        Commands._save,
        words=None,
    ),
    Slash("/load FILE", "continue the chat that a file holds", Commands._load, words=None),
    Slash(
        "/cells [N]",
        "show the last N tokens, coloured by how many rows hold each",
        lambda self, last: show.cells(self.terminal, last),
    ),
    Slash("/reset, /clear", "forget everything and start over; the system prompt stays", Commands._reset),
    Slash(
        "/think [EFFORT]",
        "change how much replies think: on, off, low, high, ...; alone, show it",
        Commands._think,
        lambda: (*EFFORTS, _DEFAULT),
    ),
    Slash("/system [TEXT]", "start over with another system prompt; alone, show it", Commands._system),
    Slash("/exit, /bye, /quit", "leave; so does Ctrl-D", None),
)
"""All commands, in the order of /help.

In a terminal of 80 columns, /help must not take more than 21 rows, so that it can be seen whole with the
prompt below it. A command whose argument may have several lines is also in `input._OF_LINES`.
"""

OF_NAME: dict[str, Slash] = {name: command for command in SLASHES for name in command.names}
"""Commands by each of their names."""


def _name_and_value(text: str) -> tuple[str, str]:
    """Split "NAME VALUE", "NAME=VALUE" or "NAME = VALUE". Any other = belongs to the value."""
    name, _, value = re.sub(r"^([^\s=]+)(?:=|\s+=(?=\s)|\s)", r"\1 ", text).partition(" ")
    return name, value.strip()


def _path(command: str, name: str) -> Path:
    """Return the path that follows a command. Raises SessionError if no path was given."""
    if not name:
        raise SessionError(f"{command} needs a file")
    return expanded(name)
