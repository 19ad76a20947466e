"""Bases of the policies that read keys."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.norm import normalise
from kvtool.policy import FLOOR, Ranked, Signal, State, View


@dataclass(frozen=True, slots=True)
class RankedKeys(Ranked):
    """Rank tokens by a score of their keys before RoPE.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room; 1 or more.
    """

    budget: int
    slack: int
    sinks: int = 4
    window: int = 1
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.KEYS
    min_window: ClassVar[int] = 1


class UnitKeys(Ranked):
    """Policy whose state is the keys before RoPE, scaled to norm 127 and rounded to integers.

    Sums of integers do not depend on the order of the cells. A key takes half as many bytes as in an f16
    cache.
    """

    __slots__ = ()

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        return (np.zeros((n_row, n_cell, n_dim), np.int8),)

    def observe(self, view: View, state: State) -> None:
        normalise(view.keys, view.new_cells, state[0])
