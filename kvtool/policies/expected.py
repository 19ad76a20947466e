"""Expected Attention: keep tokens that later queries may attend to (Devoto et al. 2025, arXiv:2510.00636).

Later queries, before RoPE, are modelled by a normal distribution with the mean and the covariance of the last
`queries` queries. RoPE's rotations are averaged over the next `ahead` positions. A key's logits then also
have a normal distribution, with mean m and variance v, so the expectation of exp(logit) is exp(m + v / 2).
For each head, the expectations are scaled to sum to 1 over the tokens after the sinks. Their average over the
group is a token's expected share of attention. The token's score is (share + `epsilon`) * (norm of its
value).

Three details follow the authors' kvpress (expected_attention_press.py): the queries and keys of sinks are
left out, the covariance is computed before RoPE, and the norm is that of the value; the paper's formula
multiplies the value by W_o first.

Differs from the paper: the paper uses the queries of the whole prompt, and kvpress uses the last queries
during generation. kvtool always uses the last queries. It stores the queries and no covariance matrix, which
would take about as much memory: `queries` is one to a few times a key's dimension. The newest tokens stay
(`window`), but the paper does not protect them. The paper's `epsilon` of 0.02 is larger than most shares if
there are a few hundred tokens. With our default of 0.001, SmolLM2's perplexity in 256 cells was lower on ten
of ten texts, by 7 % on average. The paper compresses a prompt once; kvtool compresses whenever the cache is
full.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policy import FLOOR, Ranked, Signal, State, View


@dataclass(frozen=True, slots=True)
class Expected(Ranked):
    """Keep the tokens with the highest expected attention.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: 32, or half of the kept tokens if that is
        less.
    sinks
        First tokens, never evicted. Their queries are left out of the model of later queries.
    queries
        Number of newest queries from which later queries are modelled.
    ahead
        Number of later positions over which the rotations are averaged.
    covariance
        Use the mean and the variance of the logits. If false, use only the mean.
    lengths
        Multiply scores by the norms of the values.
    epsilon
        Number that is added to a token's share of attention before it is multiplied by the norm.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 4
    queries: int = 128
    ahead: int = 512
    covariance: bool = True
    lengths: bool = True
    epsilon: float = 0.001
    heads: str = "equal"
    layers: str = "equal"
    floor: float = FLOOR

    prefill: ClassVar[str] = "whole"
    paper: ClassVar[str] = "arXiv:2510.00636"
    min_window: ClassVar[int] = 1
    max_window: ClassVar[int] = 32

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        for name in ("queries", "ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon}")

    @property
    def reads(self) -> Signal:
        return Signal.FUTURE | Signal.VALUE_NORMS if self.lengths else Signal.FUTURE

    @property
    def n_query(self) -> int:
        return self.queries

    @property
    def n_future(self) -> int:
        return self.ahead

    @property
    def n_skip(self) -> int:
        return self.sinks

    def scores(self, view: View, state: State) -> np.ndarray:
        norms, epsilon = view.value_norms, self.epsilon
        if not self.lengths:
            norms, epsilon = np.ones(view.pos.shape, np.float32), 0.0
        score = np.zeros(view.pos.shape, np.float32)
        spread = 0.5 if self.covariance else 0.0
        logits = view.future_mean, view.future_variance, spread
        _expect(view.order, view.pos, view.n_head, *logits, norms, self.sinks, epsilon, score)
        return score


@kernel("void(i8[:,::1], i4[:,::1], i4[::1], f4[:,:,::1], f4[:,:,::1], f8, f4[:,::1], i8, f8, f4[:,::1])")
def _expect(order, pos, n_head, mean, variance, spread, norms, first, epsilon, score):
    """Score the tokens from position `first` on.

    Sums start at the oldest token, so they do not depend on the order of cells. order i64[row, n]: cells,
    oldest token first. pos i32[row, n], n_head i32[row], mean and variance f32[row, n_head or more, n], norms
    and score f32[row, n]. spread: 0.5 to use the variance, 0 to ignore it.
    """
    n_row, n = order.shape
    weight, share = np.empty(n, np.float64), np.empty(n, np.float64)
    for row in range(n_row):
        begin = 0
        while begin < n and pos[row, order[row, begin]] < first:
            # skip sinks, and dead cells of a ragged row
            begin += 1
        share[:] = 0
        for head in range(n_head[row]):
            most, total = -np.inf, 0.0
            for i in range(begin, n):
                cell = order[row, i]
                weight[i] = np.float64(mean[row, head, cell]) + spread * variance[row, head, cell]
                most = max(most, weight[i])
            for i in range(begin, n):
                weight[i] = np.exp(weight[i] - most)
                total += weight[i]
            for i in range(begin, n):
                share[i] += weight[i] / total
        for i in range(begin, n):
            cell = order[row, i]
            score[row, cell] = (share[i] / n_head[row] + epsilon) * norms[row, cell]


POLICY = Expected
