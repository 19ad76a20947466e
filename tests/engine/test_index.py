"""Kernels of the archive's search: products of mean keys and queries in 8 bits, and exponentials.

They give the same results as NumPy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

N_SIDE = 16


@pytest.fixture(scope="module")
def kernels(compiled):
    lib = ctypes.CDLL(str(compiled("index_kernels")))
    number, pointer = ctypes.c_int, ctypes.c_void_p
    lib.products.argtypes = [number, pointer, number, pointer, number, pointer]
    lib.products.restype = None
    lib.powers.argtypes = [number, pointer, number, ctypes.c_float, pointer, pointer, pointer]
    lib.powers.restype = None
    return lib


@pytest.fixture(params=[-1, 0, 1, 2])
def kernel(request, kernels):
    """The number of a kernel that this CPU can run."""
    if request.param >= kernels.n_kernel():
        pytest.skip("this CPU has no such instructions")
    return request.param


def products(lib, kernel, keys, query):
    out = np.empty(len(keys), np.float32)
    lib.products(
        *(kernel, keys.ctypes.data, len(keys) // N_SIDE, query.ctypes.data, keys.shape[1]), out.ctypes.data
    )
    return out


def rounded(keys, query):
    """Return the products f64[n] after rounding keys and query to 8 bits. Each vector has its own scale."""
    zero = 128
    most = np.take_along_axis(keys, np.abs(keys).argmax(axis=1)[:, None], axis=1)
    scale = -most / zero
    numbers = np.clip(_round(keys / np.where(scale == 0, 1, scale)), -zero, zero - 1) * scale
    step = np.abs(query).max() / np.float32(127)
    return numbers.astype(np.float64) @ (_round(query / step) * step).astype(np.float64)


def _round(x):
    # halves are rounded away from zero, as in C
    return np.trunc(x + np.copysign(np.float32(0.5), x))


@pytest.mark.parametrize("n_embd", [8, 64, 128, 80])
def test_products_equal_those_of_rounded_vectors(kernels, kernel, n_embd):
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((5 * N_SIDE, n_embd)).astype(np.float32)
    # dimension 3 has outliers, key 7 is zero, and keys 8 and 9 give the largest possible integer sums
    keys[:, 3] += 40
    keys[7] = 0
    keys[8], keys[9] = 1, -1
    for query in (rng.standard_normal(n_embd).astype(np.float32), np.ones(n_embd, np.float32)):
        expected = rounded(keys, query)
        assert products(kernels, kernel, keys, query) == pytest.approx(expected, rel=1e-4, abs=1e-3)
    exact = keys @ query
    assert np.corrcoef(exact, expected)[0, 1] > 0.99


@pytest.mark.parametrize("n", [1, 16, 37, 256])
def test_exponentials_and_their_sum_match_numpy(kernels, kernel, n):
    rng = np.random.default_rng(1)
    scale = 0.125
    x = np.zeros(n + 16, np.float32)
    # the highest x is so far above the rest that some exponentials underflow
    x[:n] = rng.standard_normal(n) * 100
    x[n // 2] += 500
    expected = np.exp(scale * (x[:n].astype(np.float64) - x[:n].max()))
    e, most, total = np.empty(n + 16, np.float32), np.empty(1, np.float32), np.empty(1, np.float32)
    kernels.powers(kernel, x.ctypes.data, n, scale, e.ctypes.data, most.ctypes.data, total.ctypes.data)
    assert e[:n] == pytest.approx(expected, rel=1e-5, abs=2e-38)
    assert most[0] == pytest.approx(scale * x[:n].max(), rel=1e-6)
    assert total[0] == pytest.approx(expected.sum(), rel=1e-6)
