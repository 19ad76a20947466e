"""KeyDiff: keep the tokens whose keys differ most from the average (Park et al. 2025, arXiv:2504.15364).

The score is -cos(k, mean of k' / ||k'||) over the live cells k' of the row. The norm of the mean is left out:
it is the same for all cells.

Differs from the paper: keys are compared before RoPE, where equal keys are equal at every position; the paper
(and kvpress) compares them after it. The newest tokens and the sinks always stay.

Option: the rows of a layer share its budget as in Ada-KV (`heads=adaptive`; kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.norm import normalise
from kvtool.policies._keys import RankedKeys
from kvtool.policy import State, View


@dataclass(frozen=True, slots=True)
class KeyDiff(RankedKeys):
    """Keep the keys least similar to the average."""

    paper: ClassVar[str] = "arXiv:2504.15364"

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return keys scaled to norm 127, i8[row, n_cell, n_dim]: half the bytes of a key in an f16 cache.

        Integer sums do not depend on their order.
        """
        return (np.zeros((n_row, n_cell, n_dim), np.int8),)

    def observe(self, view: View, state: State) -> None:
        normalise(view.keys, view.new_cells, state[0])

    def scores(self, view: View, state: State) -> np.ndarray:
        score = np.empty(view.pos.shape, np.float32)
        _difference(state[0], score)
        return score


@kernel("void(i1[:,:,::1], f4[:,::1])", any_order=True)
def _difference(unit, score):
    """unit i8[row, n or more, n_dim] -> score f32[row, n]: minus a key's dot product with all keys' sum."""
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
