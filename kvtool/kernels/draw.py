"""Random numbers that depend only on seed, step, row and position."""

import numpy as np


def splitmix64(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele et al. 2014): u64 -> u64."""
    # x must be an array, because NumPy warns if a scalar overflows, and a hash overflows on purpose
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hash_rows(seed: int, step: int, n_row: int) -> np.ndarray:
    """Hash (seed, step, row) for every row: u64[row]."""
    hashed = splitmix64(np.array([seed % 2**64], np.uint64))
    hashed = splitmix64(hashed + np.uint64(step))
    return splitmix64(hashed + np.arange(n_row, dtype=np.uint64))


def draw(seed: int, step: int, pos: np.ndarray) -> np.ndarray:
    """Hash (seed, step, row, pos) for every token: pos i32[row, n] -> f32[row, n].

    The results are integers below 2**24, which float32 holds exactly.
    """
    hashed = splitmix64(hash_rows(seed, step, pos.shape[0])[:, None] + pos.astype(np.uint64))
    return (hashed >> np.uint64(40)).astype(np.float32)
