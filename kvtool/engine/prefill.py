"""A prompt that is read whole: decoded into a cache that holds all of it, then compressed once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from kvtool.engine.stream import Stream, pad
from kvtool.errors import KvtoolError, StreamEnd


def read_whole(stream: Stream, tokens: np.ndarray, stopped: Callable[[], bool]) -> int:
    """Decodes a prompt into a cache that holds all of it, and lets the policy compress it once.

    A prompt beyond the context is decoded in segments that do not see each other (BumbleBee 6.4). `stopped`
    is asked before each batch whether to end. Returns how many tokens were read: all or none. After none, or
    an error, the cache is empty and what was pinned and held is so again. Raises StreamEnd if original
    positions do not reach so far, and what `Engine.step` raises.
    """
    n = len(tokens)
    segments = np.array_split(tokens, -(-n // stream.n_ctx))
    if len(segments) > 1 and stream.settings.positions == "original":
        raise StreamEnd(
            f"the prompt of {n} tokens is longer than the context of {stream.n_ctx}; "
            "continue with --positions auto or in-cache, or with --prefill stream"
        )
    try:
        signals = _decode(stream, segments, stopped)
        if signals is None:
            _empty(stream)
            return 0
        _compress(stream, signals, close=len(segments) > 1)
    except BaseException:
        with suppress(KvtoolError):
            _empty(stream)
        raise
    return n


def _empty(stream: Stream) -> None:
    eviction = stream.eviction
    n_pinned, n_held = eviction.n_pinned, eviction.n_held
    stream.reset()
    eviction.n_pinned, eviction.n_held = n_pinned, n_held


def _decode(
    stream: Stream, segments: list[np.ndarray], stopped: Callable[[], bool]
) -> dict[str, np.ndarray] | None:
    """Decodes the segments into a cache made for them. Returns the signals of all; None if stopped."""
    rows, eviction = stream.rows, stream.eviction
    n = sum(map(len, segments))
    # it is the small cache's
    eviction.state = ()
    stream.resize(np.full_like(stream.layer_cells, pad(n)))
    signals: dict[str, np.ndarray] = {}
    for segment in segments:
        rows.rotate_from(0)
        for step in np.array_split(segment, -(-len(segment) // stream.settings.n_batch)):
            at = 0
            while at < len(step):
                if stopped():
                    return None
                part = step[stream.part(at, len(step))]
                at += len(part)
                stream.decode(part, n_output=int(rows.n_past + len(part) == n))
        for name, values in stream.signals.read().items():
            whole = signals.setdefault(name, np.zeros((len(rows.live), n), values.dtype))
            # no segment sees another: where one has something, the others have 0
            whole[:, : rows.n_kv] += values
        if rows.n_past < n:
            eviction.hide()
    return signals


def _compress(stream: Stream, signals: dict[str, np.ndarray], *, close: bool) -> None:
    """Evicts once, by the signals f32[row, n] of the whole prompt; the large cache is given back."""
    rows, eviction = stream.rows, stream.eviction
    view = eviction.view(signals, rows.n_past)
    plan = eviction.ask("compress", view)
    n_keep = eviction.check(view, plan)
    next_rot = rows.next_rot
    if close:
        eviction.n_restart += 1
        next_rot = stream.low_rot(int(n_keep[0]), 0)
    source = eviction.apply(plan, n_keep, next_rot, close=close)
    stream.resize(stream.layer_cells)
    eviction.start()
    kept: dict[str, Any] = {
        field: np.take_along_axis(values, source if values.ndim == 2 else source[..., None], axis=1)
        for field in ("pos", *signals, "keys")
        if (values := getattr(view, field)) is not None
    }
    eviction.ask("adopt", replace(view, **kept), eviction.state)
