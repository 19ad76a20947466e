"""Random: keep the newest tokens and a uniformly random choice of the rest.

This is a baseline: a policy's scores are useful only if they beat a random choice. Each plan draws a new
choice for every row. The random numbers are hashes of (seed, row, token, step). Therefore the policy needs no
state, and a repeated stream gives the same choice.
"""

from dataclasses import dataclass

import numpy as np

from kvtool.kernels.draw import draw
from kvtool.policy import Ranked, State, View


@dataclass(frozen=True, slots=True)
class Random(Ranked):
    """Keep a uniformly random choice.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: half of the kept tokens.
    seed
        Seed of the choice.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 0
    seed: int = 0

    def scores(self, view: View, state: State) -> np.ndarray:
        return draw(self.seed, view.next, view.pos)


POLICY = Random
