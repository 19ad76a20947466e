"""Files of records: JSON lines or one JSON array, as they are or packed by gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zlib import error as ZlibError

from kvtool.errors import InputError

Record = dict[str, Any]
T = TypeVar("T")

_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError)
"""What a record of another layout is met with."""


def read(path: Path) -> list[Any]:
    """All records of a file. Raises InputError for one that cannot be read, or is no JSON."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start})") from None
    except (EOFError, ZlibError, gzip.BadGzipFile):
        raise InputError(f"{path} is no whole gzip file") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if text.lstrip().startswith("["):
        records: list[Any] = _parsed(text, str(path))
        return records
    # no splitlines: JSON may have other line breaks inside a string
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def each(files: Sequence[Path], task: str, parse: Callable[[Record], T]) -> Iterator[tuple[Path, int, T]]:
    """Every record of the files, parsed, with its file and its number there, the first is 1.

    Raises InputError for files without a record, and where parse says by an ordinary error that the record
    has another layout.
    """
    for path in files:
        found = read(path)
        if not found:
            raise InputError(f"{path} is empty")
        for number, record in enumerate(found, 1):
            try:
                yield path, number, parse(record)
            except _MISFITS as error:
                raise InputError(
                    f"{path}, record {number}, has no layout that {task} reads "
                    f"({type(error).__name__}: {error}); docs/tasks.md has them"
                ) from None


def stem(path: Path) -> str:
    """The file's name without what says that it is packed JSON."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def text(value: Any) -> str:
    """A field that must be a text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"a text is wanted, not {value!r:.40}")
    return value


def texts(value: Any) -> list[str]:
    """A field that must be a list of texts, or one. Raises TypeError."""
    return [text(each) for each in ([value] if isinstance(value, str) else list(value))]


def _parsed(line: str, where: str) -> Any:
    try:
        found = json.loads(line)
        if "\\ud" in line.lower():
            # half a character, which no model reads, becomes a question mark
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {str(error).splitlines()[0]}") from None
    return found
