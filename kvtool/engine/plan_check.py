"""Call a policy's methods, and check its plan and state. The policy may be user code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from traceback import extract_tb
from typing import TypeVar

import numpy as np

from kvtool.errors import KvtoolError, PlanError, StreamEnd, where
from kvtool.policy import Merge, Plan, Policy, Ranked, View
from kvtool.policy.view import SIGNALS

_Answer = TypeVar("_Answer")


def ask(policy: Policy, method: Callable[..., _Answer], *args: object) -> _Answer:
    """Call a method of a policy. Any error but KvtoolError becomes a PlanError, even SystemExit."""
    try:
        return method(*args)
    except KvtoolError:
        raise
    except (Exception, SystemExit) as error:
        hint = next(_absent(policy, error, args), None)
        told = TypeError(hint).with_traceback(error.__traceback__) if hint else error
        raise PlanError(f"{_name(policy, method)}: {where(told, called=method)}") from error


def _name(policy: Policy, method: Callable[..., object]) -> str:
    """Return the name of a method that the policy's author has written."""
    kind, func = type(policy).__name__, getattr(method, "__func__", None)
    if func is Policy.request:
        # the author has written only attributes such as `reads`, which the message names
        return kind
    # a policy that inherits `plan` from Ranked defines only `scores`
    return f"{kind}.{'scores' if func is Ranked.plan else method.__name__}"


def _absent(policy: Policy, error: BaseException, args: Iterable[object]) -> Iterator[str]:
    """Yield a line for each signal that the failed code uses, but that `reads` does not name.

    If the code got None from somewhere else, yield a line that it may be a signal.
    """
    code = " ".join(frame.line or "" for frame in extract_tb(error.__traceback__))
    used = {*re.findall(r"\bview\.(\w+)", code), *policy.sums}
    for view in (arg for arg in args if isinstance(arg, View)):
        for signal, spec in SIGNALS.items():
            for name in spec.fields:
                if name in used and getattr(view, name) is None:
                    yield f"view.{name} is None; add Signal.{signal.name} to reads"
    if "NoneType" in str(error):
        yield f"{error}; a signal of the view is None unless it is in reads"


def check_state(name: str, state: object, shape: tuple[int, ...]) -> None:
    """Raise PlanError unless a policy's new state is a tuple of writable arrays of zeros [row, cell, ...]."""
    arrays = state if isinstance(state, tuple) else (None,)
    if not all(isinstance(array, np.ndarray) and array.shape[:2] == shape for array in arrays):
        raise PlanError(f"{name}: start must return a tuple of arrays {shape}, or longer in further axes")
    for i, array in enumerate(arrays):
        if array.dtype.kind not in "biuf":
            raise PlanError(f"{name}: state {i} of start must hold numbers, not {array.dtype}")
        if not array.flags.writeable or array.any():
            raise PlanError(f"{name}: state {i} of start must be writable and zero: a new token's cell is")


def check_plan(name: str, plan: Plan, view: View, budget: int, *, ragged: bool, may_fill: bool) -> np.ndarray:
    """Return i32[row]: number of cells that a plan keeps in each row.

    Raises PlanError if the plan breaks a rule, for example if a row keeps `budget` or more cells. Raises
    StreamEnd if the rows are full, the plan evicts nothing and the policy may fill the cache.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"{name}: plan must return a Plan, got {type(plan).__name__}")
    keep, n_kv = plan.keep, view.pos.shape[1]
    kind = f"{getattr(keep, 'dtype', type(keep).__name__)}{getattr(keep, 'shape', '')}"
    if kind != f"bool{view.pos.shape}":
        raise PlanError(f"{name}: keep must be a C-contiguous bool{view.pos.shape}, got {kind}")
    if not keep.flags.c_contiguous:
        raise PlanError(f"{name}: keep is not C-contiguous; copy it with np.ascontiguousarray")
    counts: np.ndarray = keep.sum(axis=1, dtype=np.int32)
    if may_fill and n_kv >= budget and counts.min() == n_kv:
        larger = "the budget" if budget < view.n_ctx else "--ctx-size"
        raise StreamEnd(
            f"the cache ({n_kv:,} tokens) is full, and the policy evicts nothing; "
            f"raise {larger}, or choose another policy, such as --policy recall"
        )
    if ragged:
        dead = np.flatnonzero((keep & (view.pos < 0)).any(axis=1))
        if len(dead):
            raise PlanError(f"{name}: row {int(dead[0])} keeps a cell that holds no token")
    elif len(uneven := np.flatnonzero(counts != counts[0])):
        row = int(uneven[0])
        raise PlanError(f"{name}: row {row} keeps {counts[row]} cells, row 0 keeps {counts[0]}")
    outside = np.flatnonzero((counts < 1) | (counts >= budget))
    if len(outside):
        row = int(outside[0])
        kept = f"{counts[row]} cells of a budget of {budget}"
        raise PlanError(f"{name}: row {row} keeps {kept}; it must keep 1 to {budget - 1}")
    if view.pinned:
        lost = np.flatnonzero(((view.pos >= 0) & (view.pos < view.pinned) & ~keep).any(axis=1))
        if len(lost):
            raise PlanError(f"{name}: row {int(lost[0])} evicts a pinned token")
    if view.held:
        lost = np.flatnonzero(((view.pos >= max(view.next - view.held, 0)) & ~keep).any(axis=1))
        if len(lost):
            row = int(lost[0])
            raise PlanError(f"{name}: row {row} evicts one of the newest {view.held} tokens (view.held)")
    if plan.merge is not None:
        check_merge(name, plan.merge, keep)
    return counts


def check_archived(name: str, view: View, keep: np.ndarray, begin: int | None) -> None:
    """Raise PlanError unless all rows evict the same tokens, and these continue the archive without a gap.

    begin: position after the archive's newest token; None if the archive is empty.
    """
    pos = np.sort(view.pos[0, ~keep[0]])
    if begin is None:
        begin = int(pos[0]) if len(pos) else 0
    if not (keep == keep[0]).all() or (pos != begin + np.arange(len(pos))).any():
        raise PlanError(f"{name}: all rows must evict the tokens that are archived next")


def check_merge(name: str, merge: Merge, keep: np.ndarray) -> None:
    """Raise PlanError for an invalid merge.

    For each term, both cells must exist, the target must be a kept cell, and the weight must be finite. Terms
    with the same target must be neighbours.
    """
    if not isinstance(merge, Merge):
        raise PlanError(f"{name}: merge must be a Merge or None, got {type(merge).__name__}")
    try:
        parts = [np.asarray(part) for part in (merge.row, merge.dst, merge.src, merge.weight)]
    except ValueError:
        parts = [np.empty(())]
    if any(part.shape != parts[0].shape or part.ndim != 1 for part in parts):
        raise PlanError(f"{name}: a merge's row, dst, src and weight must be lists of one length")
    # do not check the dtype of an empty list: NumPy chooses float64
    unfit = [
        part.dtype
        for part, kinds in zip(parts, ("iu", "iu", "iu", "iuf"), strict=True)
        if part.size and part.dtype.kind not in kinds
    ]
    if unfit:
        raise PlanError(
            f"{name}: a merge's row, dst and src must be whole numbers, its weight numbers, got {unfit[0]}"
        )
    row, dst, src = (part.astype(np.int64) for part in parts[:3])
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(parts[3].astype(np.float32))
    if not is_finite.all():
        raise PlanError(f"{name}: merge {int(np.argmin(is_finite))} has a weight that is not finite")
    n_row, n_kv = keep.shape
    outside = (row < 0) | (row >= n_row) | (dst < 0) | (dst >= n_kv) | (src < 0) | (src >= n_kv)
    if outside.any():
        i = int(np.argmax(outside))
        raise PlanError(f"{name}: merge {i} is row {row[i]} of {n_row}, cells {dst[i]} <- {src[i]} of {n_kv}")
    if not (into := keep[row, dst]).all():
        i = int(np.argmin(into))
        raise PlanError(f"{name}: row {row[i]} merges a value into cell {dst[i]}, which it evicts")
    into_cell = row * n_kv + dst
    first = np.flatnonzero(np.diff(into_cell, prepend=-1))
    is_merged = np.zeros(n_row * n_kv, np.bool_)
    is_merged[into_cell] = True
    if np.count_nonzero(is_merged) != len(first):
        raise PlanError(f"{name}: the terms of a merge into one cell must be neighbours")
