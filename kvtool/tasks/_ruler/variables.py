"""Variables: a text hides a chain of assignments; the question asks which variables have the same value."""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_uppercase
from typing import ClassVar

from kvtool.tasks._ruler.sources import Sources
from kvtool.tasks._ruler.subtask import Sample, SampleSpec, Subtask, largest
from kvtool.tasks.haystack import FILLER

_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n"
_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
_OPENING = (
    "Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned "
    "the value {value}, they are: "
)

_EXAMPLE = 500
"""Maximum tokens of the solved example."""


@dataclass(frozen=True, slots=True)
class Variables(Subtask):
    """Parameters of the chain. A piece is a line of filler.

    n_hop: number of assignments after the first. Each of them copies the previous variable.
    """

    n_hop: int = 4

    n_max: ClassVar[int] = 30

    def least(self, spec: SampleSpec, sources: Sources) -> int:
        return self.n_hop + 1

    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        rng = spec.rng()
        example = self._example(rng.getrandbits(32), sources)
        chain = self._chain(n, 5, rng)
        return Sample(f"{example}\n{chain.context}", chain.question, chain.opening, chain.answers)

    def _example(self, seed: int, sources: Sources) -> str:
        """Return a solved example with names of three letters.

        It has as many lines as fit into _EXAMPLE tokens, but at least five.
        """

        def solved(n: int) -> str:
            chain = self._chain(n, 3, random.Random(seed))
            return f"{chain.text} {' '.join(chain.answers)}\n"

        return solved(largest(lambda n: sources.n_token(solved(n)) <= _EXAMPLE, self.n_hop + 1, _EXAMPLE))

    def _chain(self, n: int, n_letter: int, rng: random.Random) -> Sample:
        """Return n lines of filler with a chain of variables whose names have n_letter letters."""
        names: list[str] = []
        while len(names) <= self.n_hop:
            name = "".join(rng.choices(ascii_uppercase, k=n_letter))
            if name not in names:
                names.append(name)
        value = rng.randrange(10000, 99999)
        lines = [f"VAR {names[0]} = {value}"]
        # as in RULER, each of these lines ends with a space
        lines += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
        text = [FILLER] * n
        # `place` counts only lines of filler, so add the number of lines that were inserted before
        for i, place in enumerate(sorted(rng.sample(range(n), len(lines)))):
            text.insert(place + i, lines[i])
        return Sample(
            _CONTEXT.format(text="\n".join(text)),
            _QUESTION.format(value=value),
            _OPENING.format(n=len(names), value=value),
            names,
        )
