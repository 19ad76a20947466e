"""KeyDiff: keep the tokens whose keys differ most from the average (Park et al. 2025, arXiv:2504.15364).

The score of a key k is -cos(k, m), where m is the mean of k' / ||k'|| over the keys k' in the row's live
cells. The code gives 127 times this score, because it scales keys to norm 127.

Differs from the paper: keys are rounded to eight bits, and compared before RoPE, so that a key's position
makes no difference. The paper and kvpress compare keys after RoPE, without rounding. The newest tokens and
the sinks always stay. An eviction makes room for `slack` tokens. The paper evicts after each block of a
prompt, and after each token of a reply.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policies._keys import RankedKeys, UnitKeys
from kvtool.policy import State, View


@dataclass(frozen=True, slots=True)
class KeyDiff(UnitKeys, RankedKeys):
    """Keep the keys least similar to the average."""

    paper: ClassVar[str] = "arXiv:2504.15364"

    def scores(self, view: View, state: State) -> np.ndarray:
        score = np.empty(view.pos.shape, np.float32)
        _difference(state[0], score)
        return score


@kernel("void(i1[:,:,::1], f4[:,::1])", any_order=True)
def _difference(unit, score):
    """Score each key: minus its dot product with the sum of the row's keys, divided by the norm of the sum.

    Without this division, the scores of rows that share a budget would not be comparable.

    unit i8[row, n or more, n_dim]: the scaled keys. score f32[row, n].
    """
    n_row, n = score.shape
    n_dim = unit.shape[2]
    total, wide = np.empty(n_dim, np.int32), np.empty(n_dim, np.float64)
    for row in range(n_row):
        total[:] = 0
        for cell in range(n):
            for dim in range(n_dim):
                total[dim] += unit[row, cell, dim]
        wide[:] = total
        square = 0.0
        for dim in range(n_dim):
            square += wide[dim] * wide[dim]
        # the sum has integers, so its norm is 0 or at least 1
        norm = max(np.sqrt(square), 1.0)
        for cell in range(n):
            product = 0.0
            for dim in range(n_dim):
                product += wide[dim] * unit[row, cell, dim]
            score[row, cell] = -product / norm


POLICY = KeyDiff
