"""The numba decorator, and the kernels that two or more policies or the engine use."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvtool.paths import cache_dir


def _digest() -> str:
    """A name for today's kernels: numba's cache looks at a kernel's own file only, never at its callees'."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [root / "kernels.py", root / "cells.py", *sorted((root / "policies").glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CACHE_DIR = cache_dir() / "kernels" / _digest()
os.environ["NUMBA_CACHE_DIR"] = str(CACHE_DIR)

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when it is imported)
import numpy as np  # noqa: E402

numba.config.CACHE_DIR = str(CACHE_DIR)


def kernel(signature: str):
    """Compiles for one signature at import, from the disk cache when it is there.

    "i4[:,::1]" is a C-contiguous matrix of int32. Outputs come last; nothing is checked inside.
    """
    return numba.njit(signature, cache=True, nogil=True, error_model="numpy")


@kernel("void(i4[:,::1], f4[:,::1], i8, i8, i8, b1[:,::1])")
def keep_highest(pos, score, sinks, recent, n_keep, keep):
    """Tokens before `sinks` and from `recent` on stay, and of the others the highest scores, n_keep in all.

    pos i32[row, n], score f32[row, n or more], sinks, recent: positions -> keep b1[row, n].
    Among equal scores the newer token stays. The protected cells must not be more than n_keep.
    """
    n_row, n = pos.shape
    for row in range(n_row):
        where = np.empty(n, np.int32)
        n_open = 0
        for cell in range(n):
            keep[row, cell] = True
            if sinks <= pos[row, cell] < recent:
                where[n_open] = cell
                n_open += 1
        n_evict = n - n_keep
        if n_evict <= 0:
            continue
        where = where[:n_open]
        open_score = np.empty(n_open, np.float32)
        for i in range(n_open):
            open_score[i] = score[row, where[i]]
        threshold = np.partition(open_score, n_evict - 1)[n_evict - 1]
        ties = np.empty(n_open, np.int32)
        n_tie = 0
        n_left = n_evict
        for i in range(n_open):
            if open_score[i] < threshold:
                keep[row, where[i]] = False
                n_left -= 1
            elif open_score[i] == threshold:
                ties[n_tie] = pos[row, where[i]]
                n_tie += 1
        newest_out = np.partition(ties[:n_tie], n_left - 1)[n_left - 1]
        for i in range(n_open):
            if open_score[i] == threshold and pos[row, where[i]] <= newest_out:
                keep[row, where[i]] = False
