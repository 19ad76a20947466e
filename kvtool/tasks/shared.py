"""Read each prompt only once, although several readers with different policies or budgets use it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.engine.cached_prompt import CachedPrompt
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.engine.sizes import pad
from kvtool.llama.model import Model
from kvtool.policy import Plan, Policy, Signal, State, View


@dataclass(frozen=True, slots=True)
class _Watch(Policy):
    """Policy that keeps everything, and collects the sums of attention that most policies need."""

    budget: int
    slack: int = 0

    evicts: ClassVar[bool] = False
    reads: ClassVar[Signal] = Signal.ATTENTION | Signal.SQUARES

    def plan(self, view: View, state: State) -> Plan:
        return Plan(np.ones(view.pos.shape, np.bool_))


class Shared:
    """Cache of the last prompt that was read.

    settings: settings that all readers must have. Each reader then gets the cells that it would have computed
    itself.
    """

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._last: CachedPrompt | None = None

    def whole(self, tokens: np.ndarray) -> CachedPrompt | None:
        """Read the prompt i32[n], and return a copy of its cache.

        If the prompt begins with the whole last prompt, only the rest is read. Return None if the prompt is
        empty or does not fit in the context. Raises Engine's errors.
        """
        n_ctx = min(self._settings.n_ctx or self._model.n_ctx_train, self._model.n_ctx_train)
        if not 0 < len(tokens) < n_ctx:
            return None
        last, self._last = self._last, None
        if last is None or not np.array_equal(last.tokens, tokens):
            policy = _Watch(min(pad(len(tokens) + 1), n_ctx))
            with closing(Engine(self._model, policy, self._settings)) as engine:
                n = 0
                if last and last.fits(engine.cache, tokens[: len(last.tokens)]):
                    n = last.put(engine.cache)
                    engine.signals.restore(last.signals, 0)
                # free the old cache first: otherwise both caches would be in memory
                last = None
                engine.read(tokens[n:])
                last = CachedPrompt.of(engine.cache, tokens)
        self._last = last
        return last
