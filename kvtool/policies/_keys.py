"""Base of the policies that rank tokens only by their keys."""

from dataclasses import dataclass
from typing import ClassVar

from kvtool.policy import FLOOR, Ranked, Signal


@dataclass(frozen=True, slots=True)
class RankedKeys(Ranked):
    """Rank tokens by a score of their keys before RoPE.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room; 1 or more.
    """

    budget: int
    slack: int
    sinks: int = 4
    window: int = 1
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.KEYS
    min_window: ClassVar[int] = 1
