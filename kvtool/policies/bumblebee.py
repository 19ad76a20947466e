"""BumbleBee: the tokens that sum up the row's keys and its attention best stay (Kumari et al., COLM 2024).

A set A of a row's tokens is worth g(A) = mixture * f(A) + (1 - mixture) * c(A), equation 4. f is facility
location over ReLU(cosine) of the keys; `-o cosine=shifted` and `absolute` are the other two of the appendix.
c is phi of the summed attention of A. Both are 0 for no token and 1 for all tokens. The paper's lambda (a
word of Python's) is our mixture; its budget tau_s is what is kept.

Streaming, Algorithm 2: of the tokens in the row the one goes that g loses least by, the oldest among
equals. All others still stand for themselves, so f loses 1 - (its nearest neighbour's similarity), divided
by the number of tokens. Offline, Algorithm 1, for a prompt that was decoded whole: the token joins the
summary that g gains most by, the newest among equals, by lazy greedy or by stochastic greedy (Mirzasoleiman
et al. 2015).

With `-o grow=10` an eviction leaves sinks, window and 10 * log(1 + n) tokens of a stream of n: section 7
proposes a summary that grows very slowly with time. The budget stays the cap, to which rows fill up before
the next eviction.

Differs from the paper: the first tokens and the newest ones are part of every summary. One decision per KV
head, on the sum over its group of query heads (the paper has no grouped queries). An eviction makes room
for `slack` tokens, one discard after the other; the paper's for one (--evict-every 1). Greedy is lazy
unless asked; the paper's runs were stochastic. Keys are those before RoPE, which the paper leaves open.
They are normalised and kept in 16 bits, so that a cosine is off by about 0.00002 and does not depend on the
order of its sum.
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
    """The set that is worth most.

    Attributes
    ----------
    window
        Newest tokens, never evicted. Default: half of what is kept.
    sinks
        First tokens, never evicted.
    mixture
        Weight of the keys' diversity in the objective, 0 to 1; the rest is attention's.
    phi
        How attention counts: "log" (of 1 + x) or the paper's "power" form.
    greedy
        How a prompt that was decoded whole is summed up: "lazy" or "stochastic".
    seed
        Another seed gives another choice of the stochastic greedy.
    similarity
        What the state holds: the matrix of all pairs as "f32" or "f16", or the keys alone, to "recompute" the
        pairs that are asked for.
    cosine
        What the similarity of two keys makes of their cosine c: "relu" (0 where c is negative), "shifted" ((1
        + c) / 2) or "absolute" (|c|).
    grow
        Above 0, the tokens kept beside sinks and window grow with the stream: this many times log(1 + its
        tokens), as long as the budget has room. 0: always as many as the budget allows.
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
        """Keys i16, attention sum f32, near f32, nearest i32, and the matrix of all pairs, if any.

        near is the similarity of the nearest neighbour, or an upper bound of it if that neighbour has gone.
        nearest is its position, or -1 if it has gone. The matrix is zero on its diagonal.
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
        # no two positions of a row are equal: the sort need not be stable
        order = np.argsort(view.pos, axis=1)
        stochastic = self.greedy == "stochastic"
        keep = np.empty(view.pos.shape, np.bool_)
        seed = seeds(self.seed, view.next, len(order))
        summarize(view.pos, order, view.keys, view.attn, *self._goal(view), stochastic, seed, keep)
        return Plan(keep)

    def _goal(self, view: View) -> tuple[int, int, int, float, bool, int]:
        """The positions to choose between, how many tokens stay, and the objective."""
        n_keep = self.n_keep
        if self.grow:
            exempt = max(self.sinks, view.pinned) + max(self.window, view.held)
            n_keep = min(n_keep, exempt + ceil(self.grow * log1p(view.next)))
        first, recent = protected(view, n_keep, self.sinks, self.window)
        return first, recent, n_keep, self.mixture, self.phi == "power", COSINES.index(self.cosine)


def _bits(state: State) -> np.ndarray:
    """The matrix as integers in the same order, i32 or u16[row, cell, cell]; no rows if there is none."""
    if len(state) == 4:
        return np.empty((0, 0, 0), np.int32)
    pairs = state[4]
    return pairs.view(np.int32) if pairs.dtype == np.float32 else pairs


POLICY = BumbleBee
