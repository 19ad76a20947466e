"""How well a model under a policy foretells a text.

Two readings: the text streamed through one cache, every token after the first scored; and
independent windows, as llama.cpp's own llama-perplexity reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.kernels.likelihood import token_nll

Progress = Callable[[np.ndarray], None]
"""Called after each step with the nll f64[n] of the tokens it scored."""


Score = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Logits f32[n, n_vocab] and the tokens that came i32[n] to their nll f64[n]."""


def nll_of(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The nll f64[n] of the tokens i32[n] that came, in nats, from logits f32[n, n_vocab]."""
    nll = np.empty(len(target))
    token_nll(logits, np.ascontiguousarray(target), nll)
    return nll


def stream(
    engine: Engine, tokens: np.ndarray, progress: Progress | None = None, score: Score = nll_of
) -> np.ndarray:
    """The nll f64[n - 1] of every token i32[n] but the first, all through the engine's one cache.

    No step goes over the budget, so that no eviction is late: exactly the policy's own schedule.
    """
    parts = [np.empty(0)]
    for nll in steps(engine, tokens, score):
        parts.append(nll)
        if progress:
            progress(nll)
    return np.concatenate(parts)


def steps(engine: Engine, tokens: np.ndarray, score: Score = nll_of) -> Iterator[np.ndarray]:
    """The same, step by step."""
    at = 0
    while at < len(tokens):
        n = min(engine.room(), engine.n_until_plan, len(tokens) - at)
        engine.step(tokens[at : at + n], n)
        target = tokens[at + 1 : at + 1 + n]
        yield score(engine.context.logits()[: len(target)], target)
        at += n


def windows(
    engine: Engine,
    tokens: np.ndarray,
    n_window: int,
    stride: int | None = None,
    progress: Progress | None = None,
    score: Score = nll_of,
) -> np.ndarray:
    """The nll of independent windows, one after the other, each in an empty cache.

    Without a stride windows follow each other and the second half of each is scored, with one they start
    that far apart and the last `stride` tokens are. Where the model wants a BOS token, it takes the place
    of each window's first token, but not with a stride. All of this as llama-perplexity does it; an
    incomplete window at the end is left out.
    """
    if stride:
        first, starts = n_window - stride - 1, range(0, len(tokens) - n_window, stride)
    else:
        first, starts = n_window // 2, range(0, len(tokens) - n_window + 1, n_window)
    parts = [np.empty(0)]
    for start in starts:
        window = tokens[start : start + n_window].copy()
        if engine.model.adds_bos and not stride:
            window[0] = engine.model.bos
        engine.reset()
        nll = stream(engine, window, score=score)[first:]
        parts.append(nll)
        if progress:
            progress(nll)
    return np.concatenate(parts)
