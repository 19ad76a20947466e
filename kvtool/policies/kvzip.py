"""KVzip: keep the tokens needed to repeat the prompt (Kim et al. 2025, arXiv:2505.23416).

A prompt longer than the budget is decoded without evictions. Then a reconstruction pass follows: the model
gets a request to repeat the prompt, and after it the prompt again as the model's answer, in chunks of `chunk`
tokens. A token's score is the highest attention that it gets, while its chunk is repeated, from any query and
any head of the group. Queries of the request also count. The prompt is compressed once, by these scores. The
scores do not depend on later questions about the prompt.

Tokens after the prompt have no score. When the budget is full again, the prompt's tokens with the lowest
scores are evicted, and the tokens after the prompt stay, as in the paper. Tokens after the prompt are evicted
only when no token of the prompt is left, the oldest first. A prompt that fits into the budget is not
repeated, and its tokens have no scores.

The wording of the request and the 4 sinks come from kvpress.

Differs from the paper: the paper ranks all rows of all layers together. Here all rows keep the same number of
tokens, or with `-o heads=adaptive` the rows of a layer share their budgets (see kvtool/policy/ranked.py).
Attention is the model's softmax over the whole cache. If the prompt has several chunks, the paper saves time:
it computes the softmax only over a chunk and its repetition. A chunk is shorter than `chunk` if the context
does not have enough room. The paper compresses a prompt once; kvtool also evicts `slack` tokens whenever the
cache is full again. Pinned and held tokens (a system prompt, the reply header) stay, and they are not
repeated. The newest token always stays; with `-o window=0` it competes like any other token.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import FLOOR, Plan, Ranked, ReconstructionPass, Signal, State, View

_TINY = np.float32(1e-30)
"""Minimum score of a repeated token. A score of 0 marks a token without a score."""


@dataclass(frozen=True, slots=True)
class KVzip(Ranked):
    """Keep the tokens with the highest attention while the prompt is repeated.

    Attributes
    ----------
    chunk
        Number of tokens that are repeated at a time.
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
    # a score of 0 marks a token without a score
    stores_score: ClassVar[bool] = True

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
