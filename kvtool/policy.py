"""The words that the engine and the policies share: Signal, Request, View, Merge, Plan, Policy.

A row is one (layer, KV head) pair, layer by layer; every row evicts on its own. Cells of a row are
in no order: `View.pos[row, cell]` says which token of the stream a cell holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from kvtool.kernels.selection import keep_highest

if TYPE_CHECKING:
    from typing import Self, TypeAlias


class Signal(IntFlag):
    """What the engine copies out of the step's attention A[head, query, cell], per row.

    The group is the row's query heads. A key is important to a query where A >= 1 / t, t being the tokens
    that the query has seen, itself included. The values are those of the patched library's C API.
    """

    NONE = 0
    ATTENTION = 1
    """Attention sum: over the queries since the last plan and the group."""
    LAST = 2
    """Last attention: of the last query alone, summed over the group."""
    RECENT = 4
    """Recent attention: summed over the last `n_query` queries and the group."""
    SQUARES = 8
    """Squares: each query's attention summed over the group, its square summed since the last plan."""
    HITS = 16
    """Hits: how many pairs of a query since the last plan and a head of the group it was important to."""
    IMPORTANT = 32
    """Last important step: how much of the stream the latest query it was important to had seen; 0: none."""
    KEYS = 64
    """Keys: of the cells that are new since the last plan, as they were before RoPE."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine asks of llama.cpp for a policy: how to reduce each step's attention, and to scale it.

    Attributes
    ----------
    signals
        What is read after a step.
    n_query
        The queries of `Signal.RECENT`.
    group
        How the attention of a group of query heads becomes one: "sum", "max" or "first".
    t
        What t counts in `Signal.HITS`, `Signal.IMPORTANT` and log_n: tokens of the "stream" or live "cells".
    log_n
        Whether attention logits are multiplied by log_512(t).
    """

    signals: Signal = Signal.NONE
    n_query: int = 0
    group: str = "sum"
    t: str = "stream"
    log_n: bool = False

    @property
    def needs_t(self) -> bool:
        """Whether llama.cpp has to be told t before each step."""
        return self.log_n or bool(self.signals & (Signal.HITS | Signal.IMPORTANT))


SIGNALS = {
    Signal.ATTENTION: "attn",
    Signal.LAST: "last",
    Signal.RECENT: "recent",
    Signal.SQUARES: "squares",
    Signal.HITS: "hits",
    Signal.IMPORTANT: "important",
}
"""The fields of a view that hold a value a cell."""


_ABSENT = cast("np.ndarray", None)
"""None, in a view, for what its policy does not read; typed for the policies that do."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of the cache. All arrays are C-contiguous, read-only for the policy.

    pos i32[row, n_kv]: position in the stream of the token in each cell, no two equal in a row.
    layer i32[row]: the layer of each row; rows of one layer are neighbours.
    next: position of the next token; a token at pos p has lived next - p steps.
    pinned: tokens with pos < pinned must stay (a chat's system prompt).
    n_ctx: the context, whose end original positions cannot go beyond; 0: not known.
    held: so many of the newest tokens must stay as well (the words after which a chat's reply begins).
    n_new: tokens since the signals began, which is the last plan; they are in the last live cells.
    live i32[row]: how many cells of each row live, the first ones, where rows differ; None: all n_kv.
    The signals, None unless the policy reads them: attn, last, recent, squares, hits f32[row, n_kv];
    important i32[row, n_kv]; keys f32[row, n_new, n_dim] of the new cells, zero behind a layer's own head
    dimension.
    """

    pos: np.ndarray
    layer: np.ndarray
    next: int
    pinned: int = 0
    n_new: int = 0
    live: np.ndarray = _ABSENT
    held: int = 0
    n_ctx: int = 0
    attn: np.ndarray = _ABSENT
    last: np.ndarray = _ABSENT
    recent: np.ndarray = _ABSENT
    squares: np.ndarray = _ABSENT
    hits: np.ndarray = _ABSENT
    important: np.ndarray = _ABSENT
    keys: np.ndarray = _ABSENT

    @property
    def n_kv(self) -> int:
        """Live cells of every row, or of the longest."""
        return int(self.pos.shape[1])


@dataclass(frozen=True, slots=True)
class Merge:
    """New values for kept cells: V[row, dst] = sum of weight * V[row, src] over the terms of (row, dst).

    row, dst, src i32[n], weight f32[n]; cells as the view numbers them. The terms of one (row, dst)
    are neighbours. All sources are read before any value is written. Keys are not touched.
    """

    row: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy answers. keep b1[row, n_kv]: as many cells in every row, unless the policy is ragged."""

    keep: np.ndarray
    merge: Merge | None = None


State: TypeAlias = "tuple[np.ndarray, ...]"


class Policy:
    """What policies have in common. A policy is a frozen dataclass of parameters and derives from this.

    What it remembers between plans is its state: arrays that the engine keeps, one entry a cell.

    budget: the most cells a row may hold, that of the token being decoded included.
    slack: how many cells below the budget an eviction goes, so that the next is that many tokens away;
    0 for a policy that never evicts.
    The constructor raises ValueError for parameters that cannot work.

    reads: the signals it wants. paper: where it comes from. n_query: the queries of `Signal.RECENT`.
    group: how the attention of a group of query heads becomes one, "sum", "max" or "first" (that of the
    group's first head). prefill: how it wants a prompt, in batches with a plan after each ("stream") or
    decoded whole and compressed once ("whole"). ragged: whether its rows may keep different numbers of cells;
    it then plans every `slack` tokens, and the budget is no more than a cap. logn: whether attention logits
    are multiplied by log_512(t). t: what t counts, here and in signals, the tokens of the "stream" or the
    live "cells".
    """

    __slots__ = ()

    budget: int
    slack: int

    paper: ClassVar[str] = ""
    prefill: ClassVar[str] = "stream"
    ragged: ClassVar[bool] = False

    if TYPE_CHECKING:
        # what its dataclass brings along
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, budget: int, slack: int, **params: Any) -> None: ...

    # properties, so that a policy may have a constant, a parameter or a property in their place

    @property
    def reads(self) -> Signal:
        return Signal.NONE

    @property
    def n_query(self) -> int:
        return 0

    @property
    def group(self) -> str:
        return "sum"

    @property
    def logn(self) -> bool:
        return False

    @property
    def t(self) -> str:
        return "stream"

    def request(self) -> Request:
        """What llama.cpp computes for this policy, as one object."""
        return Request(self.reads, self.n_query, self.group, self.t, self.logn)

    @classmethod
    def needs_patch(cls) -> bool:
        """Whether llama.cpp's own calls are too little: they show nothing, and cut tokens from all rows."""
        own = (
            getattr(cls, name)
            for name in ("reads", "logn")
            if getattr(cls, name) is not getattr(Policy, name)
        )
        return cls.ragged or any(own)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Self:
        """The policy for a budget: parameters not given take the values that suit it."""
        return cls(budget, slack, **params)

    def split(self, pinned: int = 0) -> dict[str, int]:
        """What the budget's cells are for, parts that add up to it; the policy chooses among the rest.

        pinned: the first tokens that are never evicted; counted are those beyond the sinks.
        """
        sinks, window = (getattr(self, name, 0) for name in ("sinks", "window"))
        return split_budget(self.budget, self.slack, sinks, window, pinned)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """The state: zeroed arrays [row, n_cell, ...]; n_dim is the length of a key.

        In a cell that has just received a token every array is zero.
        """
        return ()

    def observe(self, view: View, state: State) -> None:
        """Adds what the signals say to state[..][:, :view.n_kv]; comes before every plan."""

    def plan(self, view: View, state: State) -> Plan:
        """Which cells stay: fewer than the budget in every row, the same number in all rows.

        Called with view.n_kv >= budget. May write to state[..][:, :view.n_kv], never to the view.
        """
        raise NotImplementedError

    def move(self, state: State, source: np.ndarray) -> None:
        """After a plan: each of the first cells takes what cell source i32[row, n_keep] of its row had."""
        row, cell = true_cells(source != np.arange(source.shape[1], dtype=np.int32))
        for array in state:
            array[row, cell] = array[row, source[row, cell]]

    def compress(self, view: View) -> Plan:
        """The one plan after a prompt that was decoded whole; the view's signals are those of all of it."""
        n_row, n_kv = view.pos.shape
        state = self.start(n_row, n_kv, 0 if view.keys is None else view.keys.shape[2])
        self.observe(view, state)
        return self.plan(view, state)

    def adopt(self, view: View, state: State) -> None:
        """After `compress`: fills a new state from what it left, with the signals of the whole prompt."""
        self.observe(view, state)


def check_kept(budget: int, slack: int, sinks: int = 0, window: int = 0, least: int = 0) -> None:
    """Raises ValueError unless an eviction down to budget - slack cells leaves room for sinks and window.

    least: the smallest window that works.
    """
    if not 1 <= slack < budget:
        raise ValueError(f"slack must be in 1..{budget - 1} (below the budget), got {slack}")
    if sinks < 0:
        raise ValueError(f"sinks must not be negative, got {sinks}")
    if not least <= window <= budget - slack - sinks:
        raise ValueError(
            f"window must be in {least}..{max(budget - slack - sinks, least)} (the budget of {budget} less "
            f"{slack} slack and {sinks} sinks), got {window}"
        )


def split_budget(budget: int, slack: int, sinks: int, window: int, pinned: int) -> dict[str, int]:
    """The parts of a budget in cells, as `protected` gives them to sinks, pinned tokens and the window."""
    first = max(sinks, pinned)
    window = min(window, budget - slack - first)
    rest = budget - slack - first - window
    return {"sinks": sinks, "pinned": first - sinks, "window": window, "rest": rest, "slack": slack}


def true_cells(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """np.nonzero of b1[row, cell], in a fifth of its time: row and cell of each that is true, row by row."""
    row, cell = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return row, cell


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")


def protected(view: View, n_keep: int, sinks: int, window: int) -> tuple[int, int]:
    """Positions (first, recent): tokens before `first` and from `recent` on must stay.

    Pinned tokens count as sinks, held ones as the window, which gives way where both do not fit into n_keep.
    """
    first = max(sinks, view.pinned)
    return first, view.next - min(max(window, view.held), n_keep - first)


def keep_ranked(view: View, score: np.ndarray, n_keep: int, sinks: int, window: int) -> np.ndarray:
    """keep b1[row, n_kv]: what `protected` names, and the highest of the rest, n_keep in all.

    score: f32[row, n_kv or more]; among equal scores the newer token stays.
    """
    keep = np.empty(view.pos.shape, np.bool_)
    keep_highest(view.pos, score, *protected(view, n_keep, sinks, window), n_keep, keep)
    return keep


def sum_rows(view: View, score: np.ndarray, per: str) -> np.ndarray:
    """f32[row, n_kv]: each token's score f32[row, n_kv or more], summed over what decides as one.

    per: "row", "layer" (the layer's rows) or "all" (every row); rows that decide as one hold the same tokens.
    """
    if per == "row":
        return score
    first_rows = np.flatnonzero(np.diff(view.layer, prepend=-1)) if per == "layer" else np.zeros(1, np.intp)
    n_rows = np.diff(first_rows, append=len(view.layer))
    if (view.pos == np.repeat(view.pos[first_rows], n_rows, axis=0)).all():
        # in the same cells too, as rows that never decided by themselves have them
        return np.repeat(np.add.reduceat(score[:, : view.n_kv], first_rows, axis=0), n_rows, axis=0)
    # no two positions of a row are equal: the sort need not be stable
    order = np.argsort(view.pos, axis=1)
    total = np.add.reduceat(np.take_along_axis(score, order, axis=1), first_rows, axis=0)
    summed = np.empty(view.pos.shape, np.float32)
    np.put_along_axis(summed, order, np.repeat(total, n_rows, axis=0), axis=1)
    return summed
