"""Norms of keys."""

import numpy as np

from kvtool.kernels.kernel import kernel


@kernel("f8(f4[::1])")
def square_norm(key):
    """key f32[n_dim] -> the sum of its squares, in float64."""
    total = 0.0
    for x in key:
        total += np.float64(x) * x
    return total
