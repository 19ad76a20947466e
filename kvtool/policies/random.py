"""Random: the newest tokens and a uniformly random choice of the others stay.

The baseline that a score must beat. Each plan draws a new choice for every row. The draw is a hash of
(seed, row, token, step): a stream can be repeated, and nothing has to be remembered.
"""

from dataclasses import dataclass

import numpy as np

from kvtool.kernels.draw import draw
from kvtool.policy import Ranked, State, View


@dataclass(frozen=True, slots=True)
class Random(Ranked):
    """A uniformly random choice.

    Attributes
    ----------
    window
        Newest tokens, never evicted. Default: half of what is kept.
    sinks
        First tokens, never evicted.
    seed
        Another seed gives another choice.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 0
    seed: int = 0

    def scores(self, view: View, state: State) -> np.ndarray:
        return draw(self.seed, view.next, view.pos)


POLICY = Random
