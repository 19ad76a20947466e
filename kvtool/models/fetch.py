"""One GGUF file over HTTP: it goes on where a broken download stopped, and gets its name when it is whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvtool.errors import ModelError
from kvtool.models.catalogue import models_dir
from kvtool.system.files import locked
from kvtool.units import format_bytes

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes downloaded so far and the bytes in all, None if that is not known."""

OFFLINE = (
    "without a network, copy a GGUF file here and name it with -m FILE, or use a model that is here "
    "(kvtool models list)"
)
"""How a user goes on who cannot download."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a full disk, or of a user's full share of it."""

_ANOTHER = "the server has another file by now; try again"

_BLOCK = 2**20
_TIMEOUT_S = 30
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]+)-[0-9]+|\*)/([0-9]+|\*)")


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on a server.

    Attributes
    ----------
    name
        What messages call it.
    url
        Where it can be downloaded.
    headers
        What that request needs. They are for this host, not for hosts that it redirects to.
    size
        Its size in bytes; None if it is not known: the server's answer counts.
    sha256
        Its hash; None if it is not known.
    """

    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    sha256: str | None = None


def part_of(target: Path) -> Path:
    """Where the file is while it is downloaded."""
    return target.with_name(target.name + ".part")


def left_of(target: Path) -> list[Path]:
    """What a broken download has left there, beside which another would go on."""
    return [path for path in (part_of(target), _note_of(target)) if path.exists()]


@contextmanager
def storing(name: str, folder: Path, variable: str = "KVTOOL_CACHE") -> Iterator[None]:
    """Inside, a file that cannot be written is a ModelError, which names the variable for another folder."""
    try:
        yield
    except OSError as error:
        why, another = error.strerror or error, f"set ${variable} to another folder"
        if error.errno in FULL:
            raise ModelError(
                f"the disk is full ({why}): there is no room for {name} in {folder}; free some, or {another}"
            ) from None
        raise ModelError(f"cannot store {name} in {folder} ({why}); {another}") from None


def fetch(remote: Remote, target: Path, progress: Progress | None = None) -> None:
    """Download a file unless it is there. The folder is made.

    What a broken download left is kept, and continued if the server can do that and has the same file still.
    A second process that wants the same file waits for the first.

    Raises ModelError, and OSError where the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    models_dir().mkdir(parents=True, exist_ok=True)
    lock = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    with locked(models_dir() / f"{lock}.lock"):
        if target.exists():
            return
        part = part_of(target)
        with part.open("a+b") as out:
            found = _Download(remote, out, _note_of(target), progress or (lambda done, total: None)).run()
            out.flush()
            os.fsync(out.fileno())
        if remote.sha256 in (None, found):
            os.replace(part, target)
        else:
            part.unlink()
        _note_of(target).unlink(missing_ok=True)
    if remote.sha256 not in (None, found):
        wrong = f"sha256 {found} instead of {remote.sha256}"
        raise ModelError(f"{remote.name}: the download has {wrong} and was deleted; try again")


def _note_of(target: Path) -> Path:
    """What the server said about the file in `part_of`, so that nothing of another file is added to it."""
    return target.with_name(target.name + ".part.json")


@dataclass(slots=True)
class _Download:
    """One download into an open file, which may have the first bytes already."""

    remote: Remote
    out: BinaryIO
    note: Path
    progress: Progress
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    goes_on: bool = False

    def run(self) -> str:
        """Get what is missing. Returns the hash of the file, or "" if none is wanted. Raises ModelError."""
        size, sha256 = self.remote.size, self.remote.sha256
        done = self.out.seek(0, os.SEEK_END)
        known = self._noted()
        if done and done == (size or known.get("size")):
            return self._hash(done) if sha256 else ""
        # without a hash, only the server can tell whether its file is still the same
        tag = known.get("tag")
        self.goes_on = bool(done and (sha256 or tag) and (size is None or done < size))
        wanted = {"Range": f"bytes={done}-"} if self.goes_on else {}
        if self.goes_on and tag and not sha256:
            wanted["If-Range"] = tag
        with self._open(wanted) as answer:
            if answer.status == 206:
                total = self._rest_of(answer, done, size or known.get("size"))
            else:
                # the whole file: the server knows no ranges, or has another file by now
                done, total = 0, _number(answer.headers.get("Content-Length"))
                if size is not None and total not in (None, size):
                    wrong = f"{total} bytes instead of {size}"
                    raise ModelError(f"{self.remote.name}: the file has {wrong}; {OFFLINE}")
            tag = self._start(done, size or total, answer)
            knows_ranges = answer.status == 206 or answer.headers.get("Accept-Ranges") == "bytes"
            self.goes_on = knows_ranges and bool(sha256 or tag)
            if sha256:
                self._hash(done)
            self._copy(answer, done, size or total)
        return self.digest.hexdigest() if sha256 else ""

    def _rest_of(self, answer: Any, done: int, size: int | None) -> int | None:
        """The bytes of the whole file, of which the server sends what is missing. Raises ModelError."""
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range") or "")
        total = _number(found[2]) if found else None
        if not found or _number(found[1]) != done or (size and total not in (None, size)):
            self.out.truncate(0)
            raise ModelError(f"cannot download {self.remote.name}: {_ANOTHER}; {OFFLINE}")
        return total or size

    @contextmanager
    def _open(self, headers: Mapping[str, str]) -> Iterator[Any]:
        # imported here: only a download needs it
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        try:
            request = Request(self.remote.url, headers={"User-Agent": "kvtool", **headers})
            for key, value in self.remote.headers.items():
                # a token is for this host, and for none that it redirects to
                request.add_unredirected_header(key, value)
            answer = urlopen(request, timeout=_TIMEOUT_S)
        except HTTPError as error:
            with error:
                if error.code == 416 and "Range" in headers:
                    # there is less than what is here: start over
                    self.out.truncate(0)
                    said = _ANOTHER
                else:
                    said = f"the server answered {error.code} {error.reason}"
            raise ModelError(f"cannot download {self.remote.name}: {said}; {OFFLINE}") from None
        except (OSError, HTTPException, ValueError) as error:
            said = f"no connection ({_said(getattr(error, 'reason', None) or error)})"
            raise ModelError(f"cannot download {self.remote.name}: {said}; {self._hint()}") from None
        with answer:
            yield answer

    def _start(self, done: int, total: int | None, answer: Any) -> str | None:
        """Make the file have the first `done` bytes, and note what it will be. Returns its tag."""
        if not done:
            self.out.truncate(0)
        # a weak tag promises no equal bytes
        tag: str | None = answer.headers.get("ETag")
        if not tag or tag.startswith("W/"):
            tag = answer.headers.get("Last-Modified")
        self.note.write_text(json.dumps({"tag": tag, "size": total}), encoding="utf-8")
        return tag

    def _copy(self, answer: Any, done: int, total: int | None) -> None:
        why = ""
        while not why:
            block, why = _read(answer)
            if not block:
                break
            if not done and not block.startswith(b"GGUF"):
                self.out.truncate(0)
                kind = answer.headers.get("Content-Type") or "of no type"
                raise ModelError(f"{self.remote.name} is not a GGUF file ({kind})")
            self.out.write(block)
            self.digest.update(block)
            done += len(block)
            self.progress(done, total)
        if why or total not in (None, done):
            of = f" of {format_bytes(total)}" if total else ""
            raise ModelError(
                f"the download of {self.remote.name} broke off after {format_bytes(done)}{of} "
                f"({why or 'the connection ended'}); {self._hint()}"
            )

    def _hint(self) -> str:
        self.out.flush()
        here = os.fstat(self.out.fileno()).st_size
        how = f"goes on from {format_bytes(here)}" if here and self.goes_on else "tries again"
        return f"the same command {how}; {OFFLINE}"

    def _hash(self, done: int) -> str:
        """The hash of the first bytes, which `digest` has now taken."""
        self.out.seek(0)
        while done and (block := self.out.read(min(_BLOCK, done))):
            self.digest.update(block)
            done -= len(block)
        self.out.seek(0, os.SEEK_END)
        return self.digest.hexdigest()

    def _noted(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            known = json.loads(self.note.read_text(encoding="utf-8"))
            if isinstance(known, dict):
                return known
        return {}


def _read(answer: Any) -> tuple[bytes, str]:
    """The next bytes, b"" at the end, and why the connection broke; "" if it did not."""
    from http.client import HTTPException, IncompleteRead

    try:
        return answer.read(_BLOCK), ""
    except IncompleteRead as error:
        return error.partial, "the connection ended"
    except (OSError, HTTPException) as error:
        return b"", _said(error)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _said(error: object) -> str:
    return str(getattr(error, "strerror", None) or error).strip().partition("\n")[0] or type(error).__name__
