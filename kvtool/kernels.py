"""The numba decorator, and the kernels that two or more policies or the engine use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Generic, ParamSpec, TypeVar

import numpy as np

from kvtool import ahead

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A function: from the library of kernels, or compiled by numba when it is first called."""

    def __init__(self, function: Callable[P, R], signatures: list[str], any_order: bool) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signatures = signatures
        self._function = function
        self._any_order = any_order
        self._called: Callable[P, R] | None = None
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._called is None:
            self._called = ahead.find(self.name, self.signatures) or self.compile()
        return self._called(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """What numba makes of it, from the disk cache when it is there."""
        if self._compiled is None:
            # of a kernel that it calls numba knows what only once it is compiled
            names = self._function.__globals__
            for name in self._function.__code__.co_names:
                if isinstance(called := names.get(name), Kernel):
                    names[name] = called.compile()
            self._compiled = _numba().njit(
                self.signatures,
                cache=True,
                nogil=True,
                error_model="numpy",
                fastmath={"reassoc"} if self._any_order else False,
            )(self._function)
        return self._compiled


def _numba() -> ModuleType:
    folder = str(ahead.LIBRARY.parent)
    os.environ["NUMBA_CACHE_DIR"] = folder
    import numba

    # where numba was imported before, and by its dictionary because numba makes its settings at run time
    vars(numba.config)["CACHE_DIR"] = folder
    return numba


def kernel(
    signature: str | list[str], *, any_order: bool = False
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """To be compiled for one signature, or for each of a list.

    "i4[:,::1]" is a C-contiguous matrix of int32. Outputs come last; nothing is checked inside. any_order:
    sums of floats may be taken in any order; for whole numbers, whose sums are the same in each.
    """
    signatures = [signature] if isinstance(signature, str) else signature
    return lambda function: Kernel(function, signatures, any_order)


def of_module(module: ModuleType) -> Iterator[Kernel[..., object]]:
    """The kernels that a module defines or uses."""
    return (value for value in vars(module).values() if isinstance(value, Kernel))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """u64 -> u64: one step of splitmix64 (Steele et al. 2014)."""
    # arrays throughout: NumPy warns of the overflow that a hash lives on in scalars only
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@kernel("i8(i8[::1], i8, i8)")
def nth_lowest(values: np.ndarray, n_value: int, nth: int) -> int:
    """values i64[n_value or more] -> the one with `nth` lower ones, by quickselect. Reorders the values.

    They should be different: of equal ones each is passed by itself. numpy.partition does the same, but takes
    seconds to compile.
    """
    begin, last = 0, n_value - 1
    while begin < last:
        middle = (begin + last) // 2
        # the median of three goes last, the lowest of them first
        if values[middle] < values[begin]:
            values[begin], values[middle] = values[middle], values[begin]
        if values[last] < values[begin]:
            values[begin], values[last] = values[last], values[begin]
        if values[middle] < values[last]:
            values[middle], values[last] = values[last], values[middle]
        pivot = values[last]
        middle = begin
        # each value is swapped, lower or not: a branch would be guessed wrong every other time
        for i in range(begin, last):
            value = values[i]
            values[i] = values[middle]
            values[middle] = value
            middle += value < pivot
        values[last], values[middle] = values[middle], pivot
        if nth == middle:
            break
        if nth < middle:
            last = middle - 1
        else:
            begin = middle + 1
    return int(values[nth])


@kernel("i8(i4, i4)")
def score_key(bits: int, pos: int) -> np.int64:
    """Orders tokens by score, then by position, NaN included: bits are the score's, a float32.

    No two tokens of a row have the same key, so that a row always keeps the number it should.
    """
    rank = np.int64(bits)
    if rank < 0:
        rank = -(rank & 0x7FFFFFFF)
    return (rank << 32) | pos


@kernel("void(i4[:,::1], f4[:,::1], i8, i8, i8, b1[:,::1])")
def keep_highest(
    pos: np.ndarray, score: np.ndarray, sinks: int, recent: int, n_keep: int, keep: np.ndarray
) -> None:
    """Tokens before `sinks` and from `recent` on stay, and of the others the highest scores, n_keep in all.

    pos i32[row, n], score f32[row, n or more], sinks, recent: positions -> keep b1[row, n].
    Among equal scores the newer token stays. Where more than n_keep are protected, just these stay.
    """
    n_row, n = pos.shape
    bits = score.view(np.int32)
    never = np.int64(2**63 - 1)
    keys, open_keys = np.empty(n, np.int64), np.empty(n, np.int64)
    for row in range(n_row):
        # no branches here: a cell's place says nothing about its token
        for cell in range(n):
            is_open = sinks <= pos[row, cell] < recent
            keys[cell] = score_key(bits[row, cell], pos[row, cell]) if is_open else never
        last_out = never
        if n - n_keep == 1:
            for cell in range(n):
                last_out = min(last_out, keys[cell])
        else:
            n_open = 0
            for cell in range(n):
                open_keys[n_open] = keys[cell]
                n_open += keys[cell] < never
            n_evict = min(n - n_keep, n_open)
            last_out = np.int64(nth_lowest(open_keys, n_open, n_evict - 1)) if n_evict > 0 else -never
        for cell in range(n):
            keep[row, cell] = keys[cell] > last_out or keys[cell] == never


@kernel("f8(f4[::1])")
def square_norm(key: np.ndarray) -> float:
    """key f32[n_dim] -> the sum of its squares, in float64."""
    total = 0.0
    for x in key:
        total += np.float64(x) * x
    return total


def draw(seed: int, step: int, pos: np.ndarray) -> np.ndarray:
    """A hash of (seed, step, row, pos) for every token: whole numbers below 2**24, exact as float32.

    pos i32[row, n] -> f32[row, n].
    """
    # arrays throughout: NumPy warns of the overflow that a hash lives on in scalars only
    hashed = splitmix64(np.array([seed % 2**64], np.uint64))
    hashed = splitmix64(hashed + np.uint64(step))
    hashed = splitmix64(hashed + np.arange(pos.shape[0], dtype=np.uint64))
    hashed = splitmix64(hashed[:, None] + pos.astype(np.uint64))
    return (hashed >> np.uint64(40)).astype(np.float32)


@kernel("Tuple((i8, f8))(f4[::1])")
def _top_and_log_sum(logits: np.ndarray) -> tuple[int, float]:
    """logits f32[n_vocab] -> the first index of the highest, and log(sum(exp(logit - highest)))."""
    best = 0
    for j in range(1, len(logits)):
        if logits[j] > logits[best]:
            best = j
    top = logits[best]
    total = 0.0
    for x in logits:
        total += np.exp(np.float64(x - top))
    return best, np.log(total)


@kernel("void(f4[:,::1], i4[::1], f8[::1])")
def token_nll(logits: np.ndarray, target: np.ndarray, nll: np.ndarray) -> None:
    """Negative log-likelihood in nats: logits f32[n, n_vocab], target i32[n] -> nll f64[n]."""
    for i in range(len(target)):
        best, log_sum = _top_and_log_sum(logits[i])
        nll[i] = log_sum - np.float64(logits[i, target[i]] - logits[i, best])


@kernel("void(f4[:,::1], i4[:,::1], i4[::1], f4[:,::1])")
def log_probs(logits: np.ndarray, tokens: np.ndarray, top: np.ndarray, log_p: np.ndarray) -> None:
    """logits f32[n, n_vocab], tokens i32[n, k] -> top i32[n], the likeliest (lowest among equals);
    log_p f32[n, k], the log-probabilities of the tokens, in nats."""
    n, k = tokens.shape
    for i in range(n):
        best, log_sum = _top_and_log_sum(logits[i])
        top[i] = best
        for j in range(k):
            log_p[i, j] = np.float64(logits[i, tokens[i, j]] - logits[i, best]) - log_sum


@kernel("void(f4[:,::1], i4[::1], i4[:,::1], f4[:,::1], f8[::1], f8[::1], i4[::1])")
def divergence(
    logits: np.ndarray,
    target: np.ndarray,
    tokens: np.ndarray,
    log_p: np.ndarray,
    nll: np.ndarray,
    kl: np.ndarray,
    top: np.ndarray,
) -> None:
    """The same nll, and how far predictions Q are from others P of which the likeliest tokens are known.

    logits f32[n, n_vocab] of Q, target i32[n], tokens i32[n, k], log_p f32[n, k] of P -> nll f64[n];
    kl f64[n], the divergence KL(P || Q) in nats where all other tokens count as one; top i32[n] of Q.
    """
    n, k = tokens.shape
    for i in range(n):
        best, log_sum = _top_and_log_sum(logits[i])
        nll[i] = log_sum - np.float64(logits[i, target[i]] - logits[i, best])
        top[i] = best
        total, rest_p, rest_q = 0.0, 1.0, 1.0
        for j in range(k):
            # rounded as P is, so that equal predictions have no divergence at all
            log_q = np.float32(np.float64(logits[i, tokens[i, j]] - logits[i, best]) - log_sum)
            p = np.exp(np.float64(log_p[i, j]))
            total += p * (np.float64(log_p[i, j]) - np.float64(log_q))
            rest_p -= p
            rest_q -= np.exp(np.float64(log_q))
        # what rounding may leave of nothing
        rest_p, rest_q = max(rest_p, 1e-12), max(rest_q, 1e-12)
        kl[i] = total + rest_p * np.log(rest_p / rest_q)
