"""KeyDiff: the tokens whose keys differ most from the average stay (Park et al. 2025, arXiv:2504.15364).

The score is -cos(k, mean of k' / ||k'||) over the live cells of the row; the length of the mean, the same for
all of them, is left out.

Differs from the paper: keys are compared as they are before RoPE, where the paper's (and kvpress's) have gone
through it; here keys that are equal are alike wherever they stand. The newest tokens always stay, and the
sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.norm import square_norm
from kvtool.policy import Plan, Policy, Signal, State, View, check_kept, keep_ranked


@dataclass(frozen=True, slots=True)
class KeyDiff(Policy):
    """sinks: first tokens, never evicted. window: newest tokens, likewise; 1 or more."""

    budget: int
    slack: int
    sinks: int = 4
    window: int = 1

    reads: ClassVar[Signal] = Signal.KEYS
    paper: ClassVar[str] = "arXiv:2504.15364"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window, least=1)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Keys of length 127 i8[row, n_cell, n_dim], half the bytes that a key takes in an f16 cache.

        Sums of whole numbers do not depend on their order.
        """
        return (np.zeros((n_row, n_cell, n_dim), np.int8),)

    def observe(self, view: View, state: State) -> None:
        (unit,) = state
        _normalise(view.keys, view.n_kv - view.keys.shape[1], unit)

    def plan(self, view: View, state: State) -> Plan:
        (unit,) = state
        score = np.empty(view.pos.shape, np.float32)
        _difference(unit, score)
        n_keep = self.budget - self.slack
        return Plan(keep_ranked(view, score, n_keep, self.sinks, self.window))


@kernel("void(f4[:,:,::1], i8, i1[:,:,::1])")
def _normalise(keys: np.ndarray, first: int, unit: np.ndarray) -> None:
    """keys f32[row, n_new, n_dim], of the cells from `first` on -> unit i8[row, n or more, n_dim].

    A key of zeros stays one.
    """
    n_row, n_new, n_dim = keys.shape
    for row in range(n_row):
        for i in range(n_new):
            norm = np.sqrt(square_norm(keys[row, i]))
            scale = 127 / norm if norm > 0 else 0.0
            for dim in range(n_dim):
                unit[row, first + i, dim] = np.int8(np.rint(keys[row, i, dim] * scale))


@kernel("void(i1[:,:,::1], f4[:,::1])", any_order=True)
def _difference(unit: np.ndarray, score: np.ndarray) -> None:
    """unit i8[row, n or more, n_dim] -> score f32[row, n]: minus its product with the row's sum."""
    n_row, n = score.shape
    n_dim = unit.shape[2]
    total, wide = np.empty(n_dim, np.int32), np.empty(n_dim, np.float64)
    for row in range(n_row):
        total[:] = 0
        for cell in range(n):
            for dim in range(n_dim):
                total[dim] += unit[row, cell, dim]
        wide[:] = total
        for cell in range(n):
            product = 0.0
            for dim in range(n_dim):
                product += wide[dim] * unit[row, cell, dim]
            score[row, cell] = -product


POLICY = KeyDiff
