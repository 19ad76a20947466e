"""llama.cpp's candidates: an array of tokens with logits, which samplers change, sort and choose from."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvtool.llama.library import api

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def candidates(logits: np.ndarray, fits: np.ndarray | None = None) -> np.ndarray:
    """Return candidates for the logits f32[n_vocab].

    fits: b1[n_vocab], True for the tokens to include. None to include all tokens.
    """
    tokens = np.arange(len(logits)) if fits is None else np.flatnonzero(fits)
    records = np.zeros(len(tokens), _CANDIDATE)
    records["id"], records["logit"] = tokens, logits if fits is None else logits[tokens]
    return records


def apply(sampler: Any, records: np.ndarray) -> int:
    """Apply a sampler to candidates in place. Return the selected index; -1 if nothing is selected."""
    data = records.ctypes.data_as(api.llama_token_data_p)
    array = api.llama_token_data_array(data, len(records), -1, False)
    api.llama_sampler_apply(sampler, ctypes.byref(array))
    return int(array.selected)
