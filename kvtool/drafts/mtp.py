"""Draft tokens from the model's own layers for multi-token prediction (MTP)."""

from __future__ import annotations

from array import array
from itertools import count

import numpy as np

from kvtool.drafts.model import likely_tokens
from kvtool.engine.loop import Engine
from kvtool.engine.settings import MAX_DRAFT
from kvtool.llama.cache.mtp import MtpContext, output_hidden, read_hidden

N_CELL = 512
"""Cells of the MTP layers' cache."""

_N_ROW = N_CELL - MAX_DRAFT
_N_FIRST, _N_NEWEST = 4, 256
"""When `MtpDraft` has `_N_ROW` rows, it keeps only the first `_N_FIRST` and the newest `_N_NEWEST` rows."""

_N_BATCH = 128
"""Maximum number of tokens that the MTP layers read at once."""


class MtpDraft:
    """Drafts tokens for an engine with MTP layers, which read the engine's hidden states. A `Source`.

    The MTP layers read rows. A row has the hidden state of a token of the stream, and the token after it.
    Only the stream's first and newest tokens have rows. Row i is in cell i of the MTP layers' cache. If
    tokens of the stream are dropped, their rows and cells are also dropped. If there are too many rows, the
    rows in the middle are dropped, and the MTP layers read the newest rows again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._target = engine, engine.context
        self._context = MtpContext(self._target, N_CELL, _N_BATCH, engine.settings.n_threads)
        output_hidden(self._target, every=True)
        engine.after_decode = self._note
        self._stream = array("i")
        # the hidden state of each row, and its token's position in the stream
        self._hidden = np.empty((_N_ROW, self._context.hidden.shape[1]), np.float32)
        self._pos = np.empty(_N_ROW, np.int64)
        # `_n_row`: number of rows. `_n_read`: number of rows that the MTP layers have read into their cache
        self._n_row = self._n_read = 0

    def close(self) -> None:
        """Free the MTP layers' cache."""
        self._engine.after_decode = None
        self._context.close()

    @property
    def n(self) -> int:
        return len(self._stream)

    def cut(self, n: int) -> None:
        del self._stream[n:]
        self._keep(n)
        # the row of token n - 1 must be read again: it was read together with token n, which is now dropped
        self._n_read = min(self._n_read, int(np.searchsorted(self._pos[: self._n_row], n - 1)))

    def add(self, tokens: np.ndarray) -> None:
        self._stream.frombytes(tokens.astype(np.int32).tobytes())

    def guess(self, n: int) -> np.ndarray:
        """Return at most n draft tokens i32[n]. See `likely_tokens`.

        Returns no tokens if the hidden state of the second newest token is unknown, for example because the
        cells of the text were copied from another stream.
        """
        context, last = self._context, self._n_row - 1
        if last < 0 or self._pos[last] != len(self._stream) - 2:
            return np.empty(0, np.int32)
        # remove the cells of earlier draft tokens. Also remove the newest row's cell: the row is read again,
        # because its logits are needed
        at = min(self._n_read, last)
        context.remove(at, N_CELL)
        tokens = np.frombuffer(self._stream, np.int32)[self._pos[at : last + 1] + 1]
        for first in range(at, last, _N_BATCH):
            end = min(first + _N_BATCH, last)
            context.read(tokens[first - at : end - at], self._hidden[first:end], first)
        context.step(tokens[-1], self._hidden[last:], last)
        self._n_read = last + 1
        positions = count(last + 1)
        return likely_tokens(context, lambda token: context.step(token, context.hidden, next(positions)), n)

    def _note(self, n_past: int, n: int) -> None:
        """Store the hidden states of n tokens that were decoded after the stream's first n_past tokens."""
        self._keep(n_past)
        if not self._target.has_own_logits:
            # the tokens were decoded in another context, together with other streams, so there are no hidden
            # states here
            return
        done = 0
        while done < n:
            if self._n_row == _N_ROW:
                self._drop_middle()
            end = min(self._n_row + n - done, _N_ROW)
            read_hidden(self._target, done, self._hidden[self._n_row : end])
            self._pos[self._n_row : end] = np.arange(end - self._n_row) + n_past + done
            done += end - self._n_row
            self._n_row = end

    def _keep(self, n: int) -> None:
        """Drop the rows of all but the stream's first n tokens."""
        self._n_row = int(np.searchsorted(self._pos[: self._n_row], n))
        self._n_read = min(self._n_read, self._n_row)

    def _drop_middle(self) -> None:
        kept = np.r_[:_N_FIRST, self._n_row - _N_NEWEST : self._n_row]
        self._hidden[: len(kept)], self._pos[: len(kept)] = self._hidden[kept], self._pos[kept]
        self._n_row, self._n_read = len(kept), min(self._n_read, _N_FIRST)
