"""Segments of an archive: how a session lists what it has saved. Knows nothing of llama.cpp."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

TABLE = "archive"
"""The array with what else there is to an archive; the first two numbers are where it begins and ends."""

SEGMENTS, DIGESTS = "archive.segments", "archive.sha256"
"""The arrays that list the segments: i64[n, 3] begin, end, offset in their file, and u8[n, 32]."""


CLUSTERS, CLUSTER_DIGESTS = "archive.clusters", "archive.clusters.sha256"
"""The arrays that list clusters: i64[n, 5] begin, end, 1 if far, bytes, offset, and u8[n, 32]."""

N_CLUSTERS = 5


class Segment(NamedTuple):
    """Archived tokens that have been saved together, and never change.

    Attributes
    ----------
    begin, end
        Their positions in the stream.
    sha256
        Of what `Archive.read` gives of them.
    """

    begin: int
    end: int
    sha256: bytes

    def size(self, token_bytes: int) -> int:
        """Bytes, given those of a token."""
        return (self.end - self.begin) * token_bytes


class Clusters(NamedTuple):
    """Which clusters the tokens of some blocks are in, saved together.

    Attributes
    ----------
    begin, end
        Where the blocks begin and end in the stream.
    is_far
        Whether these are the clusters of far tokens: a block that becomes far gets others.
    n_bytes
        Bytes of them.
    sha256
        Of what `Archive.read_clusters` gives.
    """

    begin: int
    end: int
    is_far: bool
    n_bytes: int
    sha256: bytes

    def size(self, _: int) -> int:
        """Bytes, whatever those of a token are."""
        return self.n_bytes


Part: TypeAlias = "Segment | Clusters"
"""What is written at once."""


def clusters_name(i: int) -> str:
    """The name of the array with the ith clusters that are listed."""
    return f"{CLUSTERS}.{i}"


def layer_name(layer: int) -> str:
    """The name of the array with a layer's tokens."""
    return f"{TABLE}.{layer}"


def pieces(saved: Mapping[str, np.ndarray], layer: int) -> list[tuple[int, np.ndarray]]:
    """A layer's tokens as they lie in memory or in a file: where each piece begins, and its bytes.

    To join them takes as long as all else that an archive is restored by. Raises KeyError where there are
    none.
    """
    own: Callable[[int], list[tuple[int, np.ndarray]]] | None = getattr(saved, "pieces", None)
    return own(layer) if own else [(span(saved)[0], saved[layer_name(layer)])]


def span(saved: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Where an archive begins and ends that was saved."""
    begin, end = saved[TABLE][:2].tolist()
    return begin, end


def listed(saved: Mapping[str, np.ndarray]) -> dict[Segment, int]:
    """The segments that saved arrays list, oldest first, with their offsets; none if they have the tokens."""
    if SEGMENTS not in saved:
        return {}
    digests = map(bytes, saved[DIGESTS])
    return {
        Segment(begin, end, sha256): at
        for (begin, end, at), sha256 in zip(saved[SEGMENTS].tolist(), digests, strict=True)
    }


def listed_clusters(saved: Mapping[str, np.ndarray]) -> dict[Clusters, int]:
    """The same of clusters; sessions of earlier versions have none."""
    if CLUSTER_DIGESTS not in saved:
        return {}
    digests = map(bytes, saved[CLUSTER_DIGESTS])
    return {
        Clusters(begin, end, bool(is_far), n_bytes, sha256): at
        for (begin, end, is_far, n_bytes, at), sha256 in zip(saved[CLUSTERS].tolist(), digests, strict=True)
    }


def listed_parts(saved: Mapping[str, np.ndarray]) -> dict[Part, int]:
    """Both together."""
    return dict(chain(listed(saved).items(), listed_clusters(saved).items()))


def listing(
    segments: Sequence[Segment], clusters: Sequence[Clusters], at: Mapping[Part, int]
) -> list[tuple[str, np.ndarray]]:
    """The arrays that list these; none of clusters where there are none. at: their offsets."""
    table = [(each.begin, each.end, at[each]) for each in segments]
    found = [(SEGMENTS, np.array(table, np.int64).reshape(-1, 3)), (DIGESTS, _digests(segments))]
    if clusters:
        found += [
            (CLUSTERS, np.array([(*each[:-1], at[each]) for each in clusters], np.int64)),
            (CLUSTER_DIGESTS, _digests(clusters)),
        ]
    return found


def _digests(parts: Sequence[Part]) -> np.ndarray:
    n = hashlib.sha256().digest_size
    return np.frombuffer(b"".join(each.sha256 for each in parts), np.uint8).reshape(-1, n)
