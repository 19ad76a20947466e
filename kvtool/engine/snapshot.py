"""What the next step depends on, as arrays by name: taken from an engine, and given back to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvtool.errors import SessionError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine

_COUNTERS = (
    ("rows", "n_past"),
    ("rows", "n_kv"),
    ("eviction", "n_pinned"),
    ("eviction", "n_held"),
    ("eviction", "n_restart"),
    ("rows", "next_rot"),
    ("eviction", "n_planned"),
    ("eviction", "n_cleared"),
    ("eviction", "n_evicted"),
)
"""The engine's numbers, in the order in which the array "engine" has them."""

_SWA = ("window", "window_cells")
"""What sliding layers hold. Session files have these names."""


def save(engine: Engine) -> Iterator[tuple[str, np.ndarray]]:
    """What the next step depends on besides model, policy and settings: arrays by name, one at a time.

    engine
        The counters.
    live, layer_cells
        As `Rows` and `Cache` have them.
    pos, rot, state.N, and the signals
        Of the first n_kv cells. The signals are those since the last edit, as `Cache.history` has them.
    is_observed
        If the policy has observed these signals already.
    cells.N
        K and V of the Nth layer's live cells, as they are stored.
    window, window_cells
        What sliding layers hold, if there are some.
    """
    context, rows, eviction = engine.context, engine.rows, engine.eviction
    n = rows.n_kv
    yield "engine", np.array([getattr(getattr(engine, part), name) for part, name in _COUNTERS], np.int64)
    yield "live", rows.live
    yield "layer_cells", context.layer_cells
    yield "pos", rows.pos[:, :n]
    yield "rot", rows.rot[:, :n]
    for i, array in enumerate(eviction.state):
        yield f"state.{i}", array[:, :n]
    for name, signal in eviction.signals.items():
        yield name, context.history(signal, n)
    if eviction.is_observed:
        yield "is_observed", np.ones(1, np.bool_)
    for layer, n_live in enumerate(rows.most_live().tolist()):
        yield f"cells.{layer}", context.cells(layer, n_live)
    if context.n_swa:
        yield from zip(_SWA, context.swa(), strict=True)


def restore(engine: Engine, saved: Mapping[str, np.ndarray]) -> None:
    """Continues from what `save` gave. Raises SessionError, with all as it was, if it does not fit."""
    misfit = SessionError("what was saved does not fit this model, policy or cache")
    context, rows, eviction = engine.context, engine.rows, engine.eviction
    try:
        counters = dict(zip(_COUNTERS, saved["engine"].tolist(), strict=True))
        n = counters["rows", "n_kv"]
        live, pos, rot = saved["live"], saved["pos"], saved["rot"]
        state = [saved[f"state.{i}"] for i in range(len(eviction.state))]
        signals = {signal: saved[name] for name, signal in eviction.signals.items()}
        layer_cells = saved["layer_cells"]
        cells = [saved[f"cells.{layer}"] for layer in range(len(layer_cells))]
        swa = [saved[name] for name in _SWA] if context.n_swa else []
    except (KeyError, ValueError):
        raise misfit from None
    shape = (len(rows.live), n)
    fits = (
        live.shape == rows.live.shape
        and pos.shape == rot.shape == shape
        and 0 <= n <= engine.policy.budget
        and live.min(initial=n) >= 0
        and live.max(initial=0) == n
        and layer_cells.shape == engine.layer_cells.shape
        and all(
            context.fits(layer, n_live, array)
            for layer, (array, n_live) in enumerate(zip(cells, rows.most(live).tolist(), strict=True))
        )
        and all(array.shape == context.history_shape(signal, n) for signal, array in signals.items())
        and (not swa or [array.shape for array in swa] == context.swa_shapes)
        and all(
            (array.dtype, array.shape) == (own.dtype, shape + own.shape[2:])
            for array, own in zip(state, eviction.state, strict=True)
        )
    )
    if not fits:
        raise misfit
    engine.reset()
    if rows.ragged:
        engine.resize(layer_cells)
    for (part, name), value in counters.items():
        setattr(getattr(engine, part), name, value)
    rows.put(live, pos, rot)
    for own, array in zip(eviction.state, state, strict=True):
        own[:, :n] = array
    for layer, n_live in enumerate(rows.most_live().tolist()):
        context.set_cells(layer, n_live, cells[layer])
    eviction.edit(np.empty((0, 4), np.int32), rows.live, rows.next_rot)
    eviction.n_cleared = counters["eviction", "n_cleared"]
    eviction.is_observed = "is_observed" in saved
    if swa:
        context.set_swa(*swa)
    for signal, values in signals.items():
        context.write(signal, values, eviction.n_new)
