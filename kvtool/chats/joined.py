"""Arrays of a session and of its archive, which are read from the segments of FILE.archive."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import FileIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvtool.chats.archive_file import ID, LAYERS, SUFFIX, archive_paths, id_of
from kvtool.errors import SessionError
from kvtool.llama.segment import Part, clusters_name, layer_name, listed, listed_clusters, listed_parts, span

_N_HASHING = min(os.cpu_count() or 1, 4)
"""Threads that check the hashes: for a large archive that takes most of the time of loading."""


class Joined(Mapping[str, np.ndarray]):
    """Arrays of a session and of its archive. An archive array is put together when it is read.

    Parameters
    ----------
    arrays
        Arrays in the session file.
    file
        The archive file; None if it is missing.
    name, owner
        Names of the archive file and of the session in error messages.

    Raises
    ------
    SessionError
        If the archive file is missing, damaged, or belongs to another session.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], file: FileIO | None, name: str, owner: str) -> None:
        self._arrays = arrays
        self._segments = listed(arrays)
        self._parts = listed_parts(arrays)
        self._layers = arrays[LAYERS].tolist()
        self._names = {layer_name(layer): layer for layer in range(len(self._layers))}
        self._clusters = {clusters_name(i): each for i, each in enumerate(listed_clusters(arrays))}
        self._begin, end = span(arrays)
        if not self._segments:
            self._data = np.empty(0, np.uint8)
            return
        if not file:
            raise _useless(name, "is missing", owner)
        if id_of(file) != bytes(arrays[ID]):
            what = "belongs to another session" if id_of(file) else "is damaged"
            raise _useless(name, what, owner)
        self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        order = list(self._segments)
        is_complete = (
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
        at = self._parts[part]
        return self._data[at : at + part.size(sum(self._layers))]

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._arrays:
            return self._arrays[name]
        if name in self._clusters:
            return self._bytes_of(self._clusters[name])
        parts = [np.empty(0, np.uint8), *(data for _, data in self.pieces(self._names[name]))]
        return np.concatenate(parts)

    def pieces(self, layer: int) -> list[tuple[int, np.ndarray]]:
        """Return the pieces of a layer's array, as `llama.segment.pieces` does."""
        n_bytes, before = self._layers[layer], sum(self._layers[:layer])
        found = []
        for segment, at in self._segments.items():
            n, first = segment.end - segment.begin, max(self._begin, segment.begin)
            start = at + before * n + (first - segment.begin) * n_bytes
            found.append((first, self._data[start : at + (before + n_bytes) * n]))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._arrays, *self._names, *self._clusters])

    def __len__(self) -> int:
        return len(self._arrays) + len(self._names) + len(self._clusters)


def join(path: Path, arrays: Mapping[str, np.ndarray]) -> Joined:
    """Return the arrays of the session at `path` with the arrays of its archive.

    Raises OSError. Raises SessionError if the archive is missing, damaged, or belongs to another session.
    """
    found = None
    with ExitStack() as stack:
        for place in archive_paths(path):
            with suppress(FileNotFoundError):
                file = stack.enter_context(place.open("rb", buffering=0))
                if not found or id_of(file) == bytes(arrays[ID]):
                    found = file
        return Joined(arrays, found, f"{path}{SUFFIX}", str(path))


def _useless(name: str, what: str, owner: str) -> SessionError:
    return SessionError(
        f"{name} {what}, and the chat in {owner} cannot continue without its archive; "
        f"restore it, or print the text with `kvtool session export {owner}`"
    )
