"""Norms of keys."""

import numpy as np

from kvtool.kernels.kernel import kernel


@kernel("f8(f4[::1])")
def square_norm(key):
    """Sum of squares of key f32[n_dim], in float64."""
    total = 0.0
    for x in key:
        total += np.float64(x) * x
    return total


@kernel("void(f4[:,:,::1], i8[::1], i1[:,:,::1])")
def normalise(keys, first, unit):
    """Scale each key to norm 127, and round it to int8. A zero key stays zero.

    keys: f32[row, n_new, n_dim], of n_new consecutive cells in each row. first: i64[row], index of the first
    of these cells. unit: i8[row, cell, n_dim], the output.
    """
    n_row, n_new, n_dim = keys.shape
    for row in range(n_row):
        for i in range(n_new):
            norm = np.sqrt(square_norm(keys[row, i]))
            scale = 127 / norm if norm > 0 else 0.0
            for dim in range(n_dim):
                unit[row, first[row] + i, dim] = np.int8(np.rint(keys[row, i, dim] * scale))
