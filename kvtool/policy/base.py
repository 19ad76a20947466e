"""What all policies have in common."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from kvtool.policy.plan import Plan, true_cells
from kvtool.policy.view import Recalls, Rehearsal, Request, Signal, View

if TYPE_CHECKING:
    from typing import Self


State: TypeAlias = "tuple[np.ndarray, ...]"
"""What a policy remembers between plans: arrays [row, cell, ...] that the engine keeps."""


class Policy:
    """Decides which cells stay. A policy is a frozen dataclass of parameters that derives from this class.

    The constructor raises ValueError for parameters that cannot work. A subclass may set `reads`, `n_query`,
    `n_future`, `n_skip`, `group`, `logn`, `t`, `prefill` and `ragged` as a constant, a parameter or a
    property.

    Attributes
    ----------
    budget
        Most cells of a row, including the cell of the token that is being decoded.
    slack
        How many cells below the budget an eviction goes: the next eviction is that many tokens away. 0 for a
        policy that never evicts.
    reads
        Signals that the policy wants.
    n_query
        Number of queries of `Signal.RECENT`, for which the library keeps that many floats per row and cell,
        and of `Signal.FUTURE`, for which it keeps the queries themselves.
    n_future
        Positions that `Signal.FUTURE` looks ahead.
    n_skip
        First tokens of the stream whose queries do not count in `Signal.FUTURE`, unless there are no others.
    group
        How the attention of a group of query heads becomes one: "sum", "max", or "first" (the first head's).
    logn
        Whether attention logits are multiplied by log_512(t).
    t
        What t counts, in `logn` and in the signals: tokens of the "stream" or live "cells".
    paper
        Where the policy comes from.
    prefill
        How the policy wants a prompt: "stream" (in batches, with a plan after each) or "whole" (decoded
        whole, then compressed once).
    sums
        Fields of the view whose sums are the state, unless the policy has its own `start` and `observe`.
    merges
        Whether its plans merge values.
    ragged
        Whether rows may keep different numbers of cells. The engine then asks for a plan every `slack`
        tokens, and the budget is only a cap.
    capped
        Whether the policy needs no budget: rows keep what they need. Such a policy is ragged.
    has_rest
        Whether it chooses among what is neither sink nor window. Otherwise all of that is window.
    most_window
        The largest window that `fit` chooses.
    evicts
        Whether the policy ever evicts. False: the cache grows until it is full.
    adjustable
        Parameters that may change while a stream goes on, as in a session that is opened with others: they
        say how steps are computed, and nothing of what is kept.
    """

    __slots__ = ()

    budget: int
    slack: int

    paper: ClassVar[str] = ""
    sums: ClassVar[tuple[str, ...]] = ()
    capped: ClassVar[bool] = False
    has_rest: ClassVar[bool] = True
    most_window: ClassVar[int] = sys.maxsize
    evicts: ClassVar[bool] = True
    adjustable: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        # every policy is a dataclass
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, budget: int, slack: int, **params: Any) -> None: ...

    @property
    def reads(self) -> Signal:
        return Signal.NONE

    @property
    def n_query(self) -> int:
        return 0

    @property
    def n_future(self) -> int:
        return 0

    @property
    def n_skip(self) -> int:
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

    @property
    def merges(self) -> bool:
        return False

    @property
    def prefill(self) -> str:
        return "stream"

    @property
    def ragged(self) -> bool:
        return False

    @property
    def n_keep(self) -> int:
        """Cells of a row after an eviction."""
        return self.n_live - self.slack

    @property
    def n_asked(self) -> int:
        """The budget that was asked for: below the budget where it counts the cells after an eviction, or
        those of all rows of a layer together.

        A prompt of more tokens is compressed if it is read whole.
        """
        return self.budget

    @property
    def recall(self) -> Recalls | None:
        """How steps recall evicted tokens; None: evicted tokens are forgotten."""
        return None

    @property
    def rehearsal(self) -> Rehearsal | None:
        """How a prompt is read once more before it is compressed; None: it is read once.

        Such a policy reads prompts whole, and has no signals but those of a rehearsal.
        """
        return None

    def on(self, n_group: int, has_values: bool) -> Policy:
        """The policy for a model each of whose rows has at most n_group query heads.

        has_values: whether rows have values of their own, so that cells can be made of what is recalled.
        """
        return self

    @property
    def n_live(self) -> int:
        """The most live cells of a row: the budget without the cells for recalled tokens."""
        return self.budget - (self.recall.n_cell if self.recall else 0)

    @property
    def exempt(self) -> tuple[int, int]:
        """Sinks and window: how many of the first and of the newest tokens are never evicted."""
        return getattr(self, "sinks", 0), getattr(self, "window", 0)

    def request(self) -> Request:
        """What llama.cpp computes for this policy, as one object."""
        ahead = self.n_future, self.n_skip
        return Request(self.reads, self.n_query, self.group, self.t, self.logn, self.recall, *ahead)

    @classmethod
    def needs_patch(cls) -> bool:
        """Whether the policy needs the patched llama.cpp.

        An unpatched one shows no attention, and can only remove a token from all rows at once.
        """
        pairs = ((getattr(cls, name), getattr(Policy, name)) for name in ("reads", "logn", "recall"))
        # what is ragged by a parameter ranks by a signal
        ragged: object = cls.ragged
        return ragged is True or any(own for own, plain in pairs if own is not plain)

    @classmethod
    def may_merge(cls) -> bool:
        """Whether there are parameters with which plans merge values."""
        return cls.merges is not Policy.merges

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Self:
        """The policy for a budget. Parameters that are not given take values that suit the budget.

        A `window` without a default is half of what is kept, but at most `most_window`.
        """
        window = cls.__dataclass_fields__.get("window")
        if window and window.default is MISSING and "window" not in params:
            params["window"] = max(min((budget - slack) // 2, cls.most_window), 1)
        return cls(budget, slack, **params)

    def split(self, pinned: int = 0) -> dict[str, int]:
        """What the budget's cells are for, in parts that add up to it: the policy chooses among the rest.

        pinned: number of first tokens that are never evicted. Only those beyond the sinks are counted.
        """
        sinks, window = self.exempt
        window = window if self.has_rest else self.n_keep
        parts = split_budget(self.n_live, self.slack, sinks, window, pinned)
        return parts | ({"recalled": self.recall.n_cell} if self.recall else {})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """The state: zeroed arrays [row, n_cell, ...]; n_dim is the length of a key.

        The cell of a new token is zero in every array.
        """
        return tuple(np.zeros((n_row, n_cell), np.float32) for _ in self.sums)

    def observe(self, view: View, state: State) -> None:
        """Adds the signals to state[..][:, :view.n_kv]. The engine calls it before every plan."""
        for name, total in zip(self.sums, state, strict=False):
            total[:, : view.n_kv] += getattr(view, name)

    def plan(self, view: View, state: State) -> Plan:
        """Which cells stay: fewer than the budget in every row, the same number in all rows.

        The engine calls it with view.n_kv >= budget. It may write to state[..][:, :view.n_kv], but not to the
        view.
        """
        raise NotImplementedError

    def move(self, state: State, source: np.ndarray) -> None:
        """After a plan: each of the first cells takes what cell source i32[row, n_keep] of its row had."""
        row, cell = true_cells(source != np.arange(source.shape[1], dtype=np.int32))
        for array in state:
            array[row, cell] = array[row, source[row, cell]]

    def compress(self, view: View) -> Plan:
        """The one plan after a prompt that was decoded whole. The signals are those of the whole prompt."""
        n_row, n_kv = view.pos.shape
        state = self.start(n_row, n_kv, 0 if view.keys is None else view.keys.shape[2])
        self.observe(view, state)
        return self.plan(view, state)

    def adopt(self, view: View, state: State) -> None:
        """Fills a new state after `compress`. The view has the cells that stayed, with their signals."""
        self.observe(view, state)


def split_budget(budget: int, slack: int, sinks: int, window: int, pinned: int) -> dict[str, int]:
    """The parts of a budget in cells, as `protected` gives them to sinks, pinned tokens and the window."""
    first = max(sinks, pinned)
    window = min(window, budget - slack - first)
    rest = budget - slack - first - window
    return {"sinks": sinks, "pinned": first - sinks, "window": window, "rest": rest, "slack": slack}
