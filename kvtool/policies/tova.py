"""TOVA: the tokens that the newest query attends to most stay (Oren et al. 2024, arXiv:2401.06104).

The score is the last attention summed over all heads of a layer (the paper's mean, times a constant), so
that every KV head of the layer keeps the same tokens.

Differs from the paper: the newest token always stays, the paper's competes like any other (`-o window=0`);
an eviction makes room for `slack` tokens, the paper's for one (--evict-every 1). With `-o per=row` every KV
head decides on its own, on its group of query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, check_kept, keep_ranked, sum_rows

_PER = ("layer", "row")


@dataclass(frozen=True, slots=True)
class TOVA(Policy):
    """per: whose attention decides, "layer" or "row".

    window: newest tokens, never evicted. sinks: first tokens, too.
    """

    budget: int
    slack: int
    per: str = "layer"
    window: int = 1
    sinks: int = 0

    reads: ClassVar[Signal] = Signal.LAST
    paper: ClassVar[str] = "arXiv:2401.06104"

    def __post_init__(self) -> None:
        check_choice("per", self.per, _PER)
        check_kept(self.budget, self.slack, self.sinks, self.window)

    def plan(self, view: View, state: State) -> Plan:
        score = sum_rows(view, view.last, self.per)
        n_keep = self.budget - self.slack
        return Plan(keep_ranked(view, score, n_keep, self.sinks, self.window))


POLICY = TOVA
