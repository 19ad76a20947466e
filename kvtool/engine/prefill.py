"""A prompt that is read whole: decoded into a cache that holds all of it, then compressed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.errors import StreamEnd
from kvtool.models.header import PAD

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine


def pad(n: int) -> int:
    """The cells that llama.cpp makes for n tokens: a multiple of 256."""
    return -(-n // PAD) * PAD


def read_whole(engine: Engine, tokens: np.ndarray, stopped: Callable[[], bool]) -> int:
    """Decodes a prompt into a cache that holds all of it, and lets the policy compress it once.

    A prompt beyond the context is decoded in segments that do not see each other (BumbleBee 6.4). `stopped`
    is asked before each batch whether to end; the cache is then empty. Returns how many tokens were read: all
    or none. Raises StreamEnd if original positions do not reach so far.
    """
    n, settings, rows, eviction = len(tokens), engine.settings, engine.rows, engine.eviction
    segments = np.array_split(tokens, -(-n // engine.n_ctx))
    if len(segments) > 1 and settings.positions == "original":
        raise StreamEnd(
            f"the prompt of {n} tokens is longer than the context of {engine.n_ctx}; "
            "go on with --positions auto or in-cache, or --prefill stream"
        )
    eviction.state = ()
    engine.resize(np.full_like(engine.layer_cells, pad(n)))
    signals = {name: np.zeros((len(rows.live), n), np.float32) for name in eviction.signals}
    for segment in segments:
        rows.next_rot = 0
        for part in np.array_split(segment, -(-len(segment) // settings.n_batch)):
            if stopped():
                n_pinned, n_held = eviction.n_pinned, eviction.n_held
                engine.reset()
                eviction.n_pinned, eviction.n_held = n_pinned, n_held
                return 0
            engine.decode(part, n_output=int(rows.n_past + len(part) == n))
        for name, values in eviction.read_signals().items():
            signals[name][:, : rows.n_kv] += values
        if rows.n_past < n:
            engine.context.hide(rows.n_past)
    _compress(engine, signals, close=len(segments) > 1)
    return n


def _compress(engine: Engine, signals: dict[str, np.ndarray], *, close: bool) -> None:
    """Evicts once, by the signals f32[row, n] of the whole prompt; the large cache is given back."""
    rows, eviction = engine.rows, engine.eviction
    keys = eviction.read_keys()
    view = eviction.view(signals | keys)
    plan = eviction.ask("compress", view)
    n_keep = eviction.check(view, plan)
    next_rot = rows.next_rot
    if close:
        eviction.n_restart += 1
        next_rot = engine.low_rot(int(n_keep[0]), 0)
    source = eviction.apply(plan, n_keep, next_rot, close=close)
    engine.resize(engine.layer_cells)
    eviction.start()
    kept: dict[str, Any] = {
        field: np.take_along_axis(values, source if values.ndim == 2 else source[..., None], axis=1)
        for field in ("pos", *signals, *keys)
        for values in [getattr(view, field)]
    }
    eviction.ask("adopt", replace(view, **kept), eviction.state)
