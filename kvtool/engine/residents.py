"""Residents: archived tokens in cells on the device, so that a step that writes searches no archive."""

from __future__ import annotations

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, StreamEnd

_MISSED = 0.5
"""A step is repeated if a larger share of a query's attention fell on clusters that should be resident.

The share is an estimate, which counts more for clusters whose keys differ much.
"""

_MOST_REPEATS = 3
"""Maximum repetitions of a step. Each changes the queries of later layers, which may need other clusters."""

_N_BLOCK, _N_CLUSTER = 256, 16
"""Tokens of a block of the archive, and clusters of a block."""

_MOST_MEANS = 4096
"""Maximum number of cells for means in each row. A longer archive is searched on the host."""


class Residents:
    """Provides the cells of residents, and decides which steps are repeated.

    Attributes
    ----------
    n_token
        Resident tokens of each row; 0: every step searches the archive on the host.
    n_repeated
        Number of times that a step was decoded again because it missed too much.
    refusal
        Reason why steps have no residents although they were asked for; "" if they may have them.
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
        """Resident tokens of each row at present; 0 if no step has needed them, or if there is no room."""
        return self.n_token if self._n_mean else 0

    def prepare(self) -> None:
        """Provide the cells that a step needs. A device without room leaves n_token at 0."""
        self._n_left = _MOST_REPEATS
        archive = self._cache.context.archive
        assert archive
        n_archived = archive.n
        if not n_archived:
            return
        # one block may be cut at its start, and the next eviction may complete another one
        n_mean = (n_archived // _N_BLOCK + 2) * _N_CLUSTER
        if not self._n_mean < n_mean <= _MOST_MEANS:
            return
        # room for half as many clusters again, so that cells are moved rarely
        n_mean = min(-(-n_mean * 3 // 2 // _N_BLOCK) * _N_BLOCK, _MOST_MEANS)
        try:
            archive.reside(n_mean, self.n_token)
            self._n_mean = n_mean
        except (LibraryError, StreamEnd) as error:
            if self._n_mean:
                archive.reside(0, 0)
            self.n_token, self._n_mean, self.refusal = 0, 0, str(error)

    def misses(self) -> bool:
        """Choose the next residents; True if the last step has to be decoded again with them."""
        archive = self._cache.context.archive
        assert archive
        if not self._n_mean or not self._n_left or archive.missed() <= _MISSED:
            return False
        self._n_left -= 1
        self.n_repeated += 1
        return True
