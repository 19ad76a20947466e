"""Subtask of RULER: a text with a question about it. The text has as many pieces as fit into a length.

Each subtask defines its pieces. They are, for example, words, lines or documents.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.tasks._ruler.sources import Sources


@dataclass(frozen=True, slots=True)
class Sample:
    """Text, question and right answers.

    context: RULER's introduction, and the text.
    question: the question. It follows the text directly.
    opening: beginning of the answer: RULER's answer prefix, without the space before it.
    """

    context: str
    question: str
    opening: str
    answers: Sequence[str]

    @property
    def text(self) -> str:
        return f"{self.context}{self.question} {self.opening}"


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Request for a sample. number: index from 0. length: maximum tokens of text and answer together."""

    name: str
    number: int
    length: int
    seed: int

    def rng(self) -> random.Random:
        """Return a generator of this sample's random numbers. They are the same at each call."""
        return random.Random(f"{self.seed} {self.name} {self.length} {self.number}")


class Subtask(ABC):
    """One of RULER's tasks.

    needs: sources that the subtask reads: "words", "essays", "squad" or "hotpotqa".
    is_any: True if one of the right answers is enough.
    """

    n_max: ClassVar[int]
    is_any: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def most(self, sources: Sources) -> int:
        """Maximum number of pieces."""
        return sys.maxsize

    @abstractmethod
    def least(self, spec: SampleSpec, sources: Sources) -> int:
        """Minimum number of pieces for the question."""

    @abstractmethod
    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        """Return the sample with n pieces. It is the same at each call."""

    def longest(self, spec: SampleSpec, sources: Sources) -> Sample:
        """Return the sample with as many pieces as fit. Raises InputError if the minimum does not fit."""
        room = spec.length - self.n_max

        def n_token(n: int) -> int:
            return sources.n_token(self.sample(n, spec, sources).text)

        def fits(n: int) -> bool:
            return n_token(n) <= room

        least = self.least(spec, sources)
        if not fits(least):
            raise InputError(
                f"{spec.name} does not fit into {spec.length} tokens: it takes about "
                f"{n_token(least) + self.n_max}; choose greater lengths, or leave it out of tasks"
            )
        return self.sample(largest(fits, least, self.most(sources)), spec, sources)


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return a number n in least..most for which fits(n) is true and fits(n + 1) is false.

    If the search finds no such number, return `most`. fits(least) must be true.
    """
    low, high = least, least + 1
    while high <= most and fits(high):
        low, high = high, high + 2 * (high - least)
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
