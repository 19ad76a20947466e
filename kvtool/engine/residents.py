"""Residents: archived tokens in cells on the device.

With residents, a step that decodes a token of the reply does not search the archive on the host.
"""

from __future__ import annotations

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.errors import KvtoolError, LibraryError, StreamEnd

_LIMITS = (0.0125, 0.04)
"""Smallest and largest limit of the attention that a step may miss. If a step misses more, it is repeated.

The missed attention is attention to clusters that should have been resident, as far as their mean keys do not
represent it. It is estimated. The limit is a share of all attention, averaged over all query heads.

Models differ in how much their steps miss. Therefore the limit adapts: it settles where `_REPEATED` of the
steps are repeated, if this is possible between the two limits.
"""

_REPEATED = 0.04
"""Share of steps that are repeated in the long run."""

_PACE = 0.02
"""Share by which a repetition raises the limit."""

_MOST_REPEATS = 3
"""Maximum number of repetitions of a step.

A repetition changes the queries of later layers, so these layers may then need other clusters.
"""

_N_BLOCK, _N_CLUSTER = 256, 16
"""Number of tokens in a block of the archive, and number of clusters in a block."""

_N_UNCLUSTERED = 3 * _N_BLOCK // 2
"""Number of cells in each row for tokens that have no cluster yet."""

_MOST_MEANS = 33 * _N_BLOCK
"""Maximum number of cells for means of clusters in each row, enough for 134,656 archived tokens.

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
    n_repeated
        Number of times that a step was decoded again because it missed too much.
    obstacle
        Reason why there can be no residents although the settings ask for them; "" if there is no reason.
    """

    def __init__(self, cache: PolicyCache, settings: Settings) -> None:
        self._cache = cache
        self._n_mean = 0
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
        """Raises LibraryError if the model or its cache cannot have residents."""
        archive = self._cache.context.archive
        return archive.resident_bytes(_n_mean(archive.n_max), self.n_token) if archive and self.n_token else 0

    @property
    def refusal(self) -> str:
        """Reason why no step has had residents although the user asked for them.

        "" if steps have had residents, if nothing has been archived yet, or if the user did not ask for them.
        """
        archive = self._cache.context.archive
        if self.obstacle or not self.n_token or self._n_mean or not (archive and archive.n):
            return self.obstacle
        return "only steps of one token use them, and no such step followed the first eviction"

    @property
    def n_now(self) -> int:
        """Resident tokens of each row now; 0 if no step has needed residents yet, or if there is no room."""
        return self.n_token if self._n_mean else 0

    def prepare(self) -> None:
        """Provide the cells that a step needs. If the device has no room for them, set `n_token` to 0."""
        self._n_left = _MOST_REPEATS
        archive = self._cache.context.archive
        assert archive
        n_archived = archive.n
        if not n_archived or not self._n_mean < _n_cluster(n_archived) <= _MOST_MEANS:
            return
        n_mean = _n_mean(n_archived)
        try:
            archive.reside(n_mean, self.n_token)
            self._n_mean = n_mean
        except (LibraryError, StreamEnd) as error:
            if self._n_mean:
                archive.reside(0, 0)
            self.n_token, self._n_mean, self.obstacle = 0, 0, _why(error)

    def misses(self) -> bool:
        """Return True if the last step has to be decoded again with other residents.

        The archive chooses these residents in this method. After the maximum number of repetitions, the
        residents stay the same, and the result is False.
        """
        archive = self._cache.context.archive
        assert archive
        if not self._n_mean or not self._n_left:
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
    """Return how many cells a row gets for n_token residents of an archive of n_archived tokens."""
    n = _n_mean(n_archived) + n_token + _N_UNCLUSTERED + 1
    return -(-n // _N_BLOCK) * _N_BLOCK


def _n_cluster(n_archived: int) -> int:
    """Return how many clusters a row with n_archived tokens may have now and after the next eviction."""
    # count two more blocks: the first block may be cut at its start, and the next eviction may complete
    # another block
    return (n_archived // _N_BLOCK + 2) * _N_CLUSTER


def _n_mean(n_archived: int) -> int:
    """Return how many cells for means of clusters a row gets if n_archived tokens are archived."""
    # leave room for a quarter more clusters, because every enlargement copies all cells
    return min(-(-_n_cluster(n_archived) * 5 // 4 // _N_BLOCK) * _N_BLOCK, _MOST_MEANS)


def _why(error: KvtoolError) -> str:
    return str(error).removeprefix("llama.cpp refused: ")
