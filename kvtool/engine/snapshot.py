"""What the next step depends on, as arrays by name: taken from an engine, and given back to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtool.errors import LibraryError, SessionError, StreamEnd
from kvtool.policy import Signal

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

_BESIDE = ("window", "window_cells")
"""What a model keeps beside its rows. Session files have these names, which sliding layers gave."""


def save(engine: Engine, *, archived: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """What the next step depends on besides model, policy and settings: arrays by name, one at a time.

    engine
        The counters.
    live, layer_cells
        As `Rows` and `Cache` have them.
    pos, rot, state.N, and the signals
        Of the first n_kv cells. The signals are those since the last edit, as `Cache.history` has them, but
        IMPORTANT counts from that edit on: 1 is the first query after it.
    is_observed
        If the policy has observed these signals already.
    cells.N
        K and V of the Nth layer's live cells, as they are stored.
    archive, archive.N
        Of a policy that recalls: as `Archive.save` gives them. Without `archived`, tokens are left out.
    window, window_cells
        What the model keeps beside its rows, in sliding and recurrent layers, if there are some.
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
        yield name, _counted_back(signal, context.history(signal, n), eviction.n_new)
    if eviction.is_observed:
        yield "is_observed", np.ones(1, np.bool_)
    for layer, n_live in enumerate(rows.most_live().tolist()):
        yield f"cells.{layer}", context.cells(layer, n_live)
    if context.archive:
        yield from context.archive.save(tokens=archived)
    if context.n_beside:
        yield from zip(_BESIDE, context.beside(), strict=True)


class _Parts(NamedTuple):
    """What `save` gave, taken apart. counters: by the part of the engine that has them, and their name."""

    counters: dict[tuple[str, str], int]
    live: np.ndarray
    layer_cells: np.ndarray
    pos: np.ndarray
    rot: np.ndarray
    state: list[np.ndarray]
    signals: dict[Signal, np.ndarray]
    cells: list[np.ndarray]
    beside: list[np.ndarray]
    archive: Mapping[str, np.ndarray]
    is_observed: bool


def restore(engine: Engine, saved: Mapping[str, np.ndarray]) -> None:
    """Continues from what `save` gave.

    Raises SessionError if it does not fit this model, policy or cache. The engine is then as it was, or empty
    if llama.cpp itself refused. Raises StreamEnd where there is no room for the archive, and it is empty.
    """
    misfit = SessionError("what was saved does not fit this model, policy or cache")
    try:
        parts = _parts(engine, saved)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise misfit from None
    _check_beside(engine, parts)
    if not _fits(engine, parts):
        raise misfit
    try:
        _put(engine, parts)
    except LibraryError:
        engine.reset()
        raise misfit from None
    except StreamEnd:
        engine.reset()
        raise


def _parts(engine: Engine, saved: Mapping[str, np.ndarray]) -> _Parts:
    eviction, layer_cells = engine.eviction, saved["layer_cells"]
    return _Parts(
        counters=dict(zip(_COUNTERS, saved["engine"].tolist(), strict=True)),
        live=saved["live"],
        layer_cells=layer_cells,
        pos=saved["pos"],
        rot=saved["rot"],
        state=[saved[f"state.{i}"] for i in range(len(eviction.state))],
        signals={signal: _history(engine, signal, saved[name]) for name, signal in eviction.signals.items()},
        cells=[saved[f"cells.{layer}"] for layer in range(len(layer_cells))],
        beside=[saved[name] for name in _BESIDE] if engine.context.n_beside else [],
        archive=saved,
        is_observed="is_observed" in saved,
    )


def _check_beside(engine: Engine, parts: _Parts) -> None:
    """Raises SessionError where sliding layers had other cells, whose number goes with the batch size."""
    tables = [table.shape for table in parts.beside[:1]]
    if tables and tables != engine.context.beside_shapes[:1]:
        raise SessionError(
            "what was saved does not fit: its sliding layers have another number of cells; "
            "give the batch size (-b) that it was made with"
        )


def _history(engine: Engine, signal: Signal, values: np.ndarray) -> np.ndarray:
    """The signal as `Cache.history` has it; older sessions have the sum, which here is the last query's."""
    if signal is not Signal.RECENT or values.ndim != 2:
        return values
    history = np.zeros(engine.context.history_shape(signal, values.shape[1]), np.float32)
    history[-1] = values
    return history


def _counted_back(signal: Signal, values: np.ndarray, n_new: int) -> np.ndarray:
    """IMPORTANT counted from the last of n_new queries instead of the first, or the other way round."""
    return np.where(values > 0, n_new + 1 - values, 0) if signal is Signal.IMPORTANT else values


def _fits(engine: Engine, parts: _Parts) -> bool:
    """Whether the arrays are of the right types and sizes, and the numbers can be."""
    context, rows, eviction = engine.context, engine.rows, engine.eviction
    counters, live, pos, rot = parts.counters, parts.live, parts.pos, parts.rot
    n, n_past = counters["rows", "n_kv"], counters["rows", "n_past"]
    shape = len(rows.layer), n
    tables = [live, parts.layer_cells, pos, rot, *parts.beside[:1]]
    if not (
        all(array.dtype == np.int32 for array in tables)
        and live.shape == shape[:1]
        and pos.shape == rot.shape == shape
        and parts.layer_cells.shape == engine.layer_cells.shape
        and 0 <= n <= min(engine.n_cell, n_past)
        and live.min(initial=n) >= (0 if rows.ragged else n)
        and live.max(initial=0) == n
    ):
        return False
    is_live = np.arange(n) < live[:, None]
    own_state = [(own.dtype, shape + own.shape[2:]) for own in eviction.state]
    return (
        min(counters.values()) >= 0
        and all(counters["eviction", name] <= n_past for name in ("n_planned", "n_cleared"))
        and all(counters["eviction", name] < engine.policy.n_live for name in ("n_pinned", "n_held"))
        and counters["rows", "next_rot"] <= engine.n_ctx
        and all(
            ((array >= 0) & (array < end))[is_live].all()
            for array, end in ((pos, n_past), (rot, engine.n_ctx))
        )
        and all(
            context.fits(layer, n_live, array)
            for layer, (array, n_live) in enumerate(zip(parts.cells, rows.most(live).tolist(), strict=True))
        )
        and all(
            array.dtype == np.float32 and array.shape == context.history_shape(signal, n)
            for signal, array in parts.signals.items()
        )
        and (not context.archive or context.archive.fits(parts.archive, n_past))
        and (not parts.beside or [array.shape for array in parts.beside] == context.beside_shapes)
        and [(array.dtype, array.shape) for array in parts.state] == own_state
    )


def _put(engine: Engine, parts: _Parts) -> None:
    context, rows, eviction = engine.context, engine.rows, engine.eviction
    engine.reset()
    if rows.ragged:
        engine.resize(parts.layer_cells)
    for (part, name), value in parts.counters.items():
        setattr(getattr(engine, part), name, value)
    rows.put(parts.live, parts.pos, parts.rot)
    for own, array in zip(eviction.state, parts.state, strict=True):
        own[:, : rows.n_kv] = array
    for layer, n_live in enumerate(rows.most_live().tolist()):
        context.set_cells(layer, n_live, parts.cells[layer])
    if context.archive:
        context.archive.restore(parts.archive)
        context.archive.rebase(rows.n_past - rows.next_rot)
    eviction.edit(np.empty((0, 4), np.int32), rows.live, rows.next_rot)
    context.set_places(parts.rot)
    eviction.n_cleared = parts.counters["eviction", "n_cleared"]
    eviction.is_observed = parts.is_observed
    if parts.beside:
        context.set_beside(*parts.beside)
    for signal, values in parts.signals.items():
        context.write(signal, _counted_back(signal, values, eviction.n_new))
