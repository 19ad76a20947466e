"""Base class of all policies."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from kvtool.policy.plan import Plan, true_cells
from kvtool.policy.view import RecallSettings, ReconstructionPass, Signal, SignalRequest, View

if TYPE_CHECKING:
    from typing import Self


State: TypeAlias = "tuple[np.ndarray, ...]"
"""State of a policy between plans: arrays [row, cell, ...] that the engine owns."""


class Policy:
    """Choose which cells to keep. A policy is a frozen dataclass of parameters that derives from this class.

    The constructor raises ValueError for parameters that cannot work. Fields `sinks` and `window` are
    optional. A subclass may set `reads`, `n_query`, `n_future`, `n_skip`, `group`, `logn`, `t`, `prefill`,
    `counts_queries` and `ragged` as a constant, a parameter or a property.

    Attributes
    ----------
    budget
        Maximum number of cells of a row, including the cell of the token that is being decoded.
    slack
        Number of cells that an eviction frees below the budget. It is also the number of tokens until the
        next eviction. 0 for a policy that never evicts.
    sinks
        First tokens, never evicted.
    window
        Newest tokens, kept if pinned tokens leave room.
    reads
        Signals that the policy needs.
    n_query
        Number of newest queries that `Signal.RECENT` and `Signal.FUTURE` cover. For RECENT, llama.cpp stores
        this many floats for each row and cell. For FUTURE, it stores the queries.
    n_future
        Number of later positions that `Signal.FUTURE` averages over.
    n_skip
        Number of first tokens whose queries `Signal.FUTURE` leaves out. If the stream has only these tokens,
        the newest query is used.
    group
        Reduction of attention over a group's query heads: "sum", "max" or "first" (only the first head).
    logn
        True if attention logits are multiplied by log_512(t). See `t`.
    t
        Meaning of the number t in `logn` and in the signals: "stream" for the tokens of the stream, or
        "cells" for live cells.
    paper
        Source of the policy, such as an arXiv id.
    prefill
        How to read a prompt: "stream" (in batches, with a plan after each batch) or "whole"
        (decoded without evictions, then compressed once).
    counts_queries
        True if the policy needs the number of queries that have seen a token (`View.lived`), or the number of
        tokens that a query has seen (`t`). A prompt longer than the context is then never read in segments,
        because a query sees no tokens of earlier segments. Default: True if llama.cpp uses `t`.
    sums
        Fields of `View` whose sums over all plans are the state. The default `start` and `observe` use them.
    stores_score
        True if the state is a score per cell, f32[row, cell]. The default `start` makes it.
    merges
        True if plans merge values.
    ragged
        True if rows may keep different numbers of cells. The engine then asks for a plan every `slack`
        tokens, and the budget is only a cap.
    capped
        True if the user need not set a budget: rows keep as many cells as they need, and a budget is only a
        cap. Such a policy is ragged.
    has_rest
        True if the policy chooses among tokens that are not in sinks or window. False if the window has all
        tokens except the sinks.
    max_window
        Largest window that `fit` chooses.
    evicts
        False if the policy never evicts: the cache grows until it is full.
    adjustable
        Names of parameters that may change during a stream, for example when a session is reopened with other
        values. Such parameters affect how steps are computed, but not which tokens are kept.
    """

    __slots__ = ()

    budget: int
    slack: int

    paper: ClassVar[str] = ""
    sums: ClassVar[tuple[str, ...]] = ()
    stores_score: ClassVar[bool] = False
    capped: ClassVar[bool] = False
    has_rest: ClassVar[bool] = True
    max_window: ClassVar[int] = sys.maxsize
    evicts: ClassVar[bool] = True
    adjustable: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        # declare these two members for type checkers: every subclass is a dataclass, which defines them
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
    def counts_queries(self) -> bool:
        return self.request().needs_t

    @property
    def ragged(self) -> bool:
        return False

    @property
    def n_keep(self) -> int:
        """Number of cells that an eviction leaves in a row."""
        return self.n_live - self.slack

    @property
    def n_asked(self) -> int:
        """Budget that the user requested.

        Whole reading compresses a prompt that has more tokens than this budget. For some policies, the user
        requests the average budget of the rows, or the number of cells that an eviction leaves. The requested
        budget is then less than `budget`, which is the maximum number of cells.
        """
        return self.budget

    @property
    def recall(self) -> RecallSettings | None:
        """Settings of recall; None if evicted tokens are lost."""
        return None

    @property
    def reconstruction(self) -> ReconstructionPass | None:
        """Reconstruction pass over a prompt before it is compressed; None if there is no such pass.

        A policy with a reconstruction pass reads prompts whole, and gets signals only from that pass.
        """
        return None

    def for_model(self, n_group: int, has_values: bool) -> Policy:
        """Return the policy adapted to a model whose rows have at most n_group query heads each.

        has_values: False if values are part of the keys (MLA). Without separate values, the policy `recall`
        has no synthetic cells.
        """
        return self

    @property
    def n_live(self) -> int:
        """Maximum number of live cells of a row: the budget minus the cells for recalled tokens."""
        return self.budget - (self.recall.n_cell if self.recall else 0)

    def pinnable(self, n: int) -> int:
        """Return how many of a stream's first n tokens `Engine.pin` pins.

        Without an archive, it pins all of them. With an archive, it pins at most half of `n_keep`, because
        the model attends to the rest in the archive.
        """
        return min(n, self.n_keep // 2) if self.recall else n

    @property
    def exempt(self) -> tuple[int, int]:
        """Number of sinks, which are never evicted, and of window tokens. Pinned tokens shrink the window."""
        return getattr(self, "sinks", 0), getattr(self, "window", 0)

    def request(self) -> SignalRequest:
        """Return the signals and scaling that llama.cpp computes for this policy."""
        return SignalRequest(**{field.name: getattr(self, field.name) for field in fields(SignalRequest)})

    @classmethod
    def has_recall(cls) -> bool:
        """True if the policy recalls evicted tokens from an archive."""
        return cls.recall is not Policy.recall

    @classmethod
    def has_reconstruction(cls) -> bool:
        """True if the policy runs a reconstruction pass over a prompt before compressing it."""
        return cls.reconstruction is not Policy.reconstruction

    @classmethod
    def may_merge(cls) -> bool:
        """True if the policy has parameters with which plans merge values."""
        return cls.merges is not Policy.merges

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Self:
        """Return the policy for a budget. Parameters that are not given get values that suit the budget.

        A `window` that has no default becomes half of the kept tokens, but at most `max_window`, and at most
        the kept tokens that are not sinks.
        """
        window = cls.__dataclass_fields__.get("window")
        if window and window.default is MISSING and "window" not in params:
            sinks = cls.__dataclass_fields__.get("sinks")
            n_sink = params.get("sinks", sinks.default if sinks else 0)
            n_keep = budget - slack
            params["window"] = max(min(n_keep // 2, cls.max_window, n_keep - n_sink), 1)
        return cls(budget, slack, **params)

    def split(self, pinned: int = 0) -> dict[str, int]:
        """Return the number of cells for each use of the budget. The numbers add up to the budget.

        The policy chooses the tokens of `rest`. pinned: number of first tokens that are never evicted. Pinned
        tokens that are also sinks are counted only as `sinks` in the result.
        """
        sinks, window = self.exempt
        window = window if self.has_rest else self.n_keep
        parts = split_budget(self.n_live, self.slack, sinks, window, pinned)
        return parts | ({"recalled": self.recall.n_cell} if self.recall else {})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return the initial state: zeroed arrays [row, n_cell, ...]; n_dim is the dimension of a key.

        A new token's cell is zero in every array.
        """
        if not all(hasattr(View, name) for name in self.sums):
            raise ValueError(f"sums must be a tuple of fields of View, such as ('attn',), got {self.sums!r}")
        n_array = len(self.sums) + self.stores_score
        return tuple(np.zeros((n_row, n_cell), np.float32) for _ in range(n_array))

    def observe(self, view: View, state: State) -> None:
        """Add the signals to state[..][:, :view.n_kv]. The engine calls this method before every plan."""
        for name, total in zip(self.sums, state, strict=False):
            total[:, : view.n_kv] += getattr(view, name)

    def plan(self, view: View, state: State) -> Plan:
        """Choose the cells to keep: fewer than `n_live` in every row, and the same number in all rows.

        The engine calls this method when view.n_kv >= n_live. If the policy is ragged, the engine also calls
        it every `slack` tokens, and rows may keep different numbers of cells. The method may write to
        state[..][:, :view.n_kv], but not to the view.
        """
        raise NotImplementedError

    def move(self, state: State, source: np.ndarray) -> None:
        """Move the state after a plan: cell i of a row gets the state of cell source[row, i].

        source: i32[row, n_keep].
        """
        row, cell = true_cells(source != np.arange(source.shape[1], dtype=np.int32))
        for array in state:
            array[row, cell] = array[row, source[row, cell]]

    def compress(self, view: View) -> Plan:
        """Return the plan for a prompt, all tokens of which are live. The signals cover the whole prompt."""
        n_row, n_kv = view.pos.shape
        state = self.start(n_row, n_kv, 0 if view.keys is None else view.keys.shape[2])
        self.observe(view, state)
        return self.plan(view, state)

    def adopt(self, view: View, state: State) -> None:
        """Fill a new state after `compress`. The view has the kept cells, with their signals."""
        self.observe(view, state)


def split_budget(budget: int, slack: int, sinks: int, window: int, pinned: int) -> dict[str, int]:
    """Split a budget in cells into sinks, pinned tokens, window, rest and slack. See `protected`."""
    first = max(sinks, pinned)
    window = min(window, budget - slack - first)
    rest = budget - slack - first - window
    return {"sinks": sinks, "pinned": first - sinks, "window": window, "rest": rest, "slack": slack}
