"""needle: a sentence is hidden in a long text; the answer must contain its keywords.

The task is from Kamradt 2023, "Needle In A Haystack - Pressure Testing LLMs". The needle, the question and
the instruction are the same. One thing differs: no second model judges the answer. Instead, the answer must
contain every keyword.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.tasks.haystack import Haystack

START = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct."
END = "{question} Don't give information outside the document or repeat your findings."


@dataclass(frozen=True, slots=True)
class Needle(Haystack):
    """Parameters of the task.

    Attributes
    ----------
    needle
        The hidden sentence.
    question
        The question that the hidden sentence answers.
    keywords
        Words that the answer must contain. The case is ignored.
    seed
        Seed of all random choices.
    """

    needle: str = (
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    )
    question: str = "What is the best thing to do in San Francisco?"
    keywords: tuple[str, ...] = ("sandwich", "Dolores Park")
    seed: int = 0

    source: ClassVar[str] = "Kamradt 2023"
    n_max: ClassVar[int] = 48
    chat: ClassVar[bool] = True

    def parts(self, rng: random.Random) -> tuple[str, str, str, Sequence[str]]:
        return START, self.needle, END.format(question=self.question), self.keywords


TASK = Needle
