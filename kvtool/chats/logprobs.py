"""How likely the model found the tokens of a text."""

from __future__ import annotations

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
    likeliest = np.argsort(-values, kind="stable")[:n]
    top = [_record(model, int(each), values) for each in likeliest]
    return {**_record(model, token, values), "top_logprobs": top}


def _record(model: Model, token: int, values: np.ndarray) -> dict[str, Any]:
    piece = model.piece(token, special=True)
    return {
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "id": token,
        "logprob": float(values[token]),
    }
