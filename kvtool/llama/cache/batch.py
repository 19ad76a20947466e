"""Input of one decode: tokens in arrays that llama.cpp reads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvtool.llama.libllama.bindings import api


class Batch:
    """Up to n tokens for llama_decode.

    raw: the llama_batch struct, which points into this object's arrays.
    """

    def __init__(self, n: int) -> None:
        self._tokens, self._pos, self._seqs = np.zeros((3, n), np.int32)
        self._wants = np.zeros(n, np.int8)
        self._order = np.arange(n, dtype=np.int32)
        # llama.cpp reads an array of sequence ids for each token; here each array has one id
        self._n_seq = np.ones(n, np.int32)
        self._where = self._seqs.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        arrays: dict[str, np.ndarray] = {"token": self._tokens, "pos": self._pos, "logits": self._wants}
        arrays |= {"n_seq_id": self._n_seq, "seq_id": self._where}
        self.raw: Any = api.llama_batch()
        for name, array in arrays.items():
            kind = type(getattr(self.raw, name))
            setattr(self.raw, name, ctypes.cast(array.ctypes.data, kind))

    def clear(self) -> None:
        self.raw.n_tokens = 0

    def add(self, tokens: np.ndarray, pos_0: int, n_output: int, seq: int = 0) -> None:
        """Add tokens i32[n] of a sequence, at pos_0, pos_0 + 1, ...; the last n_output get logits."""
        first, n = self.raw.n_tokens, len(tokens)
        end = first + n
        self.raw.n_tokens = end
        self._tokens[first:end] = tokens
        self._pos[first:end] = self._order[:n] + pos_0
        self._seqs[first:end] = seq
        self._wants[first:end] = 0
        self._wants[end - n_output : end] = 1
