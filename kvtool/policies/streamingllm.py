"""StreamingLLM: the first tokens and the newest ones stay (Xiao et al. 2023, arXiv:2309.17453, section 3.2).

The paper's attention sinks are our sinks, its rolling KV cache is our window. Its positions within the
cache are a setting of the engine (`--positions in-cache`).

Differs from the paper: an eviction makes room for `slack` tokens, the paper's for one (--evict-every 1).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import Ranked, State, View, check_kept


@dataclass(frozen=True, slots=True)
class StreamingLLM(Ranked):
    """The window is all that is kept besides the sinks.

    Attributes
    ----------
    sinks
        First tokens, never evicted.
    """

    budget: int
    slack: int
    sinks: int = 4

    paper: ClassVar[str] = "arXiv:2309.17453"

    def __post_init__(self) -> None:
        # at least the newest token stays beside the sinks
        check_kept(self.budget, self.slack, self.sinks, window=1, least=1)

    def scores(self, view: View, state: State) -> np.ndarray:
        # among equal scores the newer token stays
        return np.zeros(view.pos.shape, np.float32)


POLICY = StreamingLLM
