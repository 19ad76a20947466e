"""Files of records: JSON lines or one JSON array, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zlib import error as ZlibError

from kvtool.errors import InputError

Record = dict[str, Any]
T = TypeVar("T")

_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError)
"""Errors that a record with an unknown layout causes."""


class Misfit(ValueError):
    """Raised for a record with an unknown layout. Users see its text."""


def read(path: Path) -> list[Any]:
    """Read all records of a file. Raises InputError unless it is readable JSON."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start})") from None
    except (EOFError, ZlibError, gzip.BadGzipFile):
        raise InputError(f"{path} is not a complete gzip file") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if text.lstrip().startswith("["):
        records: list[Any] = _parsed(text, path)
        return records
    # splitlines would also split at other line breaks, which strings in JSON may contain
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, path, number) for number, line in lines if line.strip()]


def parse_each(
    files: Sequence[Path], task: str, parse: Callable[[Record], T]
) -> Iterator[tuple[Path, int, T]]:
    """Yield (file, number, result of `parse`) for every record. Numbers in a file start at 1.

    task: name of the task in error messages. parse: function that raises an ordinary error (KeyError,
    Misfit, ...) if the layout of a record is unknown. This error becomes an InputError. Also raises
    InputError if a file has no records.
    """
    for path in files:
        records = read(path)
        if not records:
            raise InputError(f"{path} is empty")
        for number, record in enumerate(records, 1):
            try:
                yield path, number, parse(record)
            except _MISFITS as error:
                raise InputError(
                    f"{path}, record {number}, has a layout that {task} does not know "
                    f"({_reason(record, error)}); docs/tasks.md has them"
                ) from None


def stem(path: Path) -> str:
    """The file's name without .gz, .jsonl and .json."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def few_shot(n: int, others: Sequence[T], seed: str, what: str) -> list[T]:
    """Sample n of `others` as solved examples. Raises InputError if there are fewer than n.

    what: word for the examples in the error message.
    """
    if len(others) < n:
        raise InputError(f"{n} shots need {n} other {what}, there are {len(others)}")
    return random.Random(seed).sample(others, n)


def text(value: Any) -> str:
    """Return the value, which must be a string. Raises Misfit."""
    if not isinstance(value, str):
        raise Misfit(f"expected a text, got {value!r:.40}")
    return value


def texts(value: Any) -> list[str]:
    """Return the value as a list of strings. It must be a string or a list of strings. Raises Misfit."""
    return [text(part) for part in ([value] if isinstance(value, str) else list(value))]


def _reason(record: Any, error: Exception) -> str:
    """Return why the layout of a record is unknown, for the user."""
    if isinstance(error, Misfit):
        return str(error)
    # leave out Python's error, because it is about the layout that was tried last
    if not isinstance(record, dict):
        return "it is not an object"
    return f"its fields are {', '.join(map(repr, record)):.100}" if record else "it has no fields"


def _parsed(text: str, path: Path, number: int | None = None) -> Any:
    """Parse a file, or the line `number` of it. Raises InputError."""
    try:
        record = json.loads(text)
        if "\\ud" in text.lower():
            # replace half of a surrogate pair by a question mark: models cannot read it
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    except json.JSONDecodeError as error:
        where = f"line {number or error.lineno}, column {error.colno}"
        raise InputError(f"{path}, {where}, is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        where = f", line {number}," if number else ""
        raise InputError(f"{path}{where} is not JSON: {str(error).splitlines()[0]}") from None
    return record
