"""Rewinding: a stream is cut to its first tokens, and its window is filled from the archive."""

from __future__ import annotations

from itertools import takewhile
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
    kept_rot = kept_pos - np.where(kept_pos < earlier.n_first, 0, earlier.base).astype(np.int32)
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
    base = rows.n_past - rows.next_rot
    n_kv = n_live(cache.policy, n)
    if checkpoint and checkpoint.n_past == n:
        # Use the number of live cells at the checkpoint, but at most the policy's maximum. The number may
        # exceed this maximum if the checkpoint was made during the whole reading of a prompt
        n_kv = min(checkpoint.part.n_kv, cache.policy.n_live)
    if not (archive and archive.n):
        return _Earlier(rows.n_kv, n, n, base, 0) if rows.n_kv == rows.n_past else None
    span, frames = archive.span, archive.frames
    n_first = int((rows.pos[0, : rows.n_kv] < span.stop).sum())
    if n <= n_first:
        return _Earlier(n_first, span.start, n, 0, cache.n_restart)
    # Tokens after the archive's end have never been evicted, so `begin` is at most the archive's end. The
    # limit is needed, because `n_live` may count more evictions than there were
    begin = min(n - n_kv + n_first, span.stop)
    if begin < span.start:
        return None
    if checkpoint:
        # use the checkpoint's base, because the positions in its sliding layers have that base
        part = checkpoint.part
        return _Earlier(n_first, begin, n_first + n - begin, part.base, cache.n_restart - part.n_restart)
    # A frame is a run of tokens whose keys have the same base. A frame starts whenever gaps between positions
    # are closed. Its first token is the oldest token that was live at that time. Find the newest frame that
    # had started when the stream had n tokens. A frame had started if its first token is before `begin`. If
    # its first token is at `begin`, the frame had started only if n tokens did not fit in the context with
    # the previous frame's base
    started = len([first for first, _ in takewhile(lambda frame: frame[0] < begin, frames)])
    at = max(started - 1, 0)
    while at + 1 < len(frames) and frames[at + 1][0] <= begin and n - frames[at][1] > cache.n_ctx:
        at += 1
    return _Earlier(n_first, begin, n_first + n - begin, frames[at][1], len(frames) - 1 - at)


def n_live(policy: Policy, n: int) -> int:
    """Return the number of live cells of a row after n tokens, if evictions keep `policy.n_keep` cells."""
    if n <= policy.n_live or not policy.evicts:
        return n
    return policy.n_keep + 1 + (n - policy.n_live - 1) % policy.slack
