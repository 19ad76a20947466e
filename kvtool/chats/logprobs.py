"""Log-probabilities of a text's tokens, as OpenAI's API returns them."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from kvtool.llama.cache.decoder import check_finite
from kvtool.llama.loaded.model import Model

_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability of a token whose probability is 0, because JSON has no infinity."""


def logprobs(model: Model, logits: np.ndarray, token: int, n: int) -> dict[str, Any]:
    """Return the record of a token in OpenAI's format, plus the token's id. logits: f32[n_vocab].

    Log-probabilities are in nats. They come from the model's logits, before any sampler changes them.
    n: number of most likely tokens to list. Among equally likely tokens the lower id comes first. Raises
    ModelError if a logit is NaN.
    """
    # a NaN anywhere makes the maximum NaN
    highest = float(logits.max())
    check_finite(highest)
    # in double precision, so that a sum over the vocabulary is exact enough
    shifted = logits.astype(np.float64) - highest
    values = shifted - np.log(np.exp(shifted).sum())
    # sort only tokens that may be among the n most likely: sorting a whole vocabulary takes long
    least = np.partition(values, -n)[-n] if 0 < n < len(values) else -np.inf
    likely = np.flatnonzero(values >= least)
    likeliest = likely[np.argsort(-values[likely], kind="stable")[:n]] if n else ()
    top = [_record(model, int(likely_token), values) for likely_token in likeliest]
    return {**_record(model, token, values), "top_logprobs": top}


def unknown(model: Model, token: int) -> dict[str, Any]:
    """Return the record of a text's first token, without a probability: the model does not predict it."""
    return {**_record(model, token, None), "top_logprobs": None}


def _record(model: Model, token: int, values: np.ndarray | None) -> dict[str, Any]:
    piece = model.piece(token, special=True)
    return {
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "id": token,
        "logprob": None if values is None else max(float(values[token]), _IMPOSSIBLE),
    }


class Offsets:
    """Offsets of tokens in a text, in characters.

    start: offset of the first token. It is negative if the tokens begin with characters that are not in the
    text.
    """

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """Return the offset of the next token. piece: bytes of that token."""
        at = max(self._at, 0)
        self._at += len(self._decoder.decode(piece))
        return at
