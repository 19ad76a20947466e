"""Residents: cells on the device that hold archived tokens, and means of clusters.

Steps that decode a reply attend to residents, so they need not search the archive on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.errors import KvtoolError, LibraryError, StreamEnd
from kvtool.llama.cache.segment import N_BLOCK

_LIMITS = (0.0125, 0.04)
"""Smallest and largest limit for the share of attention that a step may miss (see `Archive.missed`).

A step that misses more is repeated. Models differ in how much their steps miss, so the limit adapts within
this range, until the share `_REPEATED` of the steps is repeated.
"""

_REPEATED = 0.04
"""Target for the share of repeated steps."""

_PACE = 0.02
"""Speed of adaptation: a repetition raises the limit by about this share."""

_MAX_REPEATS = 3
"""Maximum number of repetitions of a step.

A repetition changes the queries of later layers, so these layers may then need other clusters.
"""

_N_CLUSTER = 16
"""Number of clusters in a block of the archive."""

_N_UNCLUSTERED = 3 * N_BLOCK // 2
"""Number of cells in each row for tokens that have no cluster yet."""

_MAX_MEANS = 16 * N_BLOCK
"""Maximum number of cells for means in each row.

It is enough for the means of all clusters of 65,024 archived tokens. In a longer archive, each set of 16
clusters has a mean, and the remaining cells are for the clusters of the best sets.
"""

_MAX_SETS = 3 * _MAX_MEANS // 4
"""Maximum number of cells for means of sets in each row, enough for 777,728 archived tokens.

A longer archive is searched on the host.
"""


class Residents:
    """Provides the cells of residents, and decides which steps are repeated.

    Attributes
    ----------
    n_token
        Number of resident tokens of each row. 0 if every step searches the archive on the host.
    n_bytes
        Bytes that the residents' cells take on the devices once the archive is full.
    obstacle
        Reason why residents are impossible although the settings ask for them; "" if they are possible.
    """

    def __init__(self, cache: PolicyCache, settings: Settings) -> None:
        self._cache = cache
        self._means = _NO_MEANS
        self._n_left = 0
        self._limit = sum(_LIMITS) / 2
        self.n_token = settings.resident if cache.policy.recall else 0
        self.n_repeated = 0
        self.obstacle = ""
        try:
            self.n_bytes = self._bytes_of_all()
        except LibraryError as error:
            self.n_token, self.n_bytes, self.obstacle = 0, 0, _why(error)

    def _bytes_of_all(self) -> int:
        """Return `n_bytes`. Raises LibraryError if the model or its cache cannot have residents."""
        archive = self._cache.context.archive
        if not archive or not self.n_token:
            return 0
        means = _means_for(archive.n_max)
        return archive.resident_bytes(means.n_mean, means.n_mean_set, self.n_token)

    @property
    def refusal(self) -> str:
        """Reason why no step has had residents although the user requested them.

        "" if steps have had residents, if nothing has been archived yet, or if the user did not request them.
        """
        archive = self._cache.context.archive
        if self.obstacle or not self.n_token or self._means.n_mean or not (archive and archive.n):
            return self.obstacle
        return "only steps of one token use them, and no such step followed the first eviction"

    @property
    def n_now(self) -> int:
        """Number of resident tokens of each row now; 0 if there are no residents."""
        return self.n_token if self._means.n_mean else 0

    def prepare(self) -> None:
        """Make room for the next step's residents. If the device has no memory left, set `n_token` to 0."""
        self._n_left = _MAX_REPEATS
        archive = self._cache.context.archive
        assert archive
        means = _means_for(archive.n)
        if not archive.n or self._means.are_enough(archive.n) or not means.are_enough(archive.n):
            return
        try:
            archive.reside(means.n_mean, means.n_mean_set, self.n_token)
            self._means = means
        except (LibraryError, StreamEnd) as error:
            if self._means.n_mean:
                archive.reside(0, 0, 0)
            self.n_token, self._means, self.obstacle = 0, _NO_MEANS, _why(error)

    def misses(self) -> bool:
        """Choose residents again, and return True if the last step has to be repeated with them.

        After the maximum number of repetitions, do nothing and return False.
        """
        archive = self._cache.context.archive
        assert archive
        if not self._means.n_mean or not self._n_left:
            return False
        is_repeated = archive.missed() > self._limit
        low, high = _LIMITS
        self._limit = min(max(self._limit * (1 + _PACE * (is_repeated - _REPEATED)), low), high)
        if not is_repeated:
            return False
        self._n_left -= 1
        self.n_repeated += 1
        return True


def n_cells(n_token: int, n_archived: int) -> int:
    """Return the number of a row's cells for residents, if n_token of n_archived tokens are resident."""
    means = _means_for(n_archived)
    n = means.n_mean + means.n_mean_set + n_token + _N_UNCLUSTERED + 1
    return -(-n // N_BLOCK) * N_BLOCK


@dataclass(frozen=True, slots=True)
class _Means:
    """Numbers of a row's cells for means of clusters and for means of sets."""

    n_mean: int
    n_mean_set: int

    def are_enough(self, n_archived: int) -> bool:
        """Return True if there are enough cells now and after the next eviction."""
        if self.n_mean_set:
            return _n_set(n_archived) <= self.n_mean_set
        return _n_cluster(n_archived) <= self.n_mean


_NO_MEANS = _Means(0, 0)


def _n_cluster(n_archived: int) -> int:
    """Return the maximum number of clusters of a row, now and after the next eviction."""
    # count two more blocks: the first block may be cut at its start, and the next eviction may complete
    # another block
    return (n_archived // N_BLOCK + 2) * _N_CLUSTER


def _n_set(n_archived: int) -> int:
    """Return the maximum number of sets of a row, now and after the next eviction."""
    # a group has 16 blocks and 16 sets. The first and the last group may lack blocks: count all their sets
    return n_archived // N_BLOCK + 2 + 2 * _N_CLUSTER


def _means_for(n_archived: int) -> _Means:
    if (n_cluster := _n_cluster(n_archived)) <= _MAX_MEANS:
        return _Means(min(_with_reserve(n_cluster), _MAX_MEANS), 0)
    n_mean_set = min(_with_reserve(_n_set(n_archived)), _MAX_SETS)
    return _Means(_MAX_MEANS - n_mean_set, n_mean_set)


def _with_reserve(n: int) -> int:
    """Return the number of cells for n means and a quarter more.

    With this reserve, the cells are enlarged less often. Each enlargement copies all cells.
    """
    return -(-n * 5 // 4 // N_BLOCK) * N_BLOCK


def _why(error: KvtoolError) -> str:
    return str(error).removeprefix("llama.cpp refused: ")
