"""Checkpoints: copies of a stream's state. A rewind restores a copy if it cannot compute the earlier state.

If the rows can be rewound without a copy (`PolicyCache.keeps_all`), a checkpoint has only the state of
sliding and recurrent layers. Otherwise a checkpoint is a copy of the whole cache. The size of the cache is
limited, because the policy evicts tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvtool.engine import snapshot
from kvtool.engine.policy_cache import PolicyCache
from kvtool.errors import SessionError, UsageError
from kvtool.llama.cache.segment import SavedCheckpoint, checkpoint_name, listed
from kvtool.system.arrays import arrays_in, parts_of
from kvtool.system.memory import free_bytes

SPACING = 1024
"""Minimum of `Checkpoints.spacing`, in tokens."""

_GPU_TOKEN_BYTES = 24 * 2**10
"""Maximum bytes of checkpoints to copy for each token that is read, if the cache is on a GPU.

With this limit, copying takes an estimated 2 % of the time of reading, if a GPU reads 5,000 tokens a second
and copies 6 GB a second.
"""

_MIN_SAVED, _MAX_SAVED_BYTES = 3, 2**28
"""Limits for the copies of whole caches that are saved in FILE.archive.

Up to `_MIN_SAVED` copies are saved in any case. More copies are saved only if all saved copies together
take at most `_MAX_SAVED_BYTES`.
"""

_NAMES = 2**14
"""Maximum size of the arrays' names in a copy of a whole cache, in bytes."""

_N_ROOM, _MAX_MEMORY_SHARE = 8, 1 / 4
"""Default limit: room for eight checkpoints, but at most a quarter of the free memory."""

_MIN_MEMORY_SHARE = 1 / 16
"""The default limit for checkpoints of sliding and recurrent layers is at least a 16th of the free memory.

The limit for copies of whole caches has no such minimum, because each copy is as large as the cache.
"""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Copy of the state at an earlier point of the stream.

    Attributes
    ----------
    part
        The point in the stream, and the copy's size and digest. See `SavedCheckpoint`.
    data
        u1[n_bytes]: the two arrays of `FixedState.save`, one after the other. A copy of the whole cache
        instead has the arrays of `snapshot.save`, in the format of `parts_of`.
    """

    part: SavedCheckpoint
    data: np.ndarray

    @property
    def n_past(self) -> int:
        """Number of tokens in the stream at the checkpoint."""
        return self.part.n_past


class Checkpoints:
    """Checkpoints of a stream, oldest first. The distance between them grows with their age.

    Raises UsageError if max_bytes is too small for one checkpoint.

    Attributes
    ----------
    max_bytes
        Maximum bytes of all checkpoints. Default: see `_N_ROOM` and `_MIN_MEMORY_SHARE`. If it is 0, no
        checkpoints are made. It is 0 in four cases: the argument is 0; memory is short; any token can be
        reached without a checkpoint; an archive exists, but the policy has state or reads signals.
    are_whole
        True if a checkpoint is a copy of the whole cache.
    is_paused
        True if no checkpoint may be made now.
    spacing
        Number of tokens after which another checkpoint is due.
    """

    def __init__(self, cache: PolicyCache, max_bytes: int | None) -> None:
        self._cache = cache
        self._all: list[Checkpoint] = []
        self.spacing = SPACING
        self.are_whole = not cache.keeps_all and not cache.context.archive
        self.is_paused = False
        self.max_bytes = 0
        if max_bytes == 0 or not (self.are_whole or (cache.context.fixed_state and cache.keeps_all)):
            return
        n_bytes = self._one_max_bytes
        if cache.context.model.is_on_gpu:
            self.spacing = max(SPACING, n_bytes // _GPU_TOKEN_BYTES)
        if max_bytes is None:
            n_free = free_bytes()
            most = min(int(n_free * _MAX_MEMORY_SHARE), _N_ROOM * n_bytes)
            if not self.are_whole:
                most = max(int(n_free * _MIN_MEMORY_SHARE), most)
            self.max_bytes = most if most >= n_bytes else 0
        elif max_bytes < n_bytes:
            raise UsageError(
                # round up, so that the printed size is large enough
                f"--checkpoints must be at least {-(-n_bytes // 1024)}KiB for one checkpoint of this "
                "model and budget, or 0 for none"
            )
        else:
            self.max_bytes = max_bytes

    @property
    def _one_max_bytes(self) -> int:
        """Maximum bytes of a checkpoint."""
        cache, context = self._cache, self._cache.context
        n_fixed = context.fixed_state.n_bytes if context.fixed_state else 0
        if not self.are_whole:
            return n_fixed
        n_live, n_cell, pos = cache.policy.n_live, context.n_cell, cache.rows.pos
        n_cells = n_live * sum(cache.cell_bytes)
        tables = 2 * pos.nbytes + sum(array.nbytes for array in cache.state)
        signals = context.signal_bytes(np.full_like(cache.layer_cells, n_live))
        return n_cells + n_live * tables // n_cell + signals + n_fixed + _NAMES

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def are_small(self) -> bool:
        """True if checkpoints are made and are small, so that several can be made while a prompt is read."""
        return self.max_bytes > 0 and not self.are_whole

    @property
    def n_bytes(self) -> int:
        """Size of all checkpoints in bytes."""
        return sum(each.part.n_bytes for each in self._all)

    def share(self, n: int) -> None:
        """Divide the limit by n, so that the n caches of a server share the memory.

        The limit is not reduced below the size of eight checkpoints.
        """
        self.max_bytes = min(self.max_bytes, max(self.max_bytes // n, _N_ROOM * self._one_max_bytes))

    @property
    def is_due(self) -> bool:
        """True if a checkpoint should be made now, because the stream has grown by `spacing` tokens."""
        rows = self._cache.rows
        if not self.max_bytes or self.is_paused:
            return False
        if self.are_whole and rows.n_kv > self._cache.policy.n_live:
            # within a step that exceeds the budget, a copy would be too large
            return False
        newest = self._all[-1].n_past if self._all else 0
        return rows.n_past - newest >= self.spacing

    def take(self) -> None:
        """Make a checkpoint of the current state, unless the newest checkpoint is at the same token."""
        cache, rows = self._cache, self._cache.rows
        if not self.max_bytes or not rows.n_past or (self._all and self._all[-1].n_past == rows.n_past):
            return
        n_most = self._one_max_bytes
        while self._all and self.n_bytes + n_most > self.max_bytes:
            # make room before the copy is made, so that all checkpoints together never exceed the limit
            del self._all[_least_useful(self._all, rows.n_past)]
        data = self._copy()
        base = rows.n_past - rows.next_rot
        part = SavedCheckpoint(rows.n_past, rows.n_kv, base, cache.n_restart, data.nbytes)
        self._all.append(Checkpoint(part, data))

    def _copy(self) -> np.ndarray:
        cache = self._cache
        if not self.are_whole:
            assert cache.context.fixed_state
            return cache.context.fixed_state.copy()
        data = bytearray()
        for name, array in snapshot.save(cache):
            for part in parts_of(name, array, len(data)):
                data += part
        return np.frombuffer(data, np.uint8)

    def put_back(self, checkpoint: Checkpoint, n_cell: int) -> None:
        """Restore the cache from a copy of the whole cache, but do not change `n_pinned` and `n_held`."""
        cache = self._cache
        n_pinned, n_held = cache.n_pinned, cache.n_held
        try:
            snapshot.restore(cache, arrays_in(checkpoint.data), n_cell)
        finally:
            cache.n_pinned, cache.n_held = n_pinned, n_held
        cache.context.forget_logits()

    def to_save(self) -> list[Checkpoint]:
        """Return the checkpoints to save in FILE.archive, oldest first.

        If checkpoints are copies of the whole cache, only a few are saved. A copy of the current state is
        left out, because the session itself has that state.
        """
        n_past = self._cache.rows.n_past
        kept = [each for each in self._all if each.n_past < n_past or not self.are_whole]
        n_bytes = sum(each.data.nbytes for each in kept)
        while self.are_whole and len(kept) > _MIN_SAVED and n_bytes > _MAX_SAVED_BYTES:
            n_bytes -= kept.pop(_least_useful(kept, n_past)).data.nbytes
        return kept

    def best(self, n: int) -> tuple[int, Checkpoint | None]:
        """Return how many of the stream's first n tokens a rewind can keep, and the checkpoint to restore.

        A checkpoint at exactly n tokens is used if there is one. Otherwise the first checkpoint after n
        tokens is used, if its state can be cut to n tokens. Otherwise the last checkpoint before n tokens is
        used, if there is one.
        """
        before = next((each for each in reversed(self._all) if each.n_past <= n), None)
        n_before = before.n_past if before else 0
        after = next((each for each in self._all if each.n_past > n), None)
        if self.are_whole or n == n_before or not after:
            return n_before, before
        # The state contains positions, which change when gaps are closed. Use `after` only if no gaps were
        # closed between `before` and `after`
        if after.part.n_restart == (before.part.n_restart if before else 0):
            fixed_state = self._cache.context.fixed_state
            assert fixed_state
            if fixed_state.can_cut(fixed_state.arrays_in(after.data)[0], n - after.part.base):
                return n, after
        return n_before, before

    def cut(self, n: int) -> None:
        """Drop the checkpoints after the stream's first n tokens."""
        self._all = [each for each in self._all if each.n_past <= n]

    def restore(self, saved: Mapping[str, np.ndarray], n_cell: int) -> None:
        """Replace the checkpoints by a session's checkpoints that fit this model and the limit.

        The caller has already restored the rest of the session.
        """
        self.cut(0)
        if not self.max_bytes:
            return
        for i, part in enumerate(listed(saved, SavedCheckpoint)):
            if 0 < part.n_past <= self._cache.rows.n_past:
                # a copy, because a view would keep the session's file open
                data = np.array(saved[checkpoint_name(i)])
                if self._fits(part, data, n_cell):
                    self._all.append(Checkpoint(part, data))
        while self.n_bytes > self.max_bytes:
            del self._all[_least_useful(self._all, self._cache.rows.n_past)]

    def _fits(self, part: SavedCheckpoint, data: np.ndarray, n_cell: int) -> bool:
        """True if the stream can be rewound to a session's checkpoint."""
        if not self.are_whole:
            return part.n_bytes == len(data) == self._one_max_bytes
        try:
            arrays = arrays_in(data)
            snapshot.check(self._cache, arrays, n_cell)
        except (SessionError, ValueError):
            return False
        return bool(arrays["engine"][0] == part.n_past)


def _least_useful(checkpoints: list[Checkpoint], n_past: int) -> int:
    """Return the index of the checkpoint to drop first, in a stream of n_past tokens.

    This is the checkpoint that saves the least reading. Without it, a rewind to a token between it and the
    next checkpoint starts at the previous checkpoint, and reads more tokens. Most rewinds go back by only a
    few tokens, so older checkpoints have a lower weight.
    """
    places = np.array([0, *(each.n_past for each in checkpoints), n_past])
    before, after = np.diff(places)[:-1], np.diff(places)[1:]
    age = places[-1] - places[1:-1]
    return int((before * after / np.maximum(age, 1)).argmin())
