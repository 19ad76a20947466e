"""Residents: archived tokens in cells on the device.

With residents, a step that decodes a token of the reply does not search the archive on the host.
"""

from __future__ import annotations

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, StreamEnd

_MISSED = 0.5
"""Maximum share of a query's attention that a step may miss. If a step misses more, it is repeated.

The missed attention is attention to clusters that should have been resident. It is an estimate, which is
higher for clusters whose keys differ much.
"""

_MOST_REPEATS = 3
"""Maximum number of repetitions of a step.

A repetition changes the queries of later layers, so these layers may then need other clusters.
"""

_N_BLOCK, _N_CLUSTER = 256, 16
"""Number of tokens in a block of the archive, and number of clusters in a block."""

_MOST_MEANS = 4096
"""Maximum number of cells for means of clusters in each row. A longer archive is searched on the host."""


class Residents:
    """Provides the cells of residents, and decides which steps are repeated.

    Attributes
    ----------
    n_token
        Number of resident tokens of each row. 0 if every step searches the archive on the host.
    n_repeated
        Number of times that a step was decoded again because it missed too much.
    refusal
        Reason why steps have no residents although the settings ask for them; "" without such a reason.
    """

    def __init__(self, cache: PolicyCache, settings: Settings) -> None:
        self._cache = cache
        self._n_mean = 0
        self._n_left = 0
        self.n_token = settings.resident if cache.policy.recall else 0
        self.n_repeated = 0
        self.refusal = ""

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
        if not n_archived:
            return
        # add two blocks, because one block may be cut at its start, and the next eviction may complete
        # another block
        n_mean = (n_archived // _N_BLOCK + 2) * _N_CLUSTER
        if not self._n_mean < n_mean <= _MOST_MEANS:
            return
        # make room for 50 % more clusters, so that the cells are rarely moved to a larger place
        n_mean = min(-(-n_mean * 3 // 2 // _N_BLOCK) * _N_BLOCK, _MOST_MEANS)
        try:
            archive.reside(n_mean, self.n_token)
            self._n_mean = n_mean
        except (LibraryError, StreamEnd) as error:
            if self._n_mean:
                archive.reside(0, 0)
            self.n_token, self._n_mean, self.refusal = 0, 0, str(error)

    def misses(self) -> bool:
        """Return True if the last step has to be decoded again with other residents.

        Chooses these residents, unless no repetition is left.
        """
        archive = self._cache.context.archive
        assert archive
        if not self._n_mean or not self._n_left or archive.missed() <= _MISSED:
            return False
        self._n_left -= 1
        self.n_repeated += 1
        return True
