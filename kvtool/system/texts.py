"""Texts and names from outside: all are UTF-8, whatever the locale is, and their lines end with LF."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtool.errors import InputError, UsageError

_CONVERT = "convert it first, with iconv for example"


def with_lf(text: str) -> str:
    """Return the text with every CRLF and every other CR as LF, as Python reads a text file."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decoded(data: bytes) -> str:
    """Return the text of UTF-8 bytes as a model reads it: `with_lf`, and without a byte order mark.

    Raises UnicodeDecodeError.
    """
    return with_lf(data.decode("utf-8-sig"))


def utf8(flag: str, text: str | None) -> str | None:
    """Return the text of an option, `with_lf`. Raises UsageError for bytes that are not UTF-8."""
    if text is None:
        return None
    try:
        # an ASCII locale hands over all other characters as bytes that it could not decode
        return with_lf(text.encode("utf-8", "surrogateescape").decode())
    except UnicodeDecodeError:
        raise UsageError(f"the text of {flag} is not UTF-8; {_CONVERT}") from None


def shown(text: object) -> str:
    """A text or a path, with U+FFFD for what is not UTF-8."""
    return str(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON in ASCII. It has U+FFFD for what is not UTF-8 in a path: JSON cannot hold that."""
    import json

    return json.dumps(_cleaned(value), indent=indent)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else shown(value)
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, (list, tuple)) else value


def read_stdin() -> str:
    """All of stdin without the last line breaks; "" at a terminal. Raises InputError."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return decoded(sys.stdin.buffer.read()).rstrip("\n")
    except OSError as error:
        raise InputError(f"cannot read stdin: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start}); {_CONVERT}") from None


def stdin_lines() -> Iterator[str]:
    """The lines of stdin as they arrive, without line breaks. Raises InputError."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = decoded(line) if number == 1 else with_lf(line.decode())
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8 (line {number}, byte {error.start}); {_CONVERT}") from None
        # a CR within it has ended a line
        yield from text.removesuffix("\n").split("\n")


def read_text(file: str) -> str:
    """The text of a file, or of stdin for "-". Raises InputError unless it is text in UTF-8."""
    name = "stdin" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    if not data.strip():
        raise InputError(f"{name} is empty; it must be a text")
    if b"\0" in data:
        raise InputError(f"{name} is binary; it must be a text")
    try:
        return decoded(data)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 (byte {error.start}); convert it first, for example with iconv"
        ) from None
