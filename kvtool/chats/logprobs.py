"""How likely the model found the tokens of a text."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from kvtool.llama.model import Model


def logprobs(model: Model, logits: np.ndarray, token: int, n: int) -> dict[str, Any]:
    """What OpenAI's interface says of a token, and its number, by logits f32[n_vocab].

    These are the model's own log-probabilities in nats, before any sampler changes them. n: how many of the
    likeliest tokens to list; among equals the lower number is first.
    """
    # in double precision, so that a sum over the vocabulary is exact enough
    shifted = logits.astype(np.float64) - float(logits.max())
    values = shifted - np.log(np.exp(shifted).sum())
    # a whole vocabulary takes long to sort
    least = np.partition(values, -n)[-n] if 0 < n < len(values) else -np.inf
    likely = np.flatnonzero(values >= least)
    likeliest = likely[np.argsort(-values[likely], kind="stable")[:n]] if n else ()
    top = [_record(model, int(each), values) for each in likeliest]
    return {**_record(model, token, values), "top_logprobs": top}


def unknown(model: Model, token: int) -> dict[str, Any]:
    """The same of a text's first token, which nothing predicts."""
    return {**_record(model, token, None), "top_logprobs": None}


def _record(model: Model, token: int, values: np.ndarray | None) -> dict[str, Any]:
    piece = model.piece(token, special=True)
    return {
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "id": token,
        "logprob": None if values is None else float(values[token]),
    }


class Offsets:
    """Where tokens begin in a text, in characters. start: of the first; below 0 for what the text lacks."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """Where the next token begins, whose text this is."""
        at = max(self._at, 0)
        self._at += len(self._decoder.decode(piece))
        return at
