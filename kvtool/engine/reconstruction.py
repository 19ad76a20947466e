"""Reconstruction pass: a prompt in the cache is read once more, as the answer to a request to repeat it.

What is decoded for it is forgotten again; what remains are the signals of its queries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtool.engine.stream import Stream
from kvtool.engine.watched import decode_watched
from kvtool.llama.context import Context
from kvtool.policy import ReconstructionPass

_LEAST = 256
"""A prompt that leaves no room to repeat so many tokens at a time is read in segments."""


class Reconstruction:
    """Repeats what is in a stream's cache, chunk by chunk, as its policy's `ReconstructionPass` says.

    Pinned and held tokens are not repeated: they stay anyway. The held ones are the reply header; they come
    again before each chunk, so that the model seems to answer. words: the policy's.
    """

    def __init__(self, stream: Stream, words: ReconstructionPass) -> None:
        tokenize = stream.model.tokenize
        self._stream = stream
        self.words = words
        self._first, self._later = tokenize(words.first), tokenize(words.later)
        self._close = tokenize(words.close)

    @property
    def n_beside(self) -> int:
        """The most tokens that are decoded before a chunk."""
        n_header = self._stream.n_held or len(self._close)
        return max(len(self._first), len(self._later) + self.words.n_lead) + n_header

    @property
    def longest(self) -> int:
        """Tokens of the longest segment that can be repeated within the context; 0 or less: none can."""
        n_ctx = self._stream.n_ctx
        return n_ctx - self.n_beside - min(self.words.n_chunk, _LEAST, n_ctx // 4)

    def n_chunk(self, n: int) -> int:
        """Tokens that are repeated at a time, of a segment of n tokens."""
        return min(self.words.n_chunk, n, self._stream.n_ctx - self.n_beside - n)

    def read(
        self, tokens: np.ndarray, first: int, stopped: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        """Signals of a pass over the tokens from `first` on: f32[row, n_past] by their fields.

        tokens: i32[n] of the whole prompt, of which as many as are in the cache have been read. A token has
        the signals of the queries of its own chunk, and zeros if it is not repeated. The cache is then as it
        was, but for the signals, and there are no logits. Returns None if stopped, with the cache as it is.
        """
        stream, words = self._stream, self.words
        rows, context = stream.rows, stream.context
        assert isinstance(context, Context)
        end, n_chunk = rows.n_past, self.n_chunk(rows.n_past - first)
        begin, stop = max(first, stream.n_pinned), min(end, len(tokens) - stream.n_held)
        header = tokens[len(tokens) - stream.n_held :] if stream.n_held else self._close
        beside = context.fixed_state.save() if context.fixed_state else None
        # nothing has been watched so far
        signals = {name: np.zeros_like(values) for name, values in stream.signals.read().items()}
        context.watch(on=True)
        try:
            for at in range(begin, stop, n_chunk):
                chunk = slice(at, min(at + n_chunk, stop))
                lead = tokens[max(at - words.n_lead, begin) : at]
                asked = self._first if at == begin else np.concatenate([self._later, lead])
                text = np.concatenate([asked, header, tokens[chunk]])
                found = decode_watched(stream, text, 0, stopped)
                if found is None:
                    return None
                for name, values in found.items():
                    signals[name][:, chunk] = values[:, chunk]
                rows.take_back(len(text))
                stream.eviction.edit(rows.live, rows.next_rot, n_hidden=first)
                if context.fixed_state and beside:
                    context.fixed_state.restore(*beside)
        finally:
            context.watch(on=False)
        return signals
