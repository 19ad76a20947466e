"""Results in a file of JSON lines. They are appended one by one, and found by their keys."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvtool.errors import InputError, KvtoolError
from kvtool.system.files import locked

if TYPE_CHECKING:
    import numpy as np

    from kvtool.config.run import RunOptions
    from kvtool.llama.loaded.model import Model
    from kvtool.models.fetch import Progress

Record = Mapping[str, Any]
"""Result as a JSON object."""


class NotStored(KvtoolError):
    """Raised if a result cannot be appended to its file."""


def key(record: Record, names: Iterable[str]) -> str:
    """Return the values of the fields `names` as one string. The value of a missing field is null."""
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def text_sha256(model: Model, tokens: np.ndarray) -> str:
    """Return the SHA-256 of the text of tokens i32[n]. It shows whether two results are of the same text."""
    return hashlib.sha256(b"".join(model.piece(token, special=True) for token in tokens.tolist())).hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of the programs that results depend on. Raises LibraryError without llama.cpp."""
    from kvtool import __version__
    from kvtool.llama.libllama.devices import library_info

    library = library_info()
    return {"kvtool": __version__, "llama_cpp_python": library["version"], "patch": library["digest"]}


def identity(run: RunOptions, path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Return the fields that name the model, its adapters and the versions. Raises KvtoolError.

    path: file of the model. progress: shows the hashing of the file.
    """
    from kvtool.llama.loaded.adapters import identities
    from kvtool.models.download import sha256

    digest = sha256(path, progress)
    return {"model": path.name, "model_sha256": digest, "lora": identities(run.adapters), **versions()}


def read(path: Path) -> list[dict[str, Any]]:
    """Read all records of a file. Return [] if there is no file.

    An incomplete last line is ignored: a process that was killed may leave one. Raises InputError for any
    other line that is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}, is not a JSON object; remove it or choose another file")
        records.append(record)
    return records


def append(path: Path, record: Record) -> None:
    """Append a record and sync it to the disk. Several processes may append at once. Raises NotStored."""
    try:
        with locked(path.with_name(path.name + ".lock")), path.open("ab+") as file:
            # cut off an incomplete last line: a record appended to it would be unreadable
            file.truncate(_whole_lines(file))
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise NotStored(f"cannot write {path}: {error.strerror or error}") from None


def _whole_lines(file: BinaryIO) -> int:
    """Number of bytes up to the end of the last complete line."""
    at = file.seek(0, os.SEEK_END)
    while at:
        size = min(at, 4096)
        at -= size
        file.seek(at)
        if (end := file.read(size).rfind(b"\n")) >= 0:
            return at + end + 1
    return 0
