"""The prompt at which a user types turns and commands, with a history and completion.

A pasted text is one turn, even if it has several lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from kvtool.chats.archive_file import SUFFIX
from kvtool.cli.completion import is_session, sessions
from kvtool.errors import InputError
from kvtool.system.paths import expanded
from kvtool.system.texts import decoded, exists, with_lf

BLOCK = '"""'
"""This mark begins and ends a text of several lines."""

_OF_LINES = ("/system", "/edit")
"""Commands whose argument is a text, which may have several lines."""

_INSERTED = re.compile(r"""(?<![^\s("'\[{<])@(?:"([^"\n]+)"|(\S+))""")

_BEGUN = re.compile(r"""(?<![^\s("'\[{<])@(?:"([^"\n]*)|([^\s"]\S*)?)\Z""")
"""The beginning of a mark of `_INSERTED`, at the end of a text."""

_MARKS = ".,;:!?)\"']}>"
"""Characters that may follow the name of a file and do not belong to it."""

_TEXTS = re.compile(r"\.(txt|md|rst|tex|log|csv|jsonl?|ya?ml|toml|xml|html|py|c|h|cpp|rs|go|sh)$", re.I)
"""Endings of names of text files."""

Words = Callable[[], Iterable[str]]


class Prompt:
    """Asks the user for a turn or a command.

    commands: maps each slash command to a function that returns the words that may follow the command, or to
    None if a session file follows it.
    """

    def __init__(self, commands: Mapping[str, Words | None]) -> None:
        # True if the text at the prompt includes several pasted lines. It is then sent as it is
        self._is_pasted = False
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=_Completer(commands),
            complete_while_typing=False,
            key_bindings=self._keys(),
            enable_suspend=True,
            multiline=True,
            prompt_continuation="  ",
            enable_history_search=True,
        )
        self._session.default_buffer.on_text_changed += self._changed

    def ask(self, default: str = "") -> str:
        """Return the typed text. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C.

        Pasted lines are returned in the form in which they could be typed: see `typed_as`.

        default: text that is already at the prompt. The cursor is at its end.
        """
        self._is_pasted = False
        return self._session.prompt("\n> ", default=default)

    def _changed(self, buffer: Buffer) -> None:
        self._is_pasted &= bool(buffer.text)

    def _keys(self) -> KeyBindings:
        keys = _without_mouse()

        # while the user searches the history, prompt_toolkit itself handles Enter
        @keys.add("enter", filter=~is_searching)
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state and buffer.complete_state.current_completion:
                buffer.complete_state = None
            elif self._is_pasted:
                # the history stores this text, and a text from the history is treated as typed
                buffer.text = typed_as(buffer.text.rstrip("\n"))
                buffer.validate_and_handle()
            elif goes_on(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add(Keys.BracketedPaste, filter=~is_searching)
        def _(event: KeyPressEvent) -> None:
            buffer, text = event.current_buffer, with_lf(event.data)
            if buffer.selection_state:
                buffer.cut_selection()
            # a typed mark or command includes the text that is pasted after it
            if "\n" in text.strip() and not buffer.text.lstrip().startswith((BLOCK, *_OF_LINES)):
                self._is_pasted = True
            buffer.insert_text(text)

        # while text is selected, prompt_toolkit would wait for a second key after Ctrl-C and swallow it
        @keys.add("c-c", filter=~is_searching, eager=True)
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys

    def forget(self) -> bool:
        """Drop text that was typed before the prompt appeared. Return True if there was any."""
        typing = self._session.app.input
        dropped = get_typeahead(typing)
        # use raw mode, which can read an unfinished line; in this mode, Ctrl-D is an ordinary key
        with typing.raw_mode():
            while keys := typing.read_keys():
                dropped += keys
        return bool(dropped + typing.flush_keys())


def confirmed(question: str) -> bool:
    """Return True if the answer is "y" or "yes". Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
    # do not use input(): without readline, it misses a Ctrl-C right after the question appears
    session = PromptSession[str](key_bindings=_without_mouse(), enable_suspend=True)
    answer: str = session.prompt(question)
    return answer.strip().lower() in ("y", "yes")


def _without_mouse() -> KeyBindings:
    """Return key bindings that ignore the mouse.

    prompt_toolkit takes a pasted colour code, such as ESC[31m, for a mouse event, and fails to read it.
    """
    keys = KeyBindings()
    keys.add(Keys.Vt100MouseEvent)(lambda event: None)
    return keys


def meant(typed: str) -> tuple[str, bool]:
    '''Remove the quotes around a text of several lines and the backslashes at line ends.

    Returns the text, and True if it is a command. A single line is a command if it starts with a slash. A
    text of several lines is a command only if it starts with a command that takes a text. A text in `"""` is
    always a turn. A line that starts with `//` is a turn: only its first slash is removed.
    '''
    text = typed.strip()
    if text.startswith(BLOCK):
        text = text.removeprefix(BLOCK).removesuffix(BLOCK)
        return text.removeprefix("\n").removesuffix("\n"), False
    # remove only backslashes at line ends; all other backslashes belong to the text
    text = re.sub(r"\\\n", "\n", text)
    is_line = "\n" not in text
    if not text.startswith("/"):
        return text, False
    if is_line and text.startswith("//"):
        return text[1:], False
    name, *_ = text.split(maxsplit=1)
    return text, is_line or name in _OF_LINES


def typed_as(text: str) -> str:
    """Return a text that the user can type to send a turn with Enter: `meant` converts it to the turn."""
    ways = text, f"/{text}", f"{BLOCK}\n{text}\n{BLOCK}"
    return next((typed for typed in ways if meant(typed) == (text, False) and not goes_on(typed)), text)


def goes_on(typed: str) -> bool:
    '''Return True if Enter adds a line break and does not send the text.

    This is the case after a backslash, and while a text that started with `"""` has no closing `"""`.
    '''
    text = typed.lstrip()
    if text.startswith(BLOCK):
        return len(text) < 2 * len(BLOCK) or not text.rstrip().endswith(BLOCK)
    return typed.endswith("\\")


def with_files(
    text: str,
    inserted: Callable[[Path, str], None] = lambda path, text: None,
    missing: Callable[[str], None] = lambda name: None,
    kept: Collection[str] = (),
) -> str:
    """Return the text with each @PATH or @"PATH" replaced by the text of the file.

    Marks that enclose or follow @PATH stay in the text, as in "(@PATH)?".

    If there is no file PATH, @PATH stays in the text, because code has words like @name. There are two cases
    in which InputError is raised instead: PATH is in quotes, or the text is a single line and PATH is in an
    existing folder or ends like a text file. InputError is also raised if a file cannot be read, is empty or
    is not UTF-8.

    inserted: called with the path and the text of each file. missing: called with each PATH that stays in the
    text although it looks like a path. It is not called for a text of several lines.
    kept: marks of `marks_in` that stay in the text.
    """
    is_line = "\n" not in text

    def text_of(match: re.Match[str]) -> str:
        if match[0] in kept:
            return match[0]
        word = match[1] or match[2]
        name = word if match[1] else _without_marks(word)
        path = expanded(name)
        if not (name and exists(name)):
            folder = os.path.dirname(name)
            is_path = _TEXTS.search(name) or (folder and exists(folder))
            if match[1] or (is_line and is_path):
                raise InputError(f"there is no file {name}")
            if is_line and re.search(r"[/\\]|\.\w+$", name):
                missing(name)
            return match[0]
        # a pipe may give no text, and a device may give text without end
        if not (path.is_file() or path.is_dir()):
            raise InputError(f"cannot read {path}: it is not a regular file")
        try:
            file_text = decoded(path.read_bytes()).rstrip("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a text in UTF-8 (byte {error.start})") from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
        if not file_text.strip():
            raise InputError(f"{path} is empty; it must be a text")
        inserted(path, file_text)
        return file_text + word[len(name) :]

    return _INSERTED.sub(text_of, text)


def marks_in(text: str) -> set[str]:
    """Return each @PATH and @"PATH" in a text, with the characters that follow it up to a blank."""
    return {match[0] for match in _INSERTED.finditer(text)}


def _without_marks(word: str) -> str:
    """Remove marks from the end of a word until the rest names a file.

    If there is no such file, all marks are removed from the end. The result is "" if a word has only marks.
    """
    least = word.rstrip(_MARKS)
    starts = (word[:n] for n in range(len(word), len(least), -1) if least)
    return next((start for start in starts if exists(start)), least)


def _history() -> History:
    """Return a history in the user's state folder, or in memory if that folder cannot be written."""
    try:
        path = user_state_path("kvtool", appauthor=False) / "chat-history"
        path.parent.mkdir(parents=True, exist_ok=True)
        # create a file that only the user may read
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return _File(str(path))


class _File(FileHistory):
    def store_string(self, string: str) -> None:
        # a full disk must not end the chat
        with suppress(OSError, UnicodeError):
            super().store_string(string)


class _Completer(Completer):
    """Completes commands, the words and session files that may follow them, and paths after @."""

    def __init__(self, commands: Mapping[str, Words | None]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True, file_filter=_may_be_text)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        name, blank, rest = text.partition(" ")
        if "\n" not in text and text.startswith("/"):
            if not blank:
                yield from _starting(self._commands, text)
            elif name in self._commands:
                words = self._commands[name]
                yield from _starting(sessions(rest) if words is None else words(), rest)
        elif begun := _BEGUN.search(text):
            start = begun[1] or begun[2] or ""
            for each in self._paths.get_completions(Document(start), event):
                is_folder = each.display_text.endswith("/")
                path = start + each.text + "/" * is_folder
                if " " in path or begun[1] is not None:
                    # the quotation marks of a folder stay open, so that Tab can complete its files
                    path = f'"{path}' + '"' * (not is_folder)
                yield Completion(f"@{path}", -len(begun[0]), display=each.display)


def _may_be_text(path: str) -> bool:
    """Return False for a session, its archive, and an empty file such as its lock."""
    with suppress(OSError):
        is_filled = os.path.isdir(path) or os.path.getsize(path) > 0
        return is_filled and not is_session(Path(path.removesuffix(SUFFIX)))
    return False


def _starting(words: Iterable[str], start: str) -> Iterator[Completion]:
    return (Completion(word, -len(start)) for word in words if word.startswith(start))
