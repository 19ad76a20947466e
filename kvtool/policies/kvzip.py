"""KVzip: keep the tokens needed to repeat the prompt (Kim et al. 2025, arXiv:2505.23416).

A prompt that is longer than the budget is decoded whole. A reconstruction pass follows: the model gets a
request to repeat the prompt, then the prompt again as its answer, in chunks of `chunk` tokens. A token's
score is the highest attention that it gets from any query of its chunk's repetition, over all heads of the
group. The prompt is compressed once by these scores, which do not depend on later questions about it.

Later tokens have no score and, as in the paper, are not evicted: when the budget is full again, the prompt's
tokens with the lowest scores are evicted. When no prompt token is left, the oldest tokens are evicted. A
prompt that fits into the budget is not repeated and has no scores.

The wording of the request and the 4 sinks come from kvpress.

Differs from the paper: all rows keep the same number of tokens, or the rows of a layer share their budgets
(`-o heads=adaptive`; kvtool/policy/ranked.py); the paper ranks all rows of all layers together. Attention is
the model's softmax over the whole cache; for a prompt of several chunks the paper computes it over only the
chunk and its repetition, to save time. A chunk is shorter if the context has no room for more. Pinned and
held tokens (a system prompt, the reply header) stay, and are not repeated. The newest token stays (`-o
window=0`: it competes like any other).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import FLOOR, Plan, Ranked, ReconstructionPass, Signal, State, View

_TINY = np.float32(1e-30)
"""Smallest score: 0 marks a token without a score."""


@dataclass(frozen=True, slots=True)
class KVzip(Ranked):
    """Keep the tokens with the highest attention while the prompt is repeated.

    Attributes
    ----------
    chunk
        Tokens repeated at a time.
    """

    budget: int
    slack: int
    chunk: int = 2048
    window: int = 1
    sinks: int = 4
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.HIGHEST
    prefill: ClassVar[str] = "whole"
    paper: ClassVar[str] = "arXiv:2505.23416"

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")

    @property
    def reconstruction(self) -> ReconstructionPass:
        return ReconstructionPass(
            first="\n\nRepeat the previous context exactly.",
            later="\n\nRepeat the part of the previous context exactly, starting with",
            n_chunk=self.chunk,
        )

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return scores f32; 0 for a token without a score."""
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view: View, state: State) -> None:
        """Do nothing: later tokens do not change the prompt's scores."""

    def compress(self, view: View) -> Plan:
        state = self.start(len(view.pos), view.n_kv, 0)
        self.adopt(view, state)
        return self.plan(view, state)

    def adopt(self, view: View, state: State) -> None:
        is_repeated = (view.pos >= view.pinned) & (view.pos < view.next - view.held)
        state[0][:, : view.n_kv] = np.where(is_repeated, np.maximum(view.highest, _TINY), 0)

    def scores(self, view: View, state: State) -> np.ndarray:
        score = state[0][:, : view.n_kv]
        return np.where(score > 0, score, np.float32(np.inf))


POLICY = KVzip
