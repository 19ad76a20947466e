"""The file beside a session's that keeps its archive: segments, which are written once and never changed.

A session lists the segments that its archive consists of, with offsets and hashes. A turn appends what it has
archived, and then replaces the session; until then the one before it is whole, and so are its segments.
Some segments have tokens, others say which of its block's clusters each token is in, so that nothing needs to
be clustered anew. A block that has become far has other clusters; the earlier ones are not used any more.

The first line holds the format's number and the file's id, which the session has too. Where most of a file
is of no use any more, or another session shares it, the next turn writes a new one: FILE.archive.next. That
becomes FILE.archive once the session that lists it is there. So a session's archive is always in the file
with its id.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from kvtool.errors import SessionError
from kvtool.llama.segment import (
    CLUSTER_DIGESTS,
    CLUSTERS,
    DIGESTS,
    SEGMENTS,
    Clusters,
    Part,
    Segment,
    listed_parts,
    listing,
)
from kvtool.system.files import create, set_aside, temporary, write_all

if TYPE_CHECKING:
    from kvtool.llama.archive import Archive

FORMAT = 1
"""Increases when the meaning of what is in such a file changes."""

SUFFIX = ".archive"
_NEXT = ".next"
ID, LAYERS = "archive.id", "archive.layers"
_N_ID = 16
_START = b"kvtool archive "
_FIRST = b"%s%d %%s\n" % (_START, FORMAT)
_N_FIRST = len(_FIRST % bytes(2 * _N_ID))
_FIRST_LINE = re.compile(_FIRST % b"([0-9a-f]{32})")
_PIECE = 4 * 2**20
"""Bytes of a segment, about: what is held in memory to write it."""

Listing = list[tuple[str, np.ndarray]]


def archive_path(path: Path) -> Path:
    """The file with the archive of the session at `path`; where that is a link, beside its target."""
    real = Path(os.path.realpath(path))
    return real.with_name(real.name + SUFFIX)


def delete(path: Path) -> None:
    """Removes the archive of the session at `path`, if it has one. Leaves files that are not kvtool's."""
    for place in archive_paths(path):
        _delete(place)


class ArchiveFile:
    """Where a chat's archive is kept: the file beside its session's, or a temporary one.

    Parameters
    ----------
    session
        The session's file; None for a temporary store.
    replaces
        The id of an archive that is replaced with the session that is there; None without one.

    Attributes
    ----------
    moved
        The new name of an archive that lay beside the session's file and belonged to another chat, or None.
    """

    def __init__(self, session: Path | None = None, replaces: bytes | None = None) -> None:
        self.moved: Path | None = None
        self._session = session
        self._replaces = replaces
        self._listed: Mapping[str, np.ndarray] = {}
        self._file: _SegmentFile | None = None

    def adopt(self, saved: Mapping[str, np.ndarray]) -> None:
        """Goes on with the file that the session lists, which was read and is `saved`."""
        self.close()
        names = [ID, LAYERS, SEGMENTS, DIGESTS, CLUSTERS, CLUSTER_DIGESTS]
        # copies: a view of the session's file would keep that open
        self._listed = {name: np.array(saved[name]) for name in names if name in saved}

    @contextmanager
    def write(self, archive: Archive | None) -> Iterator[Listing]:
        """Writes what is new in an archive, and yields the arrays that list all of it.

        The caller writes the session inside. Whatever fails, the session that was there still has its
        segments. Another chat's archive is set aside first. Raises OSError, and SessionError where a file
        that is not kvtool's would be replaced.
        """
        self.open()
        self._set_other_aside()
        old = self._file
        wanted = _wanted(archive, old.at if old else {}) if archive else []
        file = old if old and archive and old.takes(archive, wanted) else None
        if archive and wanted and not file:
            # what the archive has forgotten of a segment is in the old file alone
            file, wanted = self._begin(), _wanted(archive, {})
        end, inode, is_written = old.end if old else 0, self._inode(), False
        try:
            if archive:
                found = file.append(archive, wanted) if file else []
                archive.segments = [each for each in found if isinstance(each, Segment)]
                archive.clusters = [each for each in found if isinstance(each, Clusters)]
            yield _listing(archive, file) if archive else []
            is_written = True
        finally:
            # Ctrl-C may come right behind the session's replacement
            if is_written or self._inode() != inode:
                self._keep(file)
            elif file is not old:
                self._drop(file)
            elif file:
                file.cut(end)

    def _inode(self) -> int | None:
        """Tells whether the session was replaced."""
        try:
            return self._session.stat().st_ino if self._session else None
        except OSError:
            return None

    def open(self) -> None:
        """Opens the file that the session lists, unless it is open. Raises OSError."""
        if self._file and (not self._session or self._file.is_at(archive_paths(self._session))):
            return
        saved = self._listed
        self.close()
        if not self._session or not len(saved.get(SEGMENTS, ())):
            return
        both = _, following = archive_paths(self._session)
        for place in both:
            with ExitStack() as stack, suppress(FileNotFoundError):
                file = stack.enter_context(place.open("r+b", buffering=0))
                if id_of(file) == bytes(saved[ID]):
                    self._file = _SegmentFile(file, bytes(saved[ID]), listed_parts(saved), saved[LAYERS])
                    stack.pop_all()
                    break
        # what a killed process did not come to
        self.finish_rename()
        if self._file:
            _delete(following)

    def finish_rename(self) -> None:
        """Gives an open file that has only its second name the first. Raises OSError."""
        if self._file and self._session:
            path, following = archive_paths(self._session)
            if not self._file.is_at([path]):
                os.replace(following, path)

    def _set_other_aside(self) -> None:
        """Moves an archive that is here and that the session does not list. Raises OSError."""
        self.moved = None
        if not self._session:
            return
        place, known = archive_path(self._session), {self._replaces, id_in(self._listed)}
        try:
            with place.open("rb", buffering=0) as file:
                # what has a second name was set aside before a process was killed
                other = id_of(file) if os.fstat(file.fileno()).st_nlink == 1 else None
        except FileNotFoundError:
            return
        if other and other not in known | ({self._file.name} if self._file else set()):
            spare = set_aside(self._session, SUFFIX)
            place.unlink()
            self.moved = spare.with_name(spare.name + SUFFIX)

    def reopen(self) -> FileIO | None:
        """Opens the file as it is now, to read what a copy of the session lists; None if that lists nothing.

        Raises OSError.
        """
        if not self._file:
            is_listed = len(self._listed.get(SEGMENTS, ())) > 0
            self.open()
            if is_listed and not self._file:
                raise FileNotFoundError
        return FileIO(os.dup(self._file.raw.fileno())) if self._file else None

    def close(self) -> None:
        """Ends the use of the file; a temporary one is gone."""
        if self._file:
            self._file.raw.close()
        self._file, self._listed = None, {}

    def _begin(self) -> _SegmentFile:
        """An empty file, to become the store's own."""
        if not self._session:
            return _SegmentFile.new(cast(FileIO, temporary(buffering=0)))
        path, following = archive_paths(self._session)
        for place in (path, following):
            if place.exists() and not _is_ours(place):
                raise SessionError(f"{place} is not an archive of kvtool; rename it, or name another session")
        self.finish_rename()
        try:
            return _SegmentFile.new(create(following, like=Path(os.path.realpath(self._session))))
        except BaseException:
            _delete(following)
            raise

    def _keep(self, file: _SegmentFile | None) -> None:
        """Makes this file the store's own, now that the session lists it; without one there is none."""
        if file is not self._file:
            self.close()
            self._file = file
            # if not now, then when it is opened the next time
            with suppress(OSError):
                self.finish_rename()
        if not file and self._session:
            delete(self._session)

    def _drop(self, file: _SegmentFile | None) -> None:
        """Deletes a new file, which no session lists."""
        if not file:
            return
        file.raw.close()
        if self._session:
            _delete(archive_paths(self._session)[1])


class _SegmentFile:
    """An open file of segments.

    Attributes
    ----------
    name
        Its id.
    at
        The offsets of what is in it.
    end
        The offset of the next one.
    """

    def __init__(self, raw: FileIO, name: bytes, at: dict[Part, int], layers: Iterable[int] = ()) -> None:
        self.raw = raw
        self.name = name
        self.at = at
        n_bytes = sum(map(int, layers))
        ends = (offset + part.size(n_bytes) for part, offset in at.items())
        self.end = max(ends, default=_N_FIRST)

    @classmethod
    def new(cls, raw: FileIO) -> _SegmentFile:
        file = cls(raw, secrets.token_bytes(_N_ID), {})
        try:
            write_all(raw, _FIRST % file.name.hex().encode())
        except BaseException:
            raw.close()
            raise
        return file

    @property
    def is_shared(self) -> bool:
        """Whether it has a second name: that of a session that was set aside."""
        return os.fstat(self.raw.fileno()).st_nlink > 1

    def is_at(self, paths: Iterable[Path]) -> bool:
        """Whether it has one of these names still."""
        own = os.fstat(self.raw.fileno())
        return any(place.exists() and os.path.samestat(own, place.stat()) for place in paths)

    def takes(self, archive: Archive, wanted: list[Part]) -> bool:
        """Whether segments should go here: most of it would be of use then, and no other session has it."""
        if not wanted:
            return False
        n_bytes = sum(archive.layer_bytes)
        n_new = sum(each.size(n_bytes) for each in wanted if each not in self.at)
        n_all = sum(each.size(n_bytes) for each in wanted)
        return not (n_new and self.is_shared) and self.end - _N_FIRST + n_new <= 2 * n_all

    def append(self, archive: Archive, wanted: list[Part]) -> list[Part]:
        """Writes the parts that it lacks, to the disk. Returns all of them, the new ones with hashes.

        Raises OSError; then some of them are there, to be cut off.
        """
        found: list[Part] = []
        before = self.end
        for part in wanted:
            if part not in self.at:
                if isinstance(part, Clusters):
                    data = archive.read_clusters(part.begin, part.end, part.is_far)
                else:
                    data = archive.read(part.begin, part.end)
                part = part._replace(sha256=hashlib.sha256(data.data).digest())
                self.raw.seek(self.end)
                write_all(self.raw, data.data)
                self.at[part] = self.end
                self.end += data.nbytes
            found.append(part)
        if self.end > before:
            # what a killed process has left
            self.raw.truncate(self.end)
            os.fsync(self.raw.fileno())
        return found

    def cut(self, end: int) -> None:
        """Takes off what was appended behind this offset, if anything was."""
        if self.is_shared:
            # by another session, so nothing was
            return
        self.end, self.at = end, {each: offset for each, offset in self.at.items() if offset < end}
        with suppress(OSError):
            self.raw.truncate(end)


def _wanted(archive: Archive, at: Mapping[Part, int]) -> list[Part]:
    """The parts that an archive consists of. Those to be written are within it, and of few MiB."""
    return [*_wanted_segments(archive, at), *_wanted_clusters(archive, at)]


def _wanted_segments(archive: Archive, at: Mapping[Part, int]) -> list[Segment]:
    begin, end = archive.span.start, archive.span.stop
    found = [
        each if each in at or each.begin >= begin else Segment(begin, each.end, b"")
        for each in archive.segments
        if each.end > begin
    ]
    n = max(_PIECE // sum(archive.layer_bytes), 1)
    starts = range(found[-1].end if found else begin, end, n)
    return found + [Segment(start, min(start + n, end), b"") for start in starts]


def _wanted_clusters(archive: Archive, at: Mapping[Part, int]) -> list[Clusters]:
    """Those of all blocks that have some now; to be written are those that are not there."""
    n, n_bytes = archive.n_token, archive.block_bytes
    blocks = archive.clustered
    current = set(blocks)
    found: list[Clusters] = []
    there: set[tuple[int, bool]] = set()
    for each in archive.clusters:
        first = max(each.begin, archive.span.start // n * n)
        # a block that is far in some rows has near ones in the others
        own = {block for block in range(first, each.end, n) if ((block, True) in current) == each.is_far}
        if each in at and own:
            found.append(each)
            there |= {(block, each.is_far) for block in own}
    for block, is_far in blocks:
        if (block, is_far) in there:
            continue
        last = found[-1] if found else None
        is_next = last and not last.sha256 and (last.end, last.is_far) == (block, is_far)
        if last and is_next and last.n_bytes < _PIECE:
            found[-1] = last._replace(end=block + n, n_bytes=last.n_bytes + n_bytes)
        else:
            found.append(Clusters(block, block + n, is_far, n_bytes, b""))
    return found


def _listing(archive: Archive, file: _SegmentFile | None) -> Listing:
    return [
        (ID, np.frombuffer(file.name if file else bytes(_N_ID), np.uint8)),
        (LAYERS, np.array(archive.layer_bytes, np.int64)),
        *listing(archive.segments, archive.clusters, file.at if file else {}),
    ]


def size(session: Path) -> int:
    """Bytes of the archive of the session at `session`, with what a killed process has left of a next one."""
    n = 0
    for place in archive_paths(session):
        with suppress(OSError):
            n += place.stat().st_size
    return n


def archive_paths(session: Path) -> tuple[Path, Path]:
    """The two names of a session's archive."""
    path = archive_path(session)
    return path, path.with_name(path.name + _NEXT)


def _delete(place: Path) -> None:
    with suppress(OSError):
        if _is_ours(place):
            place.unlink()


def id_in(arrays: Mapping[str, np.ndarray]) -> bytes | None:
    """The id of the archive that a session lists; None without one. arrays: the session's own."""
    return bytes(arrays[ID]) if ID in arrays else None


def id_of(file: FileIO) -> bytes | None:
    """The id of an archive; None where it is not one of this format."""
    file.seek(0)
    found = _FIRST_LINE.fullmatch(file.read(_N_FIRST))
    return bytes.fromhex(found[1].decode()) if found else None


def _is_ours(path: Path) -> bool:
    """Whether a file is an archive, or the empty beginning of one."""
    with path.open("rb") as file:
        return file.read(len(_START)) in (b"", _START)
