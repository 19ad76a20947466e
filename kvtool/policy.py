"""The words that the engine and the policies share: Signal, View, Merge, Plan, Policy.

A row is one (layer, KV head) pair, layer by layer; every row evicts on its own. Cells of a row are
in no order: `View.pos[row, cell]` says which token of the stream a cell holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np


class Signal(IntFlag):
    """What the engine copies out of the step's attention A[head, query, cell], per row.

    The values are those of the patched library's C API.
    """

    NONE = 0
    ATTENTION = 1
    """Attention sum: over the queries since the last plan and the row's group of query heads."""
    LAST = 2
    """Last attention: of the last query alone, summed over the group."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of the cache. All arrays are C-contiguous, read-only for the policy.

    pos i32[row, n_kv]: position in the stream of the token in each cell, no two equal in a row.
    attn f32[row, n_kv], last f32[row, n_kv]: the signals, None unless the policy reads them.
    layer i32[row]: the layer of each row; rows of one layer are neighbours.
    next: position of the next token; a token at pos p has lived next - p steps.
    pinned: tokens with pos < pinned must stay (a chat's system prompt).
    """

    pos: np.ndarray
    layer: np.ndarray
    next: int
    pinned: int = 0
    attn: np.ndarray | None = None
    last: np.ndarray | None = None

    @property
    def n_kv(self) -> int:
        """Live cells of every row."""
        return self.pos.shape[1]


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
    """What a policy answers. keep b1[row, n_kv]: the same number of cells in every row."""

    keep: np.ndarray
    merge: Merge | None = None


class Policy(Protocol):
    """A frozen dataclass of parameters; what it remembers between plans is arrays that the engine keeps.

    budget: the most cells a row may hold, that of the token being decoded included.
    slack: how many cells below the budget an eviction goes, so that the next is that many tokens away;
    0 for a policy that never evicts.
    The constructor raises ValueError for parameters that cannot work.
    """

    budget: int
    slack: int

    reads: ClassVar[Signal]
    paper: ClassVar[str]

    @classmethod
    def fit(cls, budget: int, slack: int, **params: object) -> Policy:
        """The policy for a budget: parameters not given take the values that suit it."""
        ...

    def start(self, n_row: int, n_cell: int) -> tuple[np.ndarray, ...]:
        """The policy's state: zeroed arrays [row, n_cell], moved by the engine along with the cells.

        In a cell that has just received a token every array is zero.
        """
        ...

    def plan(self, view: View, state: tuple[np.ndarray, ...]) -> Plan:
        """Which cells stay: fewer than the budget in every row, the same number in all rows.

        Called with view.n_kv >= budget. May write to state[..][:, :view.n_kv], never to the view.
        """
        ...


def check_kept(budget: int, slack: int, sinks: int = 0, window: int = 0) -> None:
    """Raises ValueError unless an eviction down to budget - slack cells leaves room for sinks and window."""
    if not 1 <= slack < budget:
        raise ValueError(f"slack must be in 1..{budget - 1} (below the budget), got {slack}")
    if sinks < 0:
        raise ValueError(f"sinks must not be negative, got {sinks}")
    if not 0 <= window <= budget - slack - sinks:
        raise ValueError(
            f"window must be in 0..{max(budget - slack - sinks, 0)} (the budget of {budget} less "
            f"{slack} slack and {sinks} sinks), got {window}"
        )


def protected(view: View, n_keep: int, sinks: int, window: int) -> tuple[int, int]:
    """Positions (first, recent): tokens before `first` and from `recent` on must stay.

    Pinned tokens count as sinks; the window gives way where both do not fit into n_keep.
    """
    first = max(sinks, view.pinned)
    return first, view.next - min(window, n_keep - first)
