"""Verdicts on a paper's differences: tests of a table's numbers, and their directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lab.papers import significance
from lab.papers.experiments.kinds import Place, ScoreTable
from lab.papers.places import is_pooled
from lab.papers.samples import SCORES, Difference, Measurements

_LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of a paper's differences, by the outcome of a test with the measurements here.

    Attributes
    ----------
    same
        Differences that are significant here, in the direction that the paper reports.
    other
        Differences that are significant here, in the opposite direction.
    unclear
        Differences that were tested here and are not significant.
    untested
        Differences that no test can find: single numbers, or so few units that no difference can be
        significant among all tests of the table.
    """

    same: int = 0
    other: int = 0
    unclear: int = 0
    untested: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def n(self) -> int:
        """Number of the paper's differences that were measured."""
        return self.same + self.other + self.unclear + self.untested


def verdict(places: Mapping[Place, Measurements], table: ScoreTable) -> Verdict:
    """Count the differences in a paper's table by the outcome of their tests here.

    Only the direction of a difference counts, not its size.
    """
    differences = _differences(places, table)
    signs = _signs(places, differences)
    same = other = unclear = untested = 0
    for place, theirs in ordered(places, table):
        if sign := signs.get(place):
            same += sign == theirs
            other += sign != theirs
        elif place in differences and differences[place].least_p * len(differences) <= _LEVEL:
            unclear += 1
        else:
            untested += 1
    return Verdict(same, other, unclear, untested)


def size(budget: str) -> float:
    """Sort key of columns of budgets; a column without a number comes first."""
    number = re.match(r"\d+(\.\d+)?", budget)
    return float(number[0]) if number else 0


def compared(places: Mapping[Place, Measurements], table: ScoreTable) -> dict[Place, int]:
    """Compare each number of a table with the number of the paper's method in the same column.

    Return 1 for a number that is significantly better than the method's number, -1 for a significantly worse
    number, and 0 if the difference is not significant. Numbers without a test are missing: single numbers,
    such as a Self-BLEU, and numbers with too few units.

    The chance that any of a table's tests is wrong is 5 % (Holm).
    """
    return _signs(places, _differences(places, table))


def _signs(places: Mapping[Place, Measurements], differences: Mapping[Place, Difference]) -> dict[Place, int]:
    adjusted = significance.holm(np.array([each.p for each in differences.values()]))
    return {
        place: int(np.sign(each.mean)) * _sign(places[place].score) * bool(p <= _LEVEL)
        for (place, each), p in zip(differences.items(), adjusted, strict=True)
    }


def ordered(places: Mapping[Place, Measurements], table: ScoreTable) -> Iterator[tuple[Place, int]]:
    """Yield each place (row and column) that was measured, with the paper's verdict on it.

    The verdict is 1 if the paper reports a better number there than for its own method, -1 for a worse
    number. Places without a difference in the paper are left out. `full` is also left out, unless the table's
    `worse` or `theirs` names it.
    """
    for place in places:
        if not _is_compared(place, places, table):
            continue
        if place[0] in table.worse:
            yield place, -1
        elif place in table.theirs:
            yield place, table.theirs[place] * _sign(places[place].score)
        elif place[0] != "full":
            theirs = _theirs(place, table) * _sign(places[place].score)
            if theirs:
                yield place, theirs


def _differences(places: Mapping[Place, Measurements], table: ScoreTable) -> dict[Place, Difference]:
    """Return, for each place, the difference from the paper's method in the same column.

    Places with too few units for a test are missing.
    """
    differences = {
        place: sample.minus(places[table.against, place[1]])
        for place, sample in places.items()
        if _is_compared(place, places, table)
    }
    return {place: each for place, each in differences.items() if each}


def _is_compared(place: Place, places: Mapping[Place, Measurements], table: ScoreTable) -> bool:
    """True if the paper's method is in another row, and has a number in the same column.

    With `only_pooled`, the column must also be pooled.
    """
    row, column = place
    counts = not table.only_pooled or is_pooled(column, table)
    return counts and row != table.against and (table.against, column) in places


def _theirs(place: Place, table: ScoreTable) -> int:
    """Return the sign of the paper's number at this place minus its number for its own method. 0 if unknown.

    If the paper has no numbers for a pooled column, compare its means over the joined columns.
    """
    row, column = place
    if {place, (table.against, column)} <= table.paper.keys():
        return int(np.sign(float(table.paper[place]) - float(table.paper[table.against, column])))
    if not is_pooled(column, table):
        return 0
    rest = column.partition(", ")[2]
    both = [
        float(table.paper[row, other]) - float(number)
        for (method, other), number in table.paper.items()
        if method == table.against and other.partition(", ")[2] == rest and (row, other) in table.paper
    ]
    return int(np.sign(round(sum(both), 9)))


def _sign(score: str) -> int:
    return -1 if SCORES[score].lower else 1
