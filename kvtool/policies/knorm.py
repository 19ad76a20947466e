"""Knorm: keep the tokens whose keys have small norms (Devoto et al. 2024, arXiv:2406.11430).

The score is -||k||: keys with a small L2 norm receive the most attention. Keys are read before RoPE, which
does not change their norm.

Differs from the paper: the newest tokens and the sinks always stay. kvtool compresses every layer. The
authors' programs (github.com/alessiodevoto/l2compress) leave out layer 0, and some of them also layers 1 and
12. kvtool compresses whenever the cache is full. Their programs for language modelling compress a cache that
is too long after each token, and their programs for retrieval compress a prompt once.

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
    # the score is -||k||^2, which ranks keys in the same order as -||k||
    stores_score: ClassVar[bool] = True

    def observe(self, view: View, state: State) -> None:
        _shortness(view.keys, view.new_cells, state[0])

    def scores(self, view: View, state: State) -> np.ndarray:
        return state[0]


@kernel("void(f4[:,:,::1], i8[::1], f4[:,::1])")
def _shortness(keys, first, score):
    """Score the new keys of each row. They belong to consecutive cells, from cell `first` on.

    keys f32[row, n_new, n_dim], first i64[row], score f32[row, n or more].
    """
    n_row, n_new, _ = keys.shape
    for row in range(n_row):
        for i in range(n_new):
            score[row, first[row] + i] = -square_norm(keys[row, i])


POLICY = Knorm
