"""Snapshots of an engine: everything that the next step depends on, as arrays by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from kvtool.engine.policy_cache import PolicyCache
from kvtool.errors import LibraryError, OutOfMemory, SessionError, StreamEnd

COUNTERS = (
    "rows.n_past",
    "rows.n_kv",
    "n_pinned",
    "n_held",
    "n_restart",
    "rows.next_rot",
    "n_planned",
    "signals.since",
    "n_evicted",
)
"""Counters of a `PolicyCache` and of its parts, in their order in the array "engine"."""

Counters: TypeAlias = "dict[str, int]"
"""Values of the counters by name."""

_MISFIT = "what was saved does not fit this model, policy or cache"

_FIXED = ("window", "window_cells")
"""Names of the arrays with the state of sliding and recurrent layers.

The names were chosen when kvtool supported only sliding layers.
"""


def save(cache: PolicyCache, *, archived: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) for each array of a snapshot. Later steps do not change the arrays.

    engine
        The counters.
    live, layer_cells
        `Rows.live` and `Context.layer_cells`.
    pos, rot, state.N, and the arrays of `Signals.save`
        Values of the first n_kv cells.
    cells.N
        K and V of the Nth layer's live cells, in the cache's number format.
    archive, archive.N
        The arrays of `Archive.save`, if the policy recalls; without tokens if `archived` is False.
    window, window_cells
        State of sliding and recurrent layers, if the model has any.
    """
    context, rows = cache.context, cache.rows
    n = rows.n_kv
    yield "engine", np.array(attrgetter(*COUNTERS)(cache), np.int64)
    yield "live", rows.live.copy()
    yield "layer_cells", context.layer_cells
    yield "pos", rows.pos[:, :n].copy()
    yield "rot", rows.rot[:, :n].copy()
    for i, array in enumerate(cache.state):
        yield f"state.{i}", array[:, :n].copy()
    yield from cache.signals.save()
    for layer, n_live in enumerate(rows.most_live().tolist()):
        yield f"cells.{layer}", context.cells(layer, n_live)
    if context.archive:
        yield from context.archive.save(tokens=archived)
    if context.fixed_state:
        yield from zip(_FIXED, context.fixed_state.save(), strict=True)


def restore(cache: PolicyCache, saved: Mapping[str, np.ndarray], n_cell: int) -> None:
    """Continue from the arrays that `save` yielded. n_cell: maximum number of tokens in the cache.

    Raises SessionError if the arrays do not fit this model, policy or cache. The engine is then unchanged, or
    empty if llama.cpp refused the arrays. Raises StreamEnd if there is no room for the archive, and
    OutOfMemory. The engine is then empty.
    """
    counters = check(cache, saved, n_cell)
    try:
        _put(cache, saved, counters)
    except LibraryError:
        cache.reset()
        raise SessionError(_MISFIT) from None
    except (StreamEnd, OutOfMemory):
        cache.reset()
        raise


def check(cache: PolicyCache, saved: Mapping[str, np.ndarray], n_cell: int) -> Counters:
    """Return the saved counters. Raises SessionError if the arrays do not fit. Changes nothing."""
    try:
        counters = dict(zip(COUNTERS, saved["engine"].tolist(), strict=True))
        _check_fixed(cache, saved)
        fits = _fits(cache, saved, counters, n_cell)
    except (KeyError, ValueError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise SessionError(_MISFIT)
    return counters


def _check_fixed(cache: PolicyCache, saved: Mapping[str, np.ndarray]) -> None:
    """Raise SessionError if the sliding layers were saved with another number of cells.

    The number of cells of sliding layers depends on the batch size.
    """
    fixed_state = cache.context.fixed_state
    if fixed_state and saved[_FIXED[0]].shape != fixed_state.shapes[0]:
        raise SessionError(
            "what was saved does not fit: its sliding layers have another number of cells; "
            "give the --batch-size that it was made with"
        )


def _fits(cache: PolicyCache, saved: Mapping[str, np.ndarray], counters: Counters, n_cell: int) -> bool:
    """True if the arrays have the right types and sizes, and the counters are possible."""
    context, rows, state = cache.context, cache.rows, cache.state
    live, layer_cells, pos, rot = tables = [saved[name] for name in ("live", "layer_cells", "pos", "rot")]
    n, n_past = counters["rows.n_kv"], counters["rows.n_past"]
    shape = len(rows.layer), n
    if not (
        all(array.dtype == np.int32 for array in tables)
        and live.shape == shape[:1]
        and pos.shape == rot.shape == shape
        and layer_cells.shape == cache.layer_cells.shape
        and 0 <= n <= min(n_cell, n_past)
        and live.min(initial=n) >= (0 if rows.ragged else n)
        and live.max(initial=0) == n
    ):
        return False
    is_live = np.arange(n) < live[:, None]
    expected = [(array.dtype, shape + array.shape[2:]) for array in state]
    return (
        min(counters.values()) >= 0
        and all(counters[clock] <= n_past for clock in ("n_planned", "signals.since"))
        and all(counters[name] < cache.policy.n_live for name in ("n_pinned", "n_held"))
        and counters["rows.next_rot"] <= cache.n_ctx
        and all(
            ((array >= 0) & (array < end))[is_live].all()
            for array, end in ((pos, n_past), (rot, cache.n_ctx))
        )
        and all(
            context.fits(layer, n_live, saved[f"cells.{layer}"])
            for layer, n_live in enumerate(rows.most(live).tolist())
        )
        and cache.signals.fits(saved, n)
        and (not context.archive or context.archive.fits(saved, n_past))
        and (not context.fixed_state or context.fixed_state.fits(*(saved[name] for name in _FIXED)))
        and [(array.dtype, array.shape) for array in _states(cache, saved)] == expected
    )


def _states(cache: PolicyCache, saved: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [saved[f"state.{i}"] for i in range(len(cache.state))]


def _put(cache: PolicyCache, saved: Mapping[str, np.ndarray], counters: Counters) -> None:
    context, rows = cache.context, cache.rows
    cache.reset()
    if rows.ragged:
        cache.resize(saved["layer_cells"])
    for name, value in counters.items():
        part, _, attribute = name.rpartition(".")
        setattr(getattr(cache, part) if part else cache, attribute, value)
    rows.put(saved["live"], saved["pos"], saved["rot"])
    for state, array in zip(cache.state, _states(cache, saved), strict=True):
        state[:, : rows.n_kv] = array
    for layer, n_live in enumerate(rows.most_live().tolist()):
        context.set_cells(layer, n_live, saved[f"cells.{layer}"])
    if context.archive:
        context.archive.restore(saved)
        context.archive.rebase(rows.n_past - rows.next_rot)
    cache.edit(rows.live, rows.next_rot)
    context.set_positions(saved["rot"])
    if context.fixed_state:
        context.fixed_state.restore(*(saved[name] for name in _FIXED))
    cache.signals.restore(saved, counters["signals.since"])
