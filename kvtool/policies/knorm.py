"""Knorm: keep the tokens whose keys have small norms (Devoto et al. 2024, arXiv:2406.11430).

The score is -||k||: keys with a small L2 norm receive the most attention. Keys are read before RoPE, which
does not change their norm.

Differs from the paper: the newest tokens and the sinks always stay. The paper compresses a prompt once;
kvtool does the same whenever the cache is full.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.norm import square_norm
from kvtool.policies._keys import RankedKeys
from kvtool.policy import State, View


@dataclass(frozen=True, slots=True)
class Knorm(RankedKeys):
    """Keep the keys with the smallest norms."""

    paper: ClassVar[str] = "arXiv:2406.11430"

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return a score f32 for each cell: -||k||^2, which gives the same ranking of keys as -||k||."""
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view: View, state: State) -> None:
        _shortness(view.keys, view.new_cells, state[0])

    def scores(self, view: View, state: State) -> np.ndarray:
        return state[0]


@kernel("void(f4[:,:,::1], i8[::1], f4[:,::1])")
def _shortness(keys, first, score):
    """Score the new keys: keys f32[row, n_new, n_dim] -> score f32[row, n or more].

    A row's new keys belong to n_new consecutive cells. first i64[row]: the index of the first of these cells.
    """
    n_row, n_new, _ = keys.shape
    for row in range(n_row):
        for i in range(n_new):
            score[row, first[row] + i] = -square_norm(keys[row, i])


POLICY = Knorm
