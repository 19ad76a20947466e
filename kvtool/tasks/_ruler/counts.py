"""Counts: find the most frequent words of a list, or of a coded text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import ClassVar

from kvtool.tasks._ruler.sources import Sources
from kvtool.tasks._ruler.subtask import Sample, SampleSpec, Subtask

_LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n{text}\n"
)
_COMMON = "Question: What are the 10 most common words in the above list?"
_COMMON_ARE = "Answer: The top 10 words that appear most often in the list are:"
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {text}\n"
)
_FREQUENT = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?"
)
_FREQUENT_ARE = "Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True, slots=True)
class CommonWords(Subtask):
    """Find the ten most frequent words of a list. A piece is a distinct word.

    n_common: number of words to find.
    often: number of occurrences of each word to find.
    seldom: number of occurrences of each other word.
    """

    n_common: int = 10
    often: int = 30
    seldom: int = 3

    n_max: ClassVar[int] = 120

    @property
    def needs(self) -> tuple[str, ...]:
        return ("words",)

    def most(self, sources: Sources) -> int:
        return len(sources.all_words)

    def least(self, spec: SampleSpec, sources: Sources) -> int:
        return self.n_common + 1

    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        rng = spec.rng()
        # below 4,096 tokens RULER uses different numbers
        is_short = spec.length < 4096
        example = (20, 3, 1) if is_short else (40, 10, 3)
        often = (6, 1) if is_short else (self.often, self.seldom)
        solved, right = self._list(*example, rng, sources)
        text, common = self._list(n, *often, rng, sources)
        shown = f"{_LIST.format(text=solved)}{_COMMON} {_COMMON_ARE} {_numbered(right)}\n"
        return Sample(f"{shown}{_LIST.format(text=text)}", _COMMON, _COMMON_ARE, common)

    def _list(
        self, n: int, often: int, seldom: int, rng: random.Random, sources: Sources
    ) -> tuple[str, list[str]]:
        """Return the text of a list of n distinct words, and the common words."""
        words = rng.sample(sources.all_words, n)
        common, others = words[: self.n_common], words[self.n_common :]
        text = common * often + others * seldom
        rng.shuffle(text)
        return _numbered(text), common


@dataclass(frozen=True, slots=True)
class FrequentWords(Subtask):
    """Find the three most frequent words of a text of random words. A piece is a word of the text.

    Words are ranked by frequency. The word of rank 1 is "...". The three words to find have ranks 2 to 4. In
    a text of n words, the word of rank k appears n / (k^2 zeta(2)) times, rounded down. The exponent 2 is
    RULER's alpha.
    """

    n_letter: int = 6

    n_max: ClassVar[int] = 50

    def least(self, spec: SampleSpec, sources: Sources) -> int:
        # the rarest word to find has rank 4, and must appear at least once
        return math.ceil(_n_for(4))

    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        rng = spec.rng()
        words = ["..."]
        while len(words) < max((spec.length - self.n_max) // 50, 4):
            word = "".join(rng.choices(ascii_lowercase, k=self.n_letter))
            if word not in words:
                words.append(word)
        text = [word for k, word in enumerate(words, 1) for _ in range(int(n / _n_for(k)))]
        rng.shuffle(text)
        return Sample(_CODED.format(text=" ".join(text)), _FREQUENT, _FREQUENT_ARE, words[1:4])


def _n_for(k: int) -> float:
    """Number of words that a text needs, so that the word of rank k appears once."""
    return k**2 * math.pi**2 / 6


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
