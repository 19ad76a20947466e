"""Going back: a stream is cut to its first tokens, and the archive fills its window again."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import numpy as np

from kvtool.engine.eviction import Eviction, fill_holes, moves_of
from kvtool.policy import Policy, Signal


def can_go_back(eviction: Eviction) -> bool:
    """Whether `go_back` knows what the stream was: all that is evicted is archived, and nothing else counts.

    That is so where nothing is ever evicted. Sliding and recurrent layers forget, and a policy's state and
    signals are of tokens that have come since.
    """
    keeps_all = eviction.context.archive or not eviction.policy.slack
    return bool(
        keeps_all
        and not eviction.context.fixed_state
        and not eviction.state
        and eviction.policy.reads == Signal.NONE
    )


class _Past(NamedTuple):
    """What a stream was after n tokens.

    Attributes
    ----------
    n_first
        First tokens, which never leave.
    begin
        The token after these that was the oldest in the cache.
    n_kv
        Live cells of each row.
    base
        Keys were rotated to their position less this.
    n_later
        How often positions have started over since.
    """

    n_first: int
    begin: int
    n_kv: int
    base: int
    n_later: int


def go_back(eviction: Eviction, n: int) -> bool:
    """Cuts the stream to its first n tokens. Returns False, with all as it was, where that cannot be.

    The stream is then as after n tokens, but for what the archive's type has rounded, and for the oldest
    tokens where the archive has forgotten them. There are no logits before the next step.
    """
    past = _past(eviction, n) if can_go_back(eviction) else None
    if not past:
        return False
    context, rows = eviction.context, eviction.rows
    archive = context.archive
    end = max(min(archive.end, n), past.begin) if archive and archive.n else n
    pos = rows.pos[:, : rows.n_kv]
    keep = (pos < min(past.n_first, n)) | ((pos >= end) & (pos < n))
    n_keep = keep.sum(axis=1, dtype=np.int32)
    n_own = int(n_keep[0])
    n_back = past.n_kv - n_own
    source = np.empty((len(n_keep), n_own), np.int32)
    fill_holes(keep, n_keep, source)
    kept_pos = np.take_along_axis(pos, source, axis=1)
    kept_rot = kept_pos - np.where(kept_pos < past.n_first, 0, past.base).astype(np.int32)
    turn = kept_rot - np.take_along_axis(rows.rot, source, axis=1)
    live = np.full(len(n_keep), past.n_kv, np.int32)
    n_planned = n if past.n_kv == n else n - (past.n_kv - eviction.policy.n_keep)
    rows.n_past = n
    eviction.edit(live, n - past.base, moves_of(source, turn))
    if archive and archive.n:
        archive.go_back(n_own, n_back, end, past.base, max(n_planned, end - n_back))
    new = np.broadcast_to(np.arange(end - n_back, end, dtype=np.int32), (len(n_keep), n_back))
    rows.n_kv, rows.next_rot = past.n_kv, n - past.base
    rows.put(live, np.hstack([kept_pos, new]), np.hstack([kept_rot, new - past.base]))
    eviction.n_planned = 0 if past.n_kv == n else n_planned
    eviction.n_evicted = (n - past.n_kv) * len(n_keep)
    eviction.n_restart -= past.n_later
    context.forget_logits()
    return True


def _past(eviction: Eviction, n: int) -> _Past | None:
    """What the stream was after n tokens; None where the archive has forgotten some of its window."""
    rows, archive = eviction.rows, eviction.context.archive
    n_kv, base = n_live(eviction.policy, n), rows.n_past - rows.next_rot
    if not (archive and archive.n):
        return _Past(rows.n_kv, n, n, base, 0) if rows.n_kv == rows.n_past else None
    span, frames = archive.span, archive.frames
    n_first = int((rows.pos[0, : rows.n_kv] < span.stop).sum())
    if n <= n_first:
        return _Past(n_first, span.start, n, 0, eviction.n_restart)
    # what the policy has kept may be less than it might
    begin = min(n - n_kv + n_first, span.stop)
    if begin < span.start:
        return None
    # positions start over late: a frame that begins here may have begun after these tokens
    started = len([first for first, _ in takewhile(lambda frame: frame[0] < begin, frames)])
    at = max(started - 1, 0)
    while at + 1 < len(frames) and frames[at + 1][0] <= begin and n - frames[at][1] > eviction.n_ctx:
        at += 1
    return _Past(n_first, begin, n_first + n - begin, frames[at][1], len(frames) - 1 - at)


def n_live(policy: Policy, n: int) -> int:
    """Live cells of each row after n tokens, under a policy that keeps what it may at each eviction."""
    if n <= policy.n_live or not policy.slack:
        return n
    return policy.n_keep + 1 + (n - policy.n_live - 1) % policy.slack
