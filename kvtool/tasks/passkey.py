"""passkey: a number is hidden in a long text; the answer must contain it.

The prompt is from Mohtashami and Jaggi 2023 (arXiv:2305.16300, appendix): an instruction, filler, the
sentence with the key, filler, and the question. One thing differs: if files are given, their text is the
filler.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.tasks.haystack import Haystack

START = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey(Haystack):
    """Parameters of the task.

    Attributes
    ----------
    digits
        Number of digits of the key.
    seed
        Seed of all random choices.
    """

    digits: int = 5
    seed: int = 0

    source: ClassVar[str] = "arXiv:2305.16300"
    needs_files: ClassVar[bool] = False
    n_max: ClassVar[int] = 16

    def __post_init__(self) -> None:
        Haystack.__post_init__(self)
        if not 1 <= self.digits <= 12:
            raise ValueError(f"digits must be in 1..12, got {self.digits}")

    def parts(self, rng: random.Random) -> tuple[str, str, str, Sequence[str]]:
        key = str(rng.randrange(10 ** (self.digits - 1), 10**self.digits))
        return START, f"The pass key is {key}. Remember it. {key} is the pass key.", QUESTION, [key]


TASK = Passkey
