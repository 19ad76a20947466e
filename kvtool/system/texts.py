"""Read texts and names from outside. They are UTF-8 in every locale.

The lines of prompts and chats end with LF. A text that is measured keeps its line ends (`TextSource`).
"""

from __future__ import annotations

import os
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import closing
from math import isfinite
from typing import Any

from kvtool.errors import InputError, UsageError
from kvtool.system.paths import expanded

_CONVERT = "convert it first, for example with iconv"
_BLOCK = 2**16
"""Number of bytes that are read first, to check that a file is text."""


def with_lf(text: str) -> str:
    """Convert every CRLF and every other CR to LF, as Python does when it reads a text file."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decoded(data: bytes) -> str:
    """Decode UTF-8. Remove a byte order mark, and convert line ends to LF. Raises UnicodeDecodeError."""
    return with_lf(data.decode("utf-8-sig"))


def utf8(flag: str, text: str | None) -> str | None:
    """Decode the text of an option, and convert its line ends to LF. Raises UsageError if it is not UTF-8."""
    if text is None:
        return None
    try:
        # in an ASCII locale, Python has replaced each byte that is not ASCII by a surrogate
        return with_lf(text.encode("utf-8", "surrogateescape").decode())
    except UnicodeDecodeError:
        raise UsageError(f"the text of {flag} is not UTF-8; {_CONVERT}") from None


def shown(text: object) -> str:
    """Return a text or path in which U+FFFD replaces all bytes that are not UTF-8."""
    return str(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def first_words(text: str) -> str:
    """Return the beginning of a text on one line, in at most 40 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 40 else words[:39] + "\u2026"


def json_text(value: Any, indent: int | None = None) -> str:
    """Encode a value as ASCII JSON. NaN and infinite numbers become null; for paths, see `shown`."""
    import json

    return json.dumps(_cleaned(value), indent=indent, allow_nan=False)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else shown(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_stdin() -> str:
    """Read all of stdin, and remove line breaks at the end. "" if stdin is a terminal. Raises InputError."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        data = sys.stdin.buffer.read()
        _refuse_other_data(data, "stdin")
        return decoded(data).rstrip("\n")
    except OSError as error:
        raise InputError(f"cannot read stdin: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start}); {_CONVERT}") from None


def _refuse_other_data(data: bytes, name: str) -> None:
    """Raise InputError if the data is UTF-16 or has a NUL byte. name: name of the text in the message."""
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InputError(f"{name} is UTF-16, not UTF-8; {_CONVERT}")
    if b"\0" in data:
        raise InputError(f"{name} is binary; it must be a text")


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they arrive, without line breaks. Raises InputError."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = decoded(line) if number == 1 else with_lf(line.decode())
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8 (line {number}, byte {error.start}); {_CONVERT}") from None
        # split the text again, because a CR inside it also ends a line
        yield from text.removesuffix("\n").split("\n")


class TextSource:
    """A text from a file, a named pipe or stdin. Only the necessary part of the text is read.

    Line ends are not converted. Otherwise, the text would differ, and its perplexity could not be compared
    with earlier results or with other programs.

    name: name of the text in messages. Raises InputError if the text cannot be read, or if its first bytes
    are not text in UTF-8.
    """

    def __init__(self, file: str) -> None:
        self.name = "stdin" if is_stdin(file) else file
        self.is_whole = False
        self._data = b""
        try:
            # use Python's buffer of stdin, because it may already hold the first bytes
            self._file = sys.stdin.buffer if is_stdin(file) else expanded(file).open("rb")
        except OSError as error:
            raise self._cannot_read(error) from None
        self._closes = not is_stdin(file)
        try:
            self.start(_BLOCK)
        except InputError:
            self.close()
            raise

    def start(self, n_bytes: int | None = None) -> str:
        """Read until n_bytes bytes are available (None: all), and return the text of all bytes read so far.

        If the last character is incomplete, it is left out. Raises InputError.
        """
        try:
            missing = -1 if n_bytes is None else max(n_bytes - len(self._data), 0)
            new = b"" if self.is_whole else self._file.read(missing)
        except OSError as error:
            raise self._cannot_read(error) from None
        self._data += new
        self.is_whole = self.is_whole or missing < 0 or len(new) < missing
        if self.is_whole and not self._data.strip():
            what = "has only white space" if self._data else "is empty"
            raise InputError(f"{self.name} {what}; it must be a text")
        _refuse_other_data(self._data, self.name)
        try:
            return getincrementaldecoder("utf-8-sig")().decode(self._data, final=self.is_whole)
        except UnicodeDecodeError as error:
            raise InputError(f"{self.name} is not UTF-8 (byte {error.start}); {_CONVERT}") from None

    def close(self) -> None:
        """Close the file. If it is stdin, it stays open."""
        if self._closes:
            self._file.close()

    def _cannot_read(self, error: OSError) -> InputError:
        return InputError(f"cannot read {self.name}: {error.strerror}")


def is_stdin(file: str) -> bool:
    """Return True if `file` is one of the names of stdin.

    Read stdin from `sys.stdin.buffer` and not by its name, because the buffer may already hold the first
    bytes.
    """
    return file in ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def exists(name: str) -> bool:
    """Return True if a file or folder has this name. The name may be any text."""
    try:
        return expanded(name).exists()
    except (OSError, ValueError):
        # no file can have this name, for example because it is too long
        return False


def read_text(file: str) -> str:
    """Return the text of a file, or of stdin for "-", with line ends as LF. Raises InputError."""
    with closing(TextSource(file)) as source:
        return with_lf(source.start())


def check_file(file: str) -> None:
    """Raise InputError if a file cannot be read or is not text in UTF-8.

    A pipe is only looked for, because it can be read only once.
    """
    path = expanded(file)
    if not is_stdin(file) and (not exists(file) or os.path.isfile(path) or os.path.isdir(path)):
        read_text(file)
