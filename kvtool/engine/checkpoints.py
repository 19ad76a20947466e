"""Checkpoints: copies of the sliding and recurrent layers' state, to which a stream can be rewound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvtool.engine.policy_cache import PolicyCache
from kvtool.errors import UsageError
from kvtool.llama.segment import SavedCheckpoint, checkpoint_name, listed_checkpoints
from kvtool.system.memory import free_bytes

SPACING = 1024
"""Least value of `Checkpoints.spacing`."""

_GPU_TOKEN_BYTES = 24 * 2**10
"""On a GPU, bytes of checkpoints for each token: copying them takes about 2 % of the time of reading.

An estimate for 5,000 tokens and 6 GB a second, not measured.
"""

_SHARE = 16
"""By default, the checkpoints of a stream may take one 16th of the free memory."""

_LEAST, _MOST_SHARE = 8, 4
"""By default there are at least eight checkpoints, if they take at most a quarter of the free memory."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """State of the sliding and recurrent layers at an earlier place of the stream.

    Attributes
    ----------
    part
        The place, and the digest of the state once a session has it.
    data
        u1[n_bytes]: the arrays of `FixedState.save`, one after the other.
    """

    part: SavedCheckpoint
    data: np.ndarray

    @property
    def n_past(self) -> int:
        """Number of tokens before it."""
        return self.part.n_past


class Checkpoints:
    """Checkpoints of a stream, oldest first. The distance between them grows with their age.

    Parameters
    ----------
    cache
        The cache of the stream.
    max_bytes
        Maximum bytes of all checkpoints; 0 for no checkpoints. Default: a 16th of the free memory, or more
        for eight checkpoints, but at most a quarter.

    Attributes
    ----------
    n_max
        Maximum number of checkpoints. 0 if max_bytes is 0, if the model needs no checkpoints, if memory is
        short, or if earlier rows are not kept (`PolicyCache.keeps_all`).
    spacing
        Number of tokens after which another checkpoint is due.

    Raises
    ------
    UsageError
        If max_bytes is too small for one checkpoint.
    """

    def __init__(self, cache: PolicyCache, max_bytes: int | None) -> None:
        self._cache = cache
        self._all: list[Checkpoint] = []
        self.spacing = SPACING
        fixed_state = cache.context.fixed_state
        self.n_max = 0
        if not fixed_state or not cache.keeps_all or max_bytes == 0:
            return
        n_bytes = fixed_state.n_bytes
        if cache.context.kv_offload and cache.context.model.is_on_gpu:
            self.spacing = max(SPACING, n_bytes // _GPU_TOKEN_BYTES)
        if max_bytes is None:
            n = free_bytes() // n_bytes
            self.n_max = max(n // _SHARE, min(n // _MOST_SHARE, _LEAST))
        else:
            self.n_max = max_bytes // n_bytes
            if not self.n_max:
                raise UsageError(
                    # rounded up, so that the printed size is accepted
                    f"--checkpoints must be at least {-(-n_bytes // 1024)}KiB for one checkpoint of this "
                    "model, or 0 for none"
                )

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(each.part.n_bytes for each in self._all)

    def share(self, n: int) -> None:
        """Lower the limit to 1/n, to leave the rest of the memory to the other caches of a server."""
        self.n_max = min(self.n_max, max(self.n_max // n, _LEAST))

    @property
    def is_due(self) -> bool:
        """True if the stream has grown enough since the newest checkpoint for another one."""
        if not self.n_max:
            return False
        newest = self._all[-1].n_past if self._all else 0
        return self._cache.rows.n_past - newest >= self.spacing

    def take(self) -> None:
        """Make a checkpoint of the stream as it is now, unless the newest one is the same."""
        cache, rows = self._cache, self._cache.rows
        if not self.n_max or not rows.n_past or (self._all and self._all[-1].n_past == rows.n_past):
            return
        if len(self._all) == self.n_max:
            # before the copy, so that memory never holds one more
            self._thin()
        assert cache.context.fixed_state
        data = cache.context.fixed_state.copy()
        base = rows.n_past - rows.next_rot
        part = SavedCheckpoint(rows.n_past, rows.n_kv, base, cache.n_restart, data.nbytes)
        self._all.append(Checkpoint(part, data))

    def _thin(self) -> None:
        """Drop the checkpoint that saves the least reading.

        Without a checkpoint, the tokens up to the next one are read from the one before. A stream is
        rewound by few tokens more often than by many, so a token counts less the older it is.
        """
        places = np.array([0, *(each.n_past for each in self._all), self._cache.rows.n_past])
        before, after = np.diff(places)[:-1], np.diff(places)[1:]
        age = places[-1] - places[1:-1]
        del self._all[int((before * after / np.maximum(age, 1)).argmin())]

    def best(self, n: int) -> tuple[int, Checkpoint | None]:
        """Return how many of the stream's first n tokens can be kept, and the checkpoint for it.

        That is the next checkpoint, if its state can be cut to n tokens, otherwise the one before.
        """
        before = next((each for each in reversed(self._all) if each.n_past <= n), None)
        n_before = before.n_past if before else 0
        after = next((each for each in self._all if each.n_past > n), None)
        # if gaps between positions were closed in between, tokens before that had other positions
        if n > n_before and after and after.part.n_restart == (before.part.n_restart if before else 0):
            fixed_state = self._cache.context.fixed_state
            assert fixed_state
            if fixed_state.can_cut(fixed_state.arrays_in(after.data)[0], n - after.part.base):
                return n, after
        return n_before, before

    def cut(self, n: int) -> None:
        """Drop the checkpoints after the stream's first n tokens."""
        self._all = [each for each in self._all if each.n_past <= n]

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Replace the checkpoints by those of a session, as far as they fit this model and the limit.

        The rest of the session is already restored.
        """
        self.cut(0)
        if not self.n_max:
            return
        assert self._cache.context.fixed_state
        n_bytes, n_past = self._cache.context.fixed_state.n_bytes, self._cache.rows.n_past
        for i, part in enumerate(listed_checkpoints(saved)):
            if part.n_bytes == n_bytes and 0 < part.n_past <= n_past:
                # a copy, because a view would keep the session's file open
                self._all.append(Checkpoint(part, np.array(saved[checkpoint_name(i)])))
        del self._all[: max(len(self._all) - self.n_max, 0)]
