"""BumbleBee: keep the tokens that best summarize the row's keys and attention (Kumari et al., COLM 2024).

The objective of a set A of a row's tokens is g(A) = mixture * f(A) + (1 - mixture) * c(A), equation 4. f is
facility location over the similarities of the keys, which are ReLU(cosine). `-o cosine=shifted` and `-o
cosine=absolute` give the two other similarities of the appendix. c is phi of the attention summed over A.
Both f and c are 0 for the empty set and 1 for all tokens. The paper's lambda is our mixture, and its budget
tau_s is the number of kept tokens.

In a stream (Algorithm 2), an eviction removes the token whose loss decreases g least, the oldest among
equals. g is computed over the tokens that are live before the eviction. Kept tokens still represent
themselves, and the evicted token is now represented by its nearest neighbour. f therefore decreases by
(1 - s) / (number of tokens), where s is the similarity of the evicted token to this neighbour.

With --prefill whole, the prompt is summarized offline (Algorithm 1). The token that raises g most is added,
the newest among equals, until the summary is full. The search is lazy or stochastic greedy (Mirzasoleiman et
al. 2015).

With `-o grow=10`, an eviction after n tokens of a stream leaves sinks, window and 10 * log(1 + n) other
tokens. Section 7 of the paper proposes a summary that grows very slowly. The budget remains the maximum, and
rows fill up to it before the next eviction.

Differs from the paper: the first tokens and the newest tokens are part of every summary. Each KV head makes
one decision, based on the attention summed over its group of query heads; the paper has no grouped queries.
An eviction discards tokens one at a time until there is room for `slack` tokens; in the paper, for one token
(--evict-every 1). Greedy is lazy by default, but the paper's runs were stochastic. The paper does not say
whether keys are taken before RoPE; here they are. Keys are normalised and rounded to 16 bits. A cosine
therefore has an error of about 0.00002, and does not depend on the order of summation.
"""

from dataclasses import dataclass
from math import ceil, inf, log1p
from typing import ClassVar

import numpy as np

from kvtool.policies._bumblebee import COSINES, discard, measure, move_pairs, seeds, summarize
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, check_kept, protected

_CHOICES = {
    "phi": ("log", "power"),
    "greedy": ("lazy", "stochastic"),
    "cosine": COSINES,
    "similarity": ("f32", "f16", "recompute"),
}


@dataclass(frozen=True, slots=True)
class BumbleBee(Policy):
    """Keep the set with the highest objective.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: half of the kept tokens.
    mixture
        Weight of the keys' diversity in the objective, from 0 to 1. Attention has the weight 1 - mixture.
    phi
        Concave function of the attention: "log", which is log(1 + x), or "power", the paper's power form.
    greedy
        Greedy algorithm that summarizes a prompt with --prefill whole: "lazy" or "stochastic".
    seed
        Seed of the stochastic greedy algorithm.
    similarity
        How to store similarities. "f32" or "f16": as a matrix of all pairs. "recompute": store only the keys,
        and compute similarities when they are needed.
    cosine
        Similarity of two keys with cosine c: "relu" (0 where c is negative), "shifted" ((1 + c) / 2) or
        "absolute" (|c|).
    grow
        0: keep as many tokens as the budget allows. Above 0: keep sinks, window and grow * log(1 + n) other
        tokens, up to the budget, where n is the number of tokens in the stream.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 4
    mixture: float = 0.3
    phi: str = "log"
    greedy: str = "lazy"
    seed: int = 0
    similarity: str = "recompute"
    cosine: str = "relu"
    grow: float = 0.0

    reads: ClassVar[Signal] = Signal.ATTENTION | Signal.KEYS
    paper: ClassVar[str] = "COLM 2024, openreview.net/forum?id=8w0RApM5yG"
    prefill: ClassVar[str] = "whole"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)
        if not 0 <= self.mixture <= 1:
            raise ValueError(f"mixture must be in 0..1, got {self.mixture}")
        if not 0 <= self.grow < inf:
            raise ValueError(f"grow must be 0 or more, and finite, got {self.grow}")
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return keys i16, attention sum f32, near f32, nearest i32, and in some cases a matrix of all pairs.

        `near` is the similarity of a token to its nearest neighbour, or an upper bound of this similarity if
        that neighbour was evicted. `nearest` is the neighbour's position, or -1 if it was evicted. The matrix
        has the similarities of all pairs, with zeros on its diagonal. similarity=recompute has no matrix.
        """
        shape = n_row, n_cell
        state = (
            np.zeros((*shape, n_dim), np.int16),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int32),
        )
        if self.similarity == "recompute":
            return state
        return *state, np.zeros((*shape, n_cell), np.float32 if self.similarity == "f32" else np.uint16)

    def observe(self, view: View, state: State) -> None:
        unit, mass, near, nearest = state[:4]
        mass[:, : view.n_kv] += view.attn
        measure(view.pos, view.keys, COSINES.index(self.cosine), unit, near, nearest, _bits(state))

    def plan(self, view: View, state: State) -> Plan:
        unit, mass, near, nearest = state[:4]
        keep = np.empty(view.pos.shape, np.bool_)
        discard(view.pos, unit, mass, _bits(state), *self._goal(view), near, nearest, keep)
        return Plan(keep)

    def move(self, state: State, source: np.ndarray) -> None:
        Policy.move(self, state[:4], source)
        if len(state) > 4:
            move_pairs(np.ascontiguousarray(source, np.int32), _bits(state))

    def compress(self, view: View) -> Plan:
        stochastic = self.greedy == "stochastic"
        keep = np.empty(view.pos.shape, np.bool_)
        seed = seeds(self.seed, view.next, len(view.pos))
        summarize(view.pos, view.order, view.keys, view.attn, *self._goal(view), stochastic, seed, keep)
        return Plan(keep)

    def _goal(self, view: View) -> tuple[int, int, int, float, bool, int]:
        """Return the range of positions to choose from, the number of tokens to keep, and the objective."""
        n_keep = self.n_keep
        if self.grow:
            exempt = max(self.sinks, view.pinned) + max(self.window, view.held)
            n_keep = min(n_keep, exempt + ceil(self.grow * log1p(view.next)))
        first, recent = protected(view, n_keep, self.sinks, self.window)
        return first, recent, n_keep, self.mixture, self.phi == "power", COSINES.index(self.cosine)


def _bits(state: State) -> np.ndarray:
    """Return the matrix as integers that sort like its floats: i32 or u16[row, cell, cell].

    The result is empty if the state has no matrix.
    """
    if len(state) == 4:
        return np.empty((0, 0, 0), np.int32)
    pairs = state[4]
    return pairs.view(np.int32) if pairs.dtype == np.float32 else pairs


POLICY = BumbleBee
