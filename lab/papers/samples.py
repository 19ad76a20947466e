"""Samples of a score: their mean with its standard error, and the test of the difference of two samples.

A table shows the mean of a sample at each place (row and column).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtool.measure import statistics
from lab.benchmarks.blocks import joined
from lab.papers import significance

_MIN_UNITS = 6
"""Smallest number of differences other than 0 for which a test of signs can reach p < 0.05."""


@dataclass(frozen=True, slots=True)
class Score:
    """Presentation of a score.

    Attributes
    ----------
    title
        Heading of the table.
    short
        What the score measures, in a word or two. Tests of scores with the same `short` are counted together.
    lower
        True if lower numbers are better.
    scale
        Factor by which the number is multiplied before it is printed.
    digits
        Number of decimal places.
    exp
        Whether the exponential of the mean is printed.
    less
        Number that is subtracted from the exponential.
    of
        Name of the recorded score from which this score is computed. Empty if this score itself is recorded.
    words
        Words for a better (or higher) and for a worse (or lower) number.
    """

    title: str
    short: str = ""
    lower: bool = False
    scale: float = 1.0
    digits: int = 2
    exp: bool = False
    less: float = 0.0
    of: str = ""
    words: tuple[str, str] = ("better", "worse")


_PERCENT = {"scale": 100, "digits": 1}
_MORE = ("more", "less")

SCORES = {
    "found": Score("Found, %", **_PERCENT),
    "nll": Score("Perplexity", "perplexity", lower=True, exp=True),
    "above": Score(
        "Perplexity above the full cache's, %", lower=True, scale=100, digits=1, exp=True, less=1, of="nll"
    ),
    "string_match": Score("RULER's score, %", "RULER", scale=100, digits=0),
    "device": Score("Keys and values on the device, MiB", lower=True, digits=1),
    "host": Score("In host memory, MiB", lower=True, digits=1),
    "rouge": Score("Geometric mean of ROUGE-1, ROUGE-2 and ROUGE-L, %", "ROUGE", **_PERCENT),
    "logp": Score("Log-probability of the right text, nats a token", "likelihood"),
    "f1": Score("F1, %", "F1", **_PERCENT),
    "subspan_em": Score("Right answer somewhere in the output, %", "matches", **_PERCENT),
    "acc_norm": Score("Accuracy by likelihood a byte, %", "accuracy", **_PERCENT),
    "right": Score("Log-probability of the right choice among all choices, nats", "likelihood"),
    "score": Score("LongBench's metrics, %", "LongBench", **_PERCENT),
    "holds": Score("Tokens a row holds at the end", digits=0),
    "evicted": Score("Tokens evicted at the end, %", **_PERCENT),
    "ms": Score("CPU time of a token, ms", lower=True, digits=2),
    "share": Score(
        "Share of a query's keys that are important to it, %", "important keys", words=_MORE, **_PERCENT
    ),
    "attention": Score(
        "Keys important to two queries, % of the keys important to either",
        "shared keys",
        words=_MORE,
        **_PERCENT,
    ),
    "queries": Score(
        "Queries whose most similar earlier query is that near, %", "near queries", words=_MORE, **_PERCENT
    ),
    "values": Score("Singular values that carry 90 % of the squares, % of all", words=_MORE, **_PERCENT),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference between two policies on the same units.

    Attributes
    ----------
    mean
        The mean difference.
    p
        p-value of its test.
    least_p
        Smallest possible p-value with this number of units.
    """

    mean: float
    p: float
    least_p: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Sample whose mean a table shows in one row and column.

    Attributes
    ----------
    score
        One of SCORES.
    values
        Value and weight by file and item, or by text and block of tokens.
    of_text
        True if the values are successive blocks of texts. Such blocks depend on each other.
    same_item
        True if the items with the same number in several files are one unit.
    strata
        The category of each file; none if empty.
    """

    score: str
    of_text: bool = False
    same_item: bool = False
    strata: Mapping[str, str] = field(default_factory=dict)
    values: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def mean(self) -> tuple[float, float]:
        """The mean and its standard error; the error is nan for a single unit."""
        if self.strata:
            return self._stratified()
        sums, weights = self._units(self.values)
        if len(sums) < 2:
            return float(sums.sum() / weights.sum()), float("nan")
        return statistics.mean_error(sums, weights)

    def minus(self, other: Measurements) -> Difference | None:
        """Test the differences from another sample, unit by unit. Return None if there are too few units."""
        if len(self.apart(other).values) < 2:
            return None
        sums, weights = self.differences(other)
        n_unit = np.count_nonzero(sums)
        if n_unit < _MIN_UNITS:
            return None
        mean = float(sums.sum() / weights.sum())
        return Difference(mean, significance.sign_flip_test(sums), 2.0 ** (1 - n_unit))

    def differences(self, other: Measurements) -> tuple[np.ndarray, np.ndarray]:
        """Return the differences from another sample, summed by unit, and the weights of the units.

        Both are f64[unit].
        """
        return self._units(self.apart(other).values)

    def apart(self, other: Measurements) -> Measurements:
        """Return the differences from another sample, for the values that are in both samples."""
        values = {
            place: (value - other.values[place][0], weight)
            for place, (value, weight) in self.values.items()
            if place in other.values
        }
        return replace(self, values=values)

    def _units(self, values: Mapping[tuple[str, str], tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays f64[unit]: the sum of the scores of each unit, and its weight.

        If there is one text, units are its blocks. If there are several texts, each is a unit. In a task,
        units are items.
        """
        value, weight = np.array(list(values.values())).T
        places = list(values)
        if self.strata:
            weight = self.weights(places)
        n_text = len({of for of, _ in places})
        if self.of_text and n_text == 1:
            return joined(value * weight, weight)
        if self.of_text or self.same_item:
            units = defaultdict(list)
            for i, (of, item) in enumerate(places):
                # an item's name ends in its number in the file: "file-12"
                units[of if self.of_text else item.rpartition("-")[2]].append(i)
            means = [np.average(value[unit], weights=weight[unit]) for unit in units.values()]
            return np.array(means), np.ones(len(means))
        return value * weight, weight

    def weights(self, places: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the weight of each item.

        Categories have equal weights, and so do the data sets of a category, and the items of a data set.
        """
        n_item: dict[str, int] = defaultdict(int)
        for of, _ in places:
            n_item[of] += 1
        in_category: dict[str, int] = defaultdict(int)
        for of in n_item:
            in_category[self.strata[of]] += 1
        n_category = len(in_category)
        return np.array([1 / (n_category * in_category[self.strata[of]] * n_item[of]) for of, _ in places])

    def _stratified(self) -> tuple[float, float]:
        """Return the mean, and its standard error from the variance of the items within each data set."""
        places, (value, _) = list(self.values), np.array(list(self.values.values())).T
        weight = self.weights(places)
        variance = 0.0
        for name in dict.fromkeys(of for of, _ in places):
            of_set = np.array([of == name for of, _ in places])
            n = of_set.sum()
            if n > 1:
                variance += weight[of_set].sum() ** 2 * value[of_set].var(ddof=1) / n
        return float((value * weight).sum()), float(np.sqrt(variance))
