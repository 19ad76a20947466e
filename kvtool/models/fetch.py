"""Download one GGUF file by URL.

All kinds of downloads use the messages and the type of the progress callback in this file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models.header import read_file
from kvtool.units import format_bytes

Progress = Callable[[int, "int | None"], None]
"""Function to call with the number of bytes downloaded so far and the size of the file in bytes.

The size is None if it is not known. The first call is made before the first request.
"""

OFFLINE = (
    "without a network, copy a GGUF file here and name it with -m FILE, or use a model that is here "
    "(kvtool models list)"
)
"""Advice for a user who cannot download a model. Each message about a failed download ends with it."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_BLOCK = 2**20
_TIMEOUT_S = 30


@contextmanager
def storing(name: str, folder: Path, variable: str = "KVTOOL_CACHE") -> Iterator[None]:
    """Turn an OSError inside the block into a ModelError.

    The message advises the user to set the environment variable `variable` to another folder.
    """
    try:
        yield
    except OSError as error:
        reason, remedy = error.strerror or error, f"set ${variable} to another folder"
        if error.errno in _FULL:
            raise ModelError(
                f"the disk is full ({reason}): there is no room for {name} in {folder}; "
                f"free some, or {remedy}"
            ) from None
        raise ModelError(f"cannot store {name} in {folder} ({reason}); {remedy}") from None


def full_disk(text: str) -> OSError | None:
    """Return an OSError if a program's output says that the disk or the quota is full, else None."""
    for number in _FULL:
        # Python programs write the number as [Errno N], and Rust programs as (os error N)
        if f"[Errno {number}]" in text or f"(os error {number})" in text:
            return OSError(number, os.strerror(number))
    return None


def fetch(url: str, target: Path, progress: Progress | None = None) -> None:
    """Download a GGUF file to `target`, unless `target` exists.

    While the file is incomplete, its name is NAME.part. It is deleted after an error, but a process that is
    killed leaves it behind. Raises ModelError, and OSError if the file cannot be written.
    """
    if target.exists():
        return
    part = target.with_name(target.name + ".part")
    try:
        done = 0
        if progress:
            # show the progress at once: the request may take long
            progress(0, None)
        with part.open("wb") as out:
            for block, size in _blocks(url):
                out.write(block)
                done += len(block)
                if progress:
                    progress(done, size)
            out.flush()
            os.fsync(out.fileno())
        # if the server sent no Content-Length, only the GGUF header shows whether the end is missing
        read_file(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _blocks(url: str) -> Iterator[tuple[bytes, int | None]]:
    """Yield the file's blocks, each with the size of the file, or None if the server does not send it."""
    # imported here, because only a download needs it
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    done, size, reason = 0, None, "the connection ended"
    try:
        with urlopen(Request(url, headers={"User-Agent": "kvtool"}), timeout=_TIMEOUT_S) as response:
            length = response.headers.get("Content-Length")
            size = int(length) if length and length.isdecimal() else None
            while block := response.read(_BLOCK):
                if not done and not block.startswith(b"GGUF"):
                    kind = response.headers.get("Content-Type") or "of no type"
                    raise ModelError(f"{url} is not a GGUF file ({kind})")
                done += len(block)
                yield block, size
        if size in (None, done):
            return
    except HTTPError as error:
        with error:
            raise ModelError(
                f"cannot download {url}: the server answered {error.code} {error.reason}; {OFFLINE}"
            ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = _reason(getattr(error, "reason", None) or error)
        if size is None and not done:
            raise ModelError(
                f"cannot download {url}: no connection ({reason}); the same command tries again; {OFFLINE}"
            ) from None
    of_size = f" of {format_bytes(size)}" if size else ""
    raise ModelError(
        f"the download of {url} broke off after {format_bytes(done)}{of_size} ({reason}); "
        f"the same command tries again; {OFFLINE}"
    )


def _reason(error: object) -> str:
    return str(getattr(error, "strerror", None) or error).strip().partition("\n")[0] or type(error).__name__
