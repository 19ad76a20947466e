"""Perplexity: quality of a model's predictions of a text under a policy.

There are two ways. `stream` streams the text through one cache and scores every token after the first.
`windows` scores independent pieces of the text, as llama.cpp's llama-perplexity does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.kernels.likelihood import token_nll
from kvtool.llama.cache.decoder import check_finite

Progress = Callable[[np.ndarray], None]
"""Function to call after each batch, with the nll f64[n] of the tokens that were scored."""

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of logits f32[n, n_vocab] and the actual next tokens i32[n]. It returns their nll f64[n]."""


def nll_of(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the nll f64[n], in nats, of the actual next tokens i32[n] under logits f32[n, n_vocab]."""
    nll = np.empty(len(target))
    token_nll(logits, np.ascontiguousarray(target), nll)
    return nll


def stream(
    engine: Engine, tokens: np.ndarray, progress: Progress = lambda nll: None, score: Score = nll_of
) -> np.ndarray:
    """Stream tokens i32[n] through the engine's cache. Return the nll f64[n - 1] of all but the first token.

    No batch is larger than the budget, so evictions follow the policy's schedule exactly.
    """
    parts = [np.empty(0)]
    for nll in steps(engine, tokens, score):
        parts.append(nll)
        progress(nll)
    return np.concatenate(parts)


def steps(engine: Engine, tokens: np.ndarray, score: Score = nll_of) -> Iterator[np.ndarray]:
    """Yield the result of `stream`, batch by batch."""
    for part in engine.steps(tokens):
        # like the engine, accept lists and other types of integers
        target = np.asarray(tokens[part.start + 1 : part.stop + 1], np.int32)
        nll = score(engine.context.logits()[: len(target)], target)
        check_finite(nll, engine.context)
        yield nll


def windows(
    engine: Engine,
    tokens: np.ndarray,
    n_window: int,
    progress: Progress = lambda nll: None,
    score: Score = nll_of,
) -> np.ndarray:
    """Score independent pieces of n_window tokens, each in an empty cache. Return all nll in order.

    The pieces follow each other, and the second half of each piece is scored. If the model uses a BOS token,
    it replaces the first token of each piece. An incomplete piece at the end is left out. All of this is as
    in llama-perplexity.
    """
    parts = [np.empty(0)]
    for start in range(0, len(tokens) - n_window + 1, n_window):
        window = tokens[start : start + n_window].copy()
        if engine.model.adds_bos:
            window[0] = engine.model.bos
        engine.reset()
        parts.append(stream(engine, window, score=score)[n_window // 2 :])
        progress(parts[-1])
    return np.concatenate(parts)
