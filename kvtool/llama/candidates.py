"""llama.cpp's candidates: tokens with their logits, which samplers change, order and choose from."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvtool.llama.library import api

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def candidates(logits: np.ndarray, fits: np.ndarray | None = None) -> np.ndarray:
    """llama.cpp's records of tokens, with their logits of f32[n_vocab].

    fits: b1[n_vocab], the tokens to take; None for all.
    """
    tokens = np.arange(len(logits)) if fits is None else np.flatnonzero(fits)
    found = np.zeros(len(tokens), _CANDIDATE)
    found["id"], found["logit"] = tokens, logits if fits is None else logits[tokens]
    return found


def apply(sampler: Any, found: np.ndarray) -> int:
    """Changes the candidates in place; returns which is selected, -1 if none is."""
    data = found.ctypes.data_as(api.llama_token_data_p)
    array = api.llama_token_data_array(data, len(found), -1, False)
    api.llama_sampler_apply(sampler, ctypes.byref(array))
    return int(array.selected)
