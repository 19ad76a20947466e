"""llama.cpp's candidates: tokens with their logits, which samplers change, order and choose from."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvtool.llama.library import api

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def candidates(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """llama.cpp's records of tokens i32[n] with logits f32[n]."""
    found = np.zeros(len(tokens), _CANDIDATE)
    found["id"], found["logit"] = tokens, logits
    return found


def apply(sampler: Any, found: np.ndarray) -> int:
    """Changes the candidates in place; returns which is selected, -1 if none is."""
    data = found.ctypes.data_as(api.llama_token_data_p)
    array = api.llama_token_data_array(data, len(found), -1, False)
    api.llama_sampler_apply(sampler, ctypes.byref(array))
    return int(array.selected)
