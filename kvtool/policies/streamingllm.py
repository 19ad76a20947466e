"""StreamingLLM: the first tokens and the newest ones stay (Xiao et al. 2023, arXiv:2309.17453, section 3.2).

The paper's attention sinks are our sinks, its rolling KV cache is our window. Its positions within the
cache are not a policy's matter.

Differs from the paper: an eviction makes room for `slack` tokens, the paper's for one (--evict-every 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import Plan, Policy, State, View, check_kept, keep_ranked


@dataclass(frozen=True, slots=True)
class StreamingLLM(Policy):
    """sinks: first tokens, never evicted; the window is all the rest."""

    budget: int
    slack: int
    sinks: int = 4

    paper: ClassVar[str] = "arXiv:2309.17453"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, window=1)

    def plan(self, view: View, state: State) -> Plan:
        # among equal scores the newer token stays
        equal = np.zeros(view.pos.shape, np.float32)
        return Plan(keep_ranked(view, equal, self.budget - self.slack, self.sinks, window=0))


POLICY = StreamingLLM
