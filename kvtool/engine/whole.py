"""A prompt that one stream has read with nothing evicted, for streams of other policies to go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtool.engine.stream import Stream
from kvtool.llama.context import Context
from kvtool.policy import Rehearsal, Request, Signal

_OF_CELLS = Signal.KEYS | Signal.LENGTHS
"""What a view reads from the cache."""

_OF_LAST = Signal.LAST | Signal.RECENT | Signal.FUTURE
"""What only the last queries decide."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A prompt in a cache that holds all of it, before anything of it is evicted.

    Attributes
    ----------
    tokens
        i32[n]: the prompt.
    cells
        K and V of each layer's cells, as they are stored.
    logits
        f32[1, n_vocab]: what follows the prompt.
    request
        What the policy that read it asked of the attention.
    signals
        f32[row, n]: its signals, by their fields in a view.
    rehearsed
        The same of policies that have rehearsed the prompt, by their requests and rehearsals, and by how
        many tokens were pinned and held then.
    """

    tokens: np.ndarray
    cells: Sequence[np.ndarray]
    logits: np.ndarray
    request: Request
    signals: Mapping[str, np.ndarray]
    rehearsed: dict[tuple[Request, Rehearsal, int, int], dict[str, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, stream: Stream, tokens: np.ndarray) -> Whole:
        """The prompt i32[n], which is all that the stream has read, and of which it has evicted nothing."""
        context, n = stream.context, len(tokens)
        assert stream.n_past == stream.n_kv == n
        cells = [context.cells(layer, n) for layer in range(len(stream.layer_cells))]
        request = stream.policy.request()
        return cls(tokens, cells, context.logits()[-1:].copy(), request, stream.signals.read())

    def put(self, stream: Stream, tokens: np.ndarray) -> int:
        """Puts the first of these tokens i32[n] into a stream's empty cache. Returns how many.

        The others are to be decoded there, so that the stream has its signals: none if `signals` has them, or
        the policy rehearses; the queries that it looks at, if those are the last ones; else all, as where the
        tokens are others or the model keeps more than cells.
        """
        context, rows = stream.context, stream.rows
        n = self._n_known(stream, tokens)
        if not n:
            return 0
        assert isinstance(context, Context)
        for layer, cells in enumerate(self.cells):
            context.set_cells(layer, len(tokens), cells)
        # cells beyond these are free again
        rows.append(n)
        stream.eviction.edit(rows.live, rows.next_rot)
        if n == len(tokens):
            context.take_logits(self.logits)
        return n

    def _n_known(self, stream: Stream, tokens: np.ndarray) -> int:
        context, asked = stream.context, stream.policy.request()
        if not np.array_equal(tokens, self.tokens) or not isinstance(context, Context) or context.n_beside:
            return 0
        n = len(tokens)
        if self.has(asked) or stream.policy.rehearsal:
            return n
        if not asked.log_n and not asked.signals & ~(_OF_CELLS | _OF_LAST):
            return max(n - max(asked.n_query, 1), 0)
        return 0

    def has(self, asked: Request) -> bool:
        """Whether `signals` are what a policy with this request would have read."""
        wanted, own = asked.signals & ~_OF_CELLS, self.request
        if asked.log_n or wanted & ~own.signals:
            return False
        same_queries = not wanted & (Signal.RECENT | Signal.FUTURE) or asked.n_query == own.n_query
        same_t = not wanted & (Signal.HITS | Signal.IMPORTANT) or asked.t == own.t
        return not wanted or (asked.group == own.group and same_queries and same_t)
