"""Needles: sentences with a key and its value, hidden in a text; the question asks for some keys' values."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.tasks._ruler.sources import Sources
from kvtool.tasks._ruler.subtask import Sample, SampleSpec, Subtask
from kvtool.tasks.haystack import FILLER, sentences

_CONTEXT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{text}\n"
)
_QUESTION = "What {are_all} the special magic {kind} for {keys} mentioned in the provided text?"
_OPENING = "The special magic {kind} for {keys} mentioned in the provided text {are}"
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."

_SEVERAL = {"some": "Some", "are": "are", "are_all": "are all"}
_ONE = {"some": "A", "are": "is", "are_all": "is"}

_DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Possible places of needles in an essay, in percent of its sentences."""


@dataclass(frozen=True, slots=True)
class Needles(Subtask):
    """Parameters of a kind of needles.

    Attributes
    ----------
    haystack
        Text around the needles. "noise" repeats a line with passkey's five sentences; a piece is a line.
        "essay" is made of Paul Graham's essays; a piece is a word. "needle" is made of other needles; a piece
        is a needle.
    keys
        Kind of keys: "words" are an adjective and a noun, "uuids" are random UUIDs.
    values
        Kind of values: "numbers" of seven digits, or "uuids".
    n_key
        Number of hidden keys. Needles of the haystack are not counted.
    n_value
        Number of values of each key.
    n_query
        Number of keys that the question asks for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    n_key: int = 1
    n_value: int = 1
    n_query: int = 1

    n_max: ClassVar[int] = 128

    @property
    def needs(self) -> tuple[str, ...]:
        return (("words",) if self.keys == "words" else ()) + (
            ("essays",) if self.haystack == "essay" else ()
        )

    def least(self, spec: SampleSpec, sources: Sources) -> int:
        return self.n_key * self.n_value

    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        rng = spec.rng()
        hidden = [
            (
                self._random(self.keys, rng, sources),
                [self._random(self.values, rng, sources) for _ in range(self.n_value)],
            )
            for _ in range(self.n_key)
        ]
        needles = [self._needle(key, value) for key, values in hidden for value in values]
        rng.shuffle(needles)
        queried = rng.sample(hidden, self.n_query)
        text = self._text(n, needles, rng, sources)
        is_one = self.n_query * self.n_value == 1
        words = _ONE if is_one else _SEVERAL
        kind = self.values.removesuffix("s") if is_one else self.values
        keys = _listed([key for key, _ in queried])
        return Sample(
            _CONTEXT.format(kind=kind, text=text, **words),
            _QUESTION.format(kind=kind, keys=keys, **words),
            _OPENING.format(kind=kind, keys=keys, **words),
            [value for _, values in queried for value in values],
        )

    def _text(self, n: int, needles: Sequence[str], rng: random.Random, sources: Sources) -> str:
        if self.haystack == "essay":
            places = sorted(rng.sample(_DEPTHS, len(needles)))
            words = sources.essays
            hay = sentences(" ".join((words * (-(-n // len(words))))[:n]))
            ends = [len(hay) * place // 100 for place in places]
            parts = [
                [*hay[start:end], needle]
                for start, end, needle in zip([0, *ends], ends, needles, strict=False)
            ]
            return " ".join([*(sentence for part in parts for sentence in part), *hay[ends[-1] :]])
        # choose places as fractions of the text: then a needle has the same relative place at every length
        shares = sorted((rng.random() for _ in needles), reverse=True)
        if self.haystack == "noise":
            hay = [FILLER] * n
        else:
            hay = [
                self._needle(*(self._random(kind, rng, sources) for kind in (self.keys, self.values)))
                for _ in range(n)
            ]
        for share, needle in zip(shares, needles, strict=True):
            hay.insert(int(share * n), needle)
        return "\n".join(hay)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.values, key=key, value=value)

    @staticmethod
    def _random(kind: str, rng: random.Random, sources: Sources) -> str:
        if kind == "words":
            return f"{rng.choice(sources.adjectives)}-{rng.choice(sources.nouns)}"
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return str(rng.randint(10**6, 10**7 - 1))


def _listed(keys: Sequence[str]) -> str:
    return ", ".join([*keys[:-1], f"and {keys[-1]}"]) if len(keys) > 1 else keys[0]
