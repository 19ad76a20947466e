"""Experiments of lab/papers/fading.md, which are not from a paper: rows that keep means of evicted tokens."""

from __future__ import annotations

from typing import Any

from lab.papers.experiments.kinds import ALL, Experiment, Run, ScoreTable
from lab.papers.programs import FadingRun
from lab.papers.texts import WIKI

_FOUR = (WIKI, "pg19/10321.txt", "proofpile/hott-basics.tex", "pg19/10146.txt")
_NAMES = {
    "wiki.test.raw": "wikitext-2",
    "10321.txt": "PG19 10321",
    "10146.txt": "PG19 10146",
    "hott-basics.tex": "HoTT",
}
_POLICIES = ("h2o", "roco")


def _rules(policy: str, n_mean: int, *more: str) -> tuple[str, ...]:
    """Return rules of `lab.papers.fading`: no means, `cells` (more cells, no means), `output`, and `more`.

    more: further merges, such as "spare".
    """
    means = f"{policy}+{n_mean}"
    return policy, f"{means}:cells", means, *(f"{means}:{name}" for name in more)


_SMALL = tuple(rule for policy in _POLICIES for rule in _rules(policy, 16, "spare"))
_LARGE = tuple(rule for policy in _POLICIES for rule in _rules(policy, 32))

RUNS: dict[str, Run] = {
    "fading-512": FadingRun(_FOUR, ("full", *_LARGE), 512, 4096, minutes=11),
    "fading": FadingRun(_FOUR, ("full", *_SMALL), 128, 2048, minutes=6),
}

_BY_TEXT: dict[str, Any] = {"by": ("of",), "names": _NAMES, "pooled": ALL}


def _of(policy: str, n_mean: int, *more: str) -> ScoreTable:
    """Return a table of perplexity in percent above the full cache's, with a row for each rule.

    The rule with means is compared with the other rules.
    """
    rules = _rules(policy, n_mean, *more)
    return ScoreTable("above", **_BY_TEXT, apart="full", against=rules[2], rows=rules)


EXPERIMENTS = {
    "fading": Experiment(
        ("fading",),
        tuple(_of(policy, 16, "spare") for policy in _POLICIES),
    ),
    "fading-512": Experiment(("fading-512",), tuple(_of(policy, 32) for policy in _POLICIES)),
}
