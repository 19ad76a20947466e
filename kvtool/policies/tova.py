"""TOVA: keep the tokens that the newest query attends to most (Oren et al. 2024, arXiv:2401.06104).

The score is the newest query's attention, summed over all heads of a layer. This is the paper's mean times a
constant. Every KV head of the layer keeps the same tokens.

Differs from the paper: the newest token always stays. In the paper it competes like any other token, as with
`-o window=0`. An eviction makes room for `slack` tokens. The paper makes room for one token, as --evict-every
1 does.

Options: with `-o per=row`, every KV head decides separately, based on the attention of its group of query
heads. With `-o per=row -o heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import FLOOR, Ranked, Signal, State, View, check_choice, sum_rows


@dataclass(frozen=True, slots=True)
class TOVA(Ranked):
    """Keep the tokens with the highest attention of the newest query.

    Attributes
    ----------
    per
        "layer": the rows of a layer add their attention and keep the same tokens. "row": each row decides
        alone.
    heads
        "equal": each row keeps the same number of tokens. "adaptive": the rows of a layer share their budgets
        by need; needs per=row.
    """

    budget: int
    slack: int
    per: str = "layer"
    window: int = 1
    sinks: int = 0
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.LAST
    paper: ClassVar[str] = "arXiv:2401.06104"

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("layer", "row"))
        Ranked.__post_init__(self)

    def scores(self, view: View, state: State) -> np.ndarray:
        return sum_rows(view, view.last, self.per)


POLICY = TOVA
