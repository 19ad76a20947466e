"""Lists of the parts in FILE.archive: segments of archived tokens, their clusters, and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

N_BLOCK = 256
"""Number of tokens in a block of the archive (`store::n_block` of the patch)."""

TABLE = "archive"
"""Name of the array with an archive's table, i64[3 + 2 * n_frame].

The first three numbers are the position of the first token, the position after the last token, and the
position after the last far token (see `Clusters`). Two numbers follow for each frame, which is a run of
tokens: its first position, and its base. The keys of a frame were rotated to their position minus its base.
"""

CENTERS = "archive.centers"
"""Name of the array with the centers of an archive's blocks, u8[n_block, bytes], if keys are iq4_nl.

A center is a vector that is subtracted from the keys of a block before they are stored.
"""

SEGMENTS, DIGESTS = "archive.segments", "archive.sha256"
"""Names of two arrays for n segments: i64[n, 3] (begin, end, offset in the file), and SHA-256 u8[n, 32]."""

CLUSTERS, CLUSTER_DIGESTS = "archive.clusters", "archive.clusters.sha256"
"""Names of two arrays of clusters: i64[n, 5] (begin, end, is far, bytes, offset), and SHA-256 u8[n, 32]."""

CHECKPOINTS, CHECKPOINT_DIGESTS = "checkpoints", "checkpoints.sha256"
"""Names of two arrays for n checkpoints.

The first is i64[n, 6], with the numbers in `SavedCheckpoint` and the offset in the file. The second has the
SHA-256 digests u8[n, 32].
"""


class Segment(NamedTuple):
    """Archived tokens at positions begin .. end - 1, which were saved together and never change.

    sha256: digest of the bytes that `Archive.read` returns for the tokens.
    """

    begin: int
    end: int
    sha256: bytes

    def size(self, token_bytes: int) -> int:
        """Return the size in bytes; token_bytes: bytes of one token."""
        return (self.end - self.begin) * token_bytes


class Clusters(NamedTuple):
    """Clusters of the blocks at positions begin .. end - 1. They are saved together.

    Attributes
    ----------
    is_far
        True if the tokens are more than n_near positions back (see `ArchiveSettings`). When a block becomes
        far, it is clustered again.
    sha256
        Digest of the bytes that `Archive.read_clusters` returns for the blocks.
    """

    begin: int
    end: int
    is_far: bool
    n_bytes: int
    sha256: bytes

    def size(self, _: int) -> int:
        return self.n_bytes


class SavedCheckpoint(NamedTuple):
    """Checkpoint after n_past tokens of the stream: the state of the sliding and recurrent layers.

    If evicted tokens are lost, a checkpoint is a copy of the whole cache instead.

    Attributes
    ----------
    n_kv
        Number of live cells in each row.
    base
        Keys in the cache were rotated to their position minus this number.
    n_restart
        Number of times that the gaps between positions had been closed.
    sha256
        Digest of the state; b"" if it is not saved yet.
    """

    n_past: int
    n_kv: int
    base: int
    n_restart: int
    n_bytes: int
    sha256: bytes = b""

    def size(self, _: int) -> int:
        return self.n_bytes


Part: TypeAlias = "Segment | Clusters | SavedCheckpoint"
"""A part that FILE.archive stores separately. Its last field is its digest."""

_Kind = TypeVar("_Kind", Segment, Clusters, SavedCheckpoint)

LISTS: dict[type[Part], tuple[str, str]] = {
    Segment: (SEGMENTS, DIGESTS),
    Clusters: (CLUSTERS, CLUSTER_DIGESTS),
    SavedCheckpoint: (CHECKPOINTS, CHECKPOINT_DIGESTS),
}
"""Names of the two arrays that list the parts of each type: one with their digests, one with the rest."""


def clusters_name(i: int) -> str:
    """Return the name of the array that holds the clusters in row i of the list `CLUSTERS`."""
    return f"{CLUSTERS}.{i}"


def checkpoint_name(i: int) -> str:
    """Return the name of the array that holds the checkpoint in row i of the list `CHECKPOINTS`."""
    return f"{CHECKPOINTS}.{i}"


def n_blocks(begin: int, end: int) -> int:
    """Return the number of blocks that have tokens at positions begin .. end - 1."""
    return -(-end // N_BLOCK) - begin // N_BLOCK if begin < end else 0


def layer_name(layer: int) -> str:
    """Return the name of the array with a layer's tokens."""
    return f"{TABLE}.{layer}"


def pieces(saved: Mapping[str, np.ndarray], layer: int) -> list[tuple[int, np.ndarray]]:
    """Return (first position, bytes) of each stored piece of a layer's tokens.

    Pieces are not joined, because copying them would double the time of restoring an archive. Raises KeyError
    for a layer without pieces.
    """
    stored: Callable[[int], list[tuple[int, np.ndarray]]] | None = getattr(saved, "pieces", None)
    return stored(layer) if stored else [(span(saved)[0], saved[layer_name(layer)])]


def span(saved: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Return the first position of a saved archive, and the position after its last token."""
    begin, end = saved[TABLE][:2].tolist()
    return begin, end


def listed(saved: Mapping[str, np.ndarray], kind: type[_Kind]) -> dict[_Kind, int]:
    """Return the listed parts of a type, oldest first, with their offsets.

    Return {} if there is no such list: sessions of earlier versions do not list clusters and checkpoints, and
    the arrays of `Archive.save` do not list segments.
    """
    table, digests = LISTS[kind]
    if digests not in saved:
        return {}
    rows = zip(saved[table].tolist(), saved[digests], strict=True)
    return {kind._make([*fields, bytes(digest)]): at for (*fields, at), digest in rows}


def listed_parts(saved: Mapping[str, np.ndarray]) -> dict[Part, int]:
    """Return all listed parts with their offsets."""
    lists = listed(saved, Segment), listed(saved, Clusters), listed(saved, SavedCheckpoint)
    return dict(chain.from_iterable(each.items() for each in lists))


def listing(parts: Sequence[Part], at: Mapping[Part, int]) -> list[tuple[str, np.ndarray]]:
    """Return the named arrays that list saved parts. at: offset of each part in the file."""
    arrays = []
    for kind, (table, digests) in LISTS.items():
        own = [part for part in parts if isinstance(part, kind)]
        if own or kind is Segment:
            # the number of columns must be given, because the list of segments may be empty
            fields = np.array([(*part[:-1], at[part]) for part in own], np.int64)
            arrays += [(table, fields.reshape(-1, len(kind._fields))), (digests, _digests(own))]
    return arrays


def _digests(parts: Sequence[Part]) -> np.ndarray:
    n = hashlib.sha256().digest_size
    return np.frombuffer(b"".join(part.sha256 for part in parts), np.uint8).reshape(-1, n)
