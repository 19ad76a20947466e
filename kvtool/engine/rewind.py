"""Rewinding: a stream is cut to its first tokens, and its window is filled from the archive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtool.engine.checkpoints import Checkpoint
from kvtool.engine.moves import fill_holes, moves_of
from kvtool.engine.policy_cache import PolicyCache
from kvtool.policy import Policy


class _Earlier(NamedTuple):
    """State of the stream after n tokens.

    Attributes
    ----------
    n_first
        Number of tokens at the start of the stream that are never evicted.
    first_rot
        For p < `n_first`, the key of the token at position p was rotated to p + `first_rot`.
    begin
        Position of the oldest token in the cache after the first n_first tokens.
    n_kv
        Number of live cells of each row.
    base
        For p >= `begin`, the key of the token at position p was rotated to p - `base`.
    n_later
        Number of times that gaps between positions have been closed since the stream had n tokens.
    """

    n_first: int
    first_rot: int
    begin: int
    n_kv: int
    base: int
    n_later: int


def rewind(cache: PolicyCache, n: int, checkpoint: Checkpoint | None = None) -> bool:
    """Cut the stream to its first n tokens. Return False and change nothing if that is impossible.

    The cache gets the tokens that it had after n tokens, except tokens that the archive has dropped. Tokens
    from the archive are rounded to its number format. There are no logits until the next step.

    cache: its `keeps_all` is true. checkpoint: the result of `Checkpoints.best`. It is needed if the model
    has sliding or recurrent layers.
    """
    earlier = _earlier(cache, n, checkpoint)
    if not earlier:
        return False
    context, rows = cache.context, cache.rows
    archive = context.archive
    end = max(min(archive.end, n), earlier.begin) if archive and archive.n else n
    pos = rows.pos[:, : rows.n_kv]
    keep = (pos < min(earlier.n_first, n)) | ((pos >= end) & (pos < n))
    n_keep = keep.sum(axis=1, dtype=np.int32)
    n_own = int(n_keep[0])
    n_back = earlier.n_kv - n_own
    source = np.empty((len(n_keep), n_own), np.int32)
    fill_holes(keep, n_keep, source)
    kept_pos = np.take_along_axis(pos, source, axis=1)
    shift = np.where(kept_pos < earlier.n_first, earlier.first_rot, -earlier.base).astype(np.int32)
    kept_rot = kept_pos + shift
    delta = kept_rot - np.take_along_axis(rows.rot, source, axis=1)
    live = np.full(len(n_keep), earlier.n_kv, np.int32)
    n_planned = n if earlier.n_kv == n else n - (earlier.n_kv - cache.policy.n_keep)
    rows.n_past = n
    cache.edit(live, n - earlier.base, moves_of(source, delta))
    if archive and archive.n:
        archive.rewind(n_own, n_back, end, earlier.base, max(n_planned, end - n_back))
    new = np.broadcast_to(np.arange(end - n_back, end, dtype=np.int32), (len(n_keep), n_back))
    rows.n_kv, rows.next_rot = earlier.n_kv, n - earlier.base
    rows.put(live, np.hstack([kept_pos, new]), np.hstack([kept_rot, new - earlier.base]))
    cache.n_planned = 0 if earlier.n_kv == n else n_planned
    cache.n_evicted = (n - earlier.n_kv) * len(n_keep)
    cache.n_restart -= earlier.n_later
    if checkpoint:
        assert context.fixed_state
        table, data = context.fixed_state.arrays_in(checkpoint.data)
        is_cut = checkpoint.n_past > n
        context.fixed_state.restore(table, data, pos=n - earlier.base if is_cut else None)
    context.forget_logits()
    return True


def _earlier(cache: PolicyCache, n: int, checkpoint: Checkpoint | None) -> _Earlier | None:
    """Return the stream's state after n tokens; None if tokens that the cache had at that time are lost."""
    rows, archive = cache.rows, cache.context.archive
    if not (archive and archive.n):
        return _Earlier(n, 0, n, n, 0, 0) if rows.n_kv == rows.n_past else None
    span, frames = archive.span, archive.frames
    n_first = int((rows.pos[0, : rows.n_kv] < span.stop).sum())
    if n <= n_first:
        return _Earlier(n_first, 0, span.start, n, 0, cache.n_restart)
    n_kv = n_live(cache.policy, n)
    if checkpoint and checkpoint.n_past == n:
        # Use the number of live cells at the checkpoint, but at most the policy's maximum. The number may
        # exceed this maximum if the checkpoint was made during the whole reading of a prompt
        n_kv = min(checkpoint.part.n_kv, cache.policy.n_live)
    # Tokens after the archive's end have never been evicted, so `begin` is at most the archive's end. The
    # limit is needed, because `n_live` may count more evictions than there were
    begin = min(n - n_kv + n_first, span.stop)
    # A frame is a run of tokens whose keys have the same base. A frame starts whenever gaps between positions
    # are closed. Its first token is the oldest token, after the first n_first, that was live at that time
    if checkpoint:
        # Use the checkpoint's base, because the positions in its sliding layers have that base. If no frame
        # has it, no token was evicted between the start of the frame and the checkpoint
        part = checkpoint.part
        base, n_later = part.base, cache.n_restart - part.n_restart
        first = next((first for first, other in frames if other == base), part.n_past - part.n_kv + n_first)
    else:
        # Find the newest frame that had started when the stream had n tokens. A frame had started if its
        # first token is before `begin`, or if n tokens did not fit in the context with the previous base
        at = max(sum(first < begin for first, _ in frames) - 1, 0)
        while at + 1 < len(frames) and n - frames[at][1] > cache.n_ctx:
            at += 1
        (first, base), n_later = frames[at], len(frames) - 1 - at
    # Tokens before the frame had been evicted when it started. `n_live` may count fewer evictions than there
    # were, because it does not know where prompts ended that were read whole or exactly
    begin = max(begin, first)
    if begin < span.start:
        return None
    # closing gaps rotates the first n_first tokens to the positions just before the frame
    first_rot = first - base - n_first if base else 0
    return _Earlier(n_first, first_rot, begin, n_first + n - begin, base, n_later)


def n_live(policy: Policy, n: int) -> int:
    """Return the number of live cells of a row after n tokens, if evictions keep `policy.n_keep` cells."""
    if n <= policy.n_live or not policy.evicts:
        return n
    return policy.n_keep + 1 + (n - policy.n_live - 1) % policy.slack
