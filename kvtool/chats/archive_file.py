"""The second file of a session, FILE.archive. Its parts are written once and never changed.

A session lists the parts with their offsets and hashes. A turn appends new parts, such as newly archived
tokens, and then replaces the session file.

There are three kinds of parts: keys and values of archived tokens, clusters of these tokens, and checkpoints.
Clusters are saved so that a restored archive need not be clustered again. Tokens are clustered in blocks of
consecutive tokens. A block is far if its tokens are more than `n_near` tokens back (see `ArchiveSettings`).
When a block becomes far, it is clustered again, because all tokens of a far block are treated as equally
distant. The session then lists the new clusters instead of the old ones.

The first line of FILE.archive holds the format number and the file's id. The session stores the same id. The
docstring of `kvtool.chats` explains in which order the files are written, and why there are two names.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from itertools import chain, pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, cast

import numpy as np

from kvtool.errors import SessionError
from kvtool.llama.cache.segment import (
    LISTS,
    TABLE,
    Clusters,
    Part,
    SavedCheckpoint,
    Segment,
    checkpoint_name,
    clusters_name,
    layer_name,
    listed,
    listed_parts,
    listing,
    span,
)
from kvtool.system.files import create, set_aside, temporary, write_all

if TYPE_CHECKING:
    from kvtool.engine.checkpoints import Checkpoint
    from kvtool.llama.cache.archive import Archive

FORMAT = 1
"""Format number; increased when the meaning of the file's contents changes."""

SUFFIX = ".archive"
_NEXT = ".next"
ID, LAYERS = "archive.id", "archive.layers"
_N_ID = 16
_START = b"kvtool archive "
_FIRST = b"%s%d %%s\n" % (_START, FORMAT)
_N_FIRST = len(_FIRST % bytes(2 * _N_ID))
_FIRST_LINE = re.compile(_FIRST % b"([0-9a-f]{32})")
_PIECE = 4 * 2**20
"""Approximate bytes of a part with tokens or clusters. Each part is in memory while it is written."""

_N_HASHING = min(os.cpu_count() or 1, 4)
"""Number of threads that check the hashes. Loading a large archive spends most of its time on this."""

Listing = list[tuple[str, np.ndarray]]


def archive_path(path: Path) -> Path:
    """Path of a session's archive. If `path` is a link, the archive is next to the link's target."""
    real = Path(os.path.realpath(path))
    return real.with_name(real.name + SUFFIX)


def delete(path: Path) -> None:
    """Delete the archive of the session at `path`, if there is one. Files of another type are not deleted."""
    for place in archive_paths(path):
        _delete(place)


class ArchiveFile:
    """File that holds a chat's archive and checkpoints: FILE.archive of a session, or a temporary file.

    session: path of the session; None for a temporary file.
    replaces: id of an existing archive that may be replaced together with its session, or None.

    `moved` is the new name of another chat's archive that the last `write` renamed, or None.
    """

    def __init__(self, session: Path | None = None, replaces: bytes | None = None) -> None:
        self.moved: Path | None = None
        self._session = session
        self._replaces = replaces
        self._listed: Mapping[str, np.ndarray] = {}
        self._file: _PartFile | None = None

    def adopt(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continue with the archive that a loaded session lists. saved: the session's arrays."""
        self.close()
        names = [ID, LAYERS, *chain.from_iterable(LISTS.values())]
        # copies, because views would keep the session's file open
        self._listed = {name: np.array(saved[name]) for name in names if name in saved}

    @contextmanager
    def write(self, archive: Archive | None, checkpoints: Iterable[Checkpoint] = ()) -> Iterator[Listing]:
        """Write the new parts of an archive and of checkpoints; yield the arrays that list all parts.

        The caller writes the session inside the context. If anything fails, the old session keeps its
        parts. If FILE.archive belongs to another chat, it is renamed first: see `moved`. Raises OSError.
        Raises SessionError if a file that is not an archive would be replaced.
        """
        self.open()
        self._set_other_aside()
        old, contents = self._file, _Contents(archive, [*checkpoints])
        parts = contents.parts(old.offsets if old else {})
        file = old if old and old.suits(parts, sum(contents.layer_bytes)) else None
        if parts and not file:
            # Divide the tokens into parts again. The old parts may have tokens that the archive has deleted
            # since then, so they cannot be written to a new file
            file, parts = self._begin(), contents.parts({})
        end, inode, is_written = old.end if old else 0, self._inode(), False
        try:
            if file:
                parts = file.append(parts, contents)
            contents.keep(parts)
            yield _listing(parts, contents.layer_bytes, file) if archive or parts else []
            is_written = True
        finally:
            # a new inode means that the session was replaced, even if Ctrl-C came before `is_written` was set
            if is_written or self._inode() != inode:
                self._keep(file)
            elif file is not old:
                self._drop(file)
            elif file:
                file.cut(end)

    def _inode(self) -> int | None:
        """Inode of the session, which changes when the session is replaced; None without a session."""
        try:
            return self._session.stat().st_ino if self._session else None
        except OSError:
            return None

    def open(self) -> None:
        """Open the file that the session lists, unless it is open already. Raises OSError."""
        if self._file and (not self._session or self._file.is_at(archive_paths(self._session))):
            return
        saved = self._listed
        self.close()
        if not self._session or not listed_parts(saved):
            # Keep the id of FILE.archive, although no parts are listed. From the id, `_set_other_aside` knows
            # that FILE.archive belongs to this chat. No parts are listed if FILE.archive has only checkpoints
            # and is damaged, because `session.load` then leaves the checkpoints out
            self._listed = saved
            return
        both = _, following = archive_paths(self._session)
        for place in both:
            with ExitStack() as stack, suppress(FileNotFoundError):
                file = stack.enter_context(place.open("r+b", buffering=0))
                if id_of(file) == bytes(saved[ID]):
                    self._file = _PartFile(file, bytes(saved[ID]), listed_parts(saved), saved[LAYERS])
                    stack.pop_all()
                    break
        # a killed process may have left FILE.archive.next: rename it if the session lists it, otherwise
        # delete it
        self.finish_rename()
        if self._file:
            _delete(following)

    def finish_rename(self) -> None:
        """Rename the open file to FILE.archive if it is still FILE.archive.next. Raises OSError."""
        if self._file and self._session:
            path, following = archive_paths(self._session)
            if not self._file.is_at([path]):
                os.replace(following, path)

    def _set_other_aside(self) -> None:
        """Rename an archive at this path if it belongs to another chat. Raises OSError."""
        self.moved = None
        if not self._session:
            return
        place, known = archive_path(self._session), {self._replaces, id_in(self._listed)}
        try:
            with place.open("rb", buffering=0) as file:
                # if the archive has two names (hard links), a killed process has already set it aside under
                # the second name: do not set it aside again
                other = id_of(file) if os.fstat(file.fileno()).st_nlink == 1 else None
        except FileNotFoundError:
            return
        if other and other not in known | ({self._file.id} if self._file else set()):
            spare = set_aside(self._session, SUFFIX)
            place.unlink()
            self.moved = spare.with_name(spare.name + SUFFIX)

    def reopen(self) -> FileIO | None:
        """Return another file object for the archive file. None if the session lists no parts.

        A copy for `undo` keeps this object. Through it, the copy can read the present parts even after a turn
        has replaced FILE.archive by another file. Raises OSError.
        """
        if not self._file:
            is_listed = bool(listed_parts(self._listed))
            self.open()
            if is_listed and not self._file:
                raise FileNotFoundError
        return FileIO(os.dup(self._file.raw.fileno())) if self._file else None

    def close(self) -> None:
        """Close the file. The system then deletes a temporary file."""
        if self._file:
            self._file.raw.close()
        self._file, self._listed = None, {}

    def _begin(self) -> _PartFile:
        """Create an empty file. The caller must then call `_keep`, or `_drop` to delete the file."""
        if not self._session:
            return _PartFile.new(cast(FileIO, temporary(buffering=0)))
        check_place(self._session)
        _, following = archive_paths(self._session)
        self.finish_rename()
        try:
            return _PartFile.new(create(following, like=Path(os.path.realpath(self._session))))
        except BaseException:
            _delete(following)
            raise

    def _keep(self, file: _PartFile | None) -> None:
        """Make this file the current one, which the session now lists; None if it lists no file."""
        if file is not self._file:
            self.close()
            self._file = file
            # if this rename fails, the next `open` renames the file
            with suppress(OSError):
                self.finish_rename()
        if not file and self._session:
            delete(self._session)

    def _drop(self, file: _PartFile | None) -> None:
        """Delete a new file that no session lists."""
        if not file:
            return
        file.raw.close()
        if self._session:
            _delete(archive_paths(self._session)[1])


class _PartFile:
    """An open file of parts. The next part is appended at the offset `end`."""

    def __init__(self, raw: FileIO, id: bytes, offsets: dict[Part, int], layers: Iterable[int] = ()) -> None:
        self.raw = raw
        self.id = id
        self.offsets = offsets
        n_bytes = sum(map(int, layers))
        ends = (offset + part.size(n_bytes) for part, offset in offsets.items())
        self.end = max(ends, default=_N_FIRST)

    @classmethod
    def new(cls, raw: FileIO) -> _PartFile:
        file = cls(raw, secrets.token_bytes(_N_ID), {})
        try:
            write_all(raw, _FIRST % file.id.hex().encode())
        except BaseException:
            raw.close()
            raise
        return file

    @property
    def is_shared(self) -> bool:
        """True if the file has a second name, because its session was set aside."""
        return os.fstat(self.raw.fileno()).st_nlink > 1

    def is_at(self, paths: Iterable[Path]) -> bool:
        """True if the file is at one of these paths."""
        stat = os.fstat(self.raw.fileno())
        return any(place.exists() and os.path.samestat(stat, place.stat()) for place in paths)

    def suits(self, parts: list[Part], token_bytes: int) -> bool:
        """True if the missing parts can be appended to this file.

        After appending, at least half of the file's bytes must be in use. If another session shares the file,
        no part may be missing, because nothing is appended to a shared file.
        """
        if not parts:
            return False
        n_new = sum(part.size(token_bytes) for part in parts if part not in self.offsets)
        n_all = sum(part.size(token_bytes) for part in parts)
        return not (n_new and self.is_shared) and self.end - _N_FIRST + n_new <= 2 * n_all

    def append(self, parts: list[Part], contents: _Contents) -> list[Part]:
        """Append the parts that the file lacks, and sync the file. Return all parts, with their hashes.

        Raises OSError. In this case some new parts may be in the file already: the caller must cut them off.
        """
        written: list[Part] = []
        before = self.end
        for part in parts:
            if part not in self.offsets:
                data = contents.read(part)
                part = part._replace(sha256=hashlib.sha256(data.data).digest())
                self.raw.seek(self.end)
                write_all(self.raw, data.data)
                self.offsets[part] = self.end
                self.end += data.nbytes
            written.append(part)
        if self.end > before:
            # cut off bytes that a killed process may have left
            self.raw.truncate(self.end)
            os.fsync(self.raw.fileno())
        return written

    def cut(self, end: int) -> None:
        """Cut off the parts that were appended at or after this offset."""
        if self.is_shared:
            # parts are never appended to a shared file, so there is nothing to cut off
            return
        self.end, self.offsets = end, {part: offset for part, offset in self.offsets.items() if offset < end}
        with suppress(OSError):
            self.raw.truncate(end)


class _Contents:
    """The archive, if there is one, and the checkpoints that are saved as parts.

    `layer_bytes` has the bytes of an archived token in each layer; [] without an archive.
    """

    def __init__(self, archive: Archive | None, checkpoints: list[Checkpoint]) -> None:
        self._archive = archive
        self._checkpoints = checkpoints
        self.layer_bytes = archive.layer_bytes if archive else []

    def parts(self, offsets: Mapping[Part, int]) -> list[Part]:
        """List all parts. Tokens that are not in the file yet are divided into parts of a few MiB.

        offsets: offset of each part that is in the file.
        """
        parts: list[Part] = [each.part for each in self._checkpoints]
        if self._archive:
            parts += _segments_of(self._archive, offsets)
            parts += _clusters_of(self._archive, offsets)
        return parts

    def read(self, part: Part) -> np.ndarray:
        """Return the content of a part, u8[n]."""
        if isinstance(part, SavedCheckpoint):
            return next(each.data for each in self._checkpoints if each.part == part)
        assert self._archive
        if isinstance(part, Clusters):
            return self._archive.read_clusters(part.begin, part.end, part.is_far)
        return self._archive.read(part.begin, part.end)

    def keep(self, written: list[Part]) -> None:
        """Note in the archive and the checkpoints which parts are written. They are not written again."""
        if self._archive:
            self._archive.segments = [part for part in written if isinstance(part, Segment)]
            self._archive.clusters = [part for part in written if isinstance(part, Clusters)]
        saved = (part for part in written if isinstance(part, SavedCheckpoint))
        for checkpoint, part in zip(self._checkpoints, saved, strict=True):
            checkpoint.part = part


def _segments_of(archive: Archive, offsets: Mapping[Part, int]) -> list[Segment]:
    begin, end = archive.span.start, archive.span.stop
    segments = [
        segment if segment in offsets or segment.begin >= begin else Segment(begin, segment.end, b"")
        for segment in archive.segments
        if segment.end > begin
    ]
    n = max(_PIECE // sum(archive.layer_bytes), 1)
    starts = range(segments[-1].end if segments else begin, end, n)
    return segments + [Segment(start, min(start + n, end), b"") for start in starts]


def _clusters_of(archive: Archive, offsets: Mapping[Part, int]) -> list[Clusters]:
    """List the parts with the current clusters of all blocks."""
    n, n_bytes = archive.n_block, archive.membership_bytes
    blocks = archive.clustered
    current = set(blocks)
    parts: list[Clusters] = []
    written: set[tuple[int, bool]] = set()
    for part in archive.clusters:
        first = max(part.begin, archive.span.start // n * n)
        # A block that is far in only some rows is not in `blocks`. Keep the clusters that were saved when the
        # block was near, because the other rows still use them
        held = {block for block in range(first, part.end, n) if ((block, True) in current) == part.is_far}
        if part in offsets and held:
            parts.append(part)
            written |= {(block, part.is_far) for block in held}
    for block, is_far in blocks:
        if (block, is_far) in written:
            continue
        last = parts[-1] if parts else None
        is_next = last and not last.sha256 and (last.end, last.is_far) == (block, is_far)
        if last and is_next and last.n_bytes < _PIECE:
            parts[-1] = last._replace(end=block + n, n_bytes=last.n_bytes + n_bytes)
        else:
            parts.append(Clusters(block, block + n, is_far, n_bytes, b""))
    return parts


def _listing(parts: list[Part], layer_bytes: list[int], file: _PartFile | None) -> Listing:
    return [
        (ID, np.frombuffer(file.id if file else bytes(_N_ID), np.uint8)),
        (LAYERS, np.array(layer_bytes, np.int64)),
        *listing(parts, file.offsets if file else {}),
    ]


def size(session: Path) -> int:
    """Size of a session's archive in bytes, including a FILE.archive.next that a killed process left."""
    n = 0
    for place in archive_paths(session):
        with suppress(OSError):
            n += place.stat().st_size
    return n


def archive_paths(session: Path) -> tuple[Path, Path]:
    """Paths of a session's archive: FILE.archive and FILE.archive.next."""
    path = archive_path(session)
    return path, path.with_name(path.name + _NEXT)


def check_place(session: Path) -> None:
    """Raise SessionError if a file that is not an archive has the path of the session's archive."""
    for place in archive_paths(session):
        if place.exists() and not _is_ours(place):
            raise SessionError(f"{place} is not an archive of kvtool; rename it, or name another session")


def _delete(place: Path) -> None:
    with suppress(OSError):
        if _is_ours(place):
            place.unlink()


def id_in(arrays: Mapping[str, np.ndarray]) -> bytes | None:
    """Id of the archive that a session's arrays list; None if they list no archive."""
    return bytes(arrays[ID]) if ID in arrays else None


def id_of(file: FileIO) -> bytes | None:
    """Id of an archive; None if the file is not an archive of this format."""
    file.seek(0)
    first = _FIRST_LINE.fullmatch(file.read(_N_FIRST))
    return bytes.fromhex(first[1].decode()) if first else None


def _is_ours(path: Path) -> bool:
    """True if a file is an archive, or empty: a process killed before its first write leaves an empty one."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(len(_START)) in (b"", _START)


class ArchivedArrays(Mapping[str, np.ndarray]):
    """Arrays of a session and of its archive. An array of the archive is assembled when it is read.

    Raises SessionError if the archive file is missing (None), damaged, or belongs to another session.

    name, owner: names of the archive file and of the session in error messages.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], file: FileIO | None, name: str, owner: str) -> None:
        self._arrays = arrays
        self._segments = listed(arrays, Segment)
        self._parts = listed_parts(arrays)
        self._layers = arrays[LAYERS].tolist()
        self._names = {layer_name(layer): layer for layer in range(len(self._layers))}
        self._others: dict[str, Part] = {
            **{clusters_name(i): part for i, part in enumerate(listed(arrays, Clusters))},
            **{checkpoint_name(i): part for i, part in enumerate(listed(arrays, SavedCheckpoint))},
        }
        # a session without the array TABLE has no archived tokens: all its parts are checkpoints
        self._begin, end = span(arrays) if TABLE in arrays else (0, 0)
        if not self._parts:
            self._data = np.empty(0, np.uint8)
            return
        if not file:
            raise _useless(name, "is missing", owner)
        if id_of(file) != bytes(arrays[ID]):
            what = "belongs to another session" if id_of(file) else "is damaged"
            raise _useless(name, what, owner)
        self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        order = list(self._segments)
        is_complete = not order or (
            order[0].begin <= self._begin
            and order[-1].end == end
            and all(one.end == other.begin for one, other in pairwise(order))
        )
        with ThreadPoolExecutor(_N_HASHING) as pool:
            if not is_complete or not all(pool.map(self._is_whole, self._parts)):
                raise _useless(name, "is damaged", owner)

    def _is_whole(self, part: Part) -> bool:
        # a truncated file gives fewer bytes, whose hash differs
        return hashlib.sha256(self._bytes_of(part).data).digest() == part.sha256

    def _bytes_of(self, part: Part) -> np.ndarray:
        start = self._parts[part]
        return self._data[start : start + part.size(sum(self._layers))]

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._arrays:
            return self._arrays[name]
        if name in self._others:
            return self._bytes_of(self._others[name])
        parts = [np.empty(0, np.uint8), *(data for _, data in self.pieces(self._names[name]))]
        return np.concatenate(parts)

    def pieces(self, layer: int) -> list[tuple[int, np.ndarray]]:
        """Return (first position, bytes) of each piece of a layer's array: see `segment.pieces`."""
        n_bytes, before = self._layers[layer], sum(self._layers[:layer])
        pieces = []
        for segment, offset in self._segments.items():
            n, first = segment.end - segment.begin, max(self._begin, segment.begin)
            start = offset + before * n + (first - segment.begin) * n_bytes
            pieces.append((first, self._data[start : offset + (before + n_bytes) * n]))
        return pieces

    def __iter__(self) -> Iterator[str]:
        return iter([*self._arrays, *self._names, *self._others])

    def __len__(self) -> int:
        return len(self._arrays) + len(self._names) + len(self._others)


def with_archive(path: Path, arrays: Mapping[str, np.ndarray]) -> ArchivedArrays:
    """Return the arrays of the session at `path` with the arrays of its archive.

    Raises OSError. Raises SessionError if the archive is missing or damaged, if it belongs to another
    session, or if another file is in its place.
    """
    check_place(path)
    archive = None
    with ExitStack() as stack:
        for place in archive_paths(path):
            with suppress(FileNotFoundError):
                file = stack.enter_context(place.open("rb", buffering=0))
                if not archive or id_of(file) == bytes(arrays[ID]):
                    archive = file
        return ArchivedArrays(arrays, archive, f"{path}{SUFFIX}", str(path))


def _useless(name: str, what: str, owner: str) -> SessionError:
    return SessionError(
        f"{name} {what}, and the chat in {owner} cannot continue without its archive; "
        f"restore it, or read the text again with `kvtool chat --reread {quote(owner)} --session NEW.kv`"
    )
