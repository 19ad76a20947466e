"""Copy of a prompt that an engine has read without evictions.

Engines with other policies can use the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvtool.engine.policy_cache import PolicyCache
from kvtool.llama.context import Context
from kvtool.llama.model import Model
from kvtool.policy import ReconstructionPass, SignalRequest, signals_where

_OF_CACHE = signals_where(lambda spec: spec.scope == "cache")
_OF_LAST = signals_where(lambda spec: spec.scope in ("newest", "n_query"))
_OF_N_QUERY = signals_where(lambda spec: spec.scope == "n_query")

Pass: TypeAlias = "tuple[SignalRequest, ReconstructionPass, int, int, int]"
"""Key of `CachedPrompt.reconstructed`.

The items are: the policy's request, its `ReconstructionPass`, the number of pinned tokens, the number of held
tokens, and the number of tokens of a chunk.
"""


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """Copy of a cache that holds a whole prompt and nothing else, with the prompt's logits and signals.

    Attributes
    ----------
    tokens
        i32[n]: the prompt.
    model, types
        The model that read the prompt, and the number formats of K and V in its cache.
    cells
        K and V of each layer's cells, as `Context.cells` returns them.
    logits
        f32[1, n_vocab]: logits after the last token of the prompt.
    request
        The signals that the policy requested when the prompt was read.
    signals
        f32[row, n]: these signals, by their field names in `View`.
    reconstructed
        Signals of the reconstruction passes over the prompt.
    """

    tokens: np.ndarray
    model: Model
    types: tuple[str, str]
    cells: Sequence[np.ndarray]
    logits: np.ndarray
    request: SignalRequest
    signals: Mapping[str, np.ndarray]
    reconstructed: dict[Pass, dict[str, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: PolicyCache, tokens: np.ndarray) -> CachedPrompt:
        """Copy the prompt i32[n] from an engine that has read nothing else and evicted nothing."""
        context, rows, n = cache.context, cache.rows, len(tokens)
        assert rows.n_past == rows.n_kv == n
        cells = [context.cells(layer, n) for layer in range(len(context.layer_cells))]
        logits = context.logits()[-1:].copy()
        request, signals = cache.policy.request(), cache.signals.read()
        return cls(tokens, context.model, context.types, cells, logits, request, signals)

    def fits(self, cache: PolicyCache, tokens: np.ndarray) -> bool:
        """True if the engine would fill the same cells by decoding tokens i32[n].

        False for a model with sliding or recurrent layers, because the state of these layers is not copied.
        Also False if the policy of either engine scales attention logits (`logn`).
        """
        context = cache.context
        return (
            np.array_equal(tokens, self.tokens)
            and isinstance(context, Context)
            and not context.fixed_state
            and (context.model, context.types) == (self.model, self.types)
            and not (cache.policy.logn or self.request.logn)
        )

    def put(self, cache: PolicyCache) -> int:
        """Copy the first n tokens of the prompt into an engine's empty cache, and return n.

        `fits` must be true for the cache. All tokens are copied if `signals` has everything that the policy
        reads, or if a reconstruction pass follows. If the policy reads only signals of the last queries, the
        tokens of these queries are not copied: the caller decodes them to compute the signals. In all other
        cases n is 0.
        """
        context, rows = cache.context, cache.rows
        n = self._n_known(cache)
        if not n:
            return 0
        assert isinstance(context, Context)
        for layer, cells in enumerate(self.cells):
            context.set_cells(layer, len(self.tokens), cells)
        # the loop above copied all cells of the prompt: free the cells after the first n
        rows.append(n)
        cache.edit(rows.live, rows.next_rot)
        if n == len(self.tokens):
            context.set_logits(self.logits)
        return n

    def _n_known(self, cache: PolicyCache) -> int:
        asked, n = cache.policy.request(), len(self.tokens)
        if self.has(asked) or cache.policy.reconstruction:
            return n
        if not asked.reads & ~(_OF_CACHE | _OF_LAST):
            return max(n - max(asked.n_query, 1), 0)
        return 0

    def has(self, asked: SignalRequest) -> bool:
        """True if `signals` has everything that a policy with this request reads."""
        wanted, known = asked.reads & ~_OF_CACHE, self.request
        if wanted & ~known.reads:
            return False
        same_queries = not wanted & _OF_N_QUERY or asked.n_query == known.n_query
        same_t = not asked.needs_t or asked.t == known.t
        return not wanted or (asked.group == known.group and same_queries and same_t)
