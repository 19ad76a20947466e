"""Reads each prompt once, for readers of several policies and budgets."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.engine.stream import pad
from kvtool.engine.whole import Whole
from kvtool.llama.model import Model
from kvtool.policy import Plan, Policy, Signal, State, View


@dataclass(frozen=True, slots=True)
class _Watch(Policy):
    """Keeps everything, and reads the sums that policies want most often."""

    budget: int
    slack: int = 0

    evicts: ClassVar[bool] = False
    reads: ClassVar[Signal] = Signal.ATTENTION | Signal.SQUARES

    def plan(self, view: View, state: State) -> Plan:
        return Plan(np.ones(view.pos.shape, np.bool_))


class Shared:
    """The last prompt that was read, and a way to read another one.

    settings: the readers' own, so that the cells are those that each of them would have read.
    """

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._last: Whole | None = None

    def whole(self, tokens: np.ndarray) -> Whole | None:
        """The prompt i32[n]. What the last one had at its beginning, all of it, is not read again.

        None for an empty prompt, and for one that is longer than the context. Raises what Engine raises.
        """
        n_ctx = min(self._settings.n_ctx or self._model.n_ctx_train, self._model.n_ctx_train)
        if not 0 < len(tokens) < n_ctx:
            return None
        last, self._last = self._last, None
        if last is None or not np.array_equal(last.tokens, tokens):
            policy = _Watch(min(pad(len(tokens) + 1), n_ctx))
            with closing(Engine(self._model, policy, self._settings)) as engine:
                n = 0
                if last and last.fits(engine, tokens[: len(last.tokens)]):
                    n = last.put(engine)
                    engine.signals.restore(last.signals, 0)
                # two would be in memory else
                last = None
                engine.read(tokens[n:])
                last = Whole.of(engine, tokens)
        self._last = last
        return last
