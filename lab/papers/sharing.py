"""Table of lab/papers/ruler.md: the gain of rows or layers that share a budget, at equal cells or bytes.

The score with a shared budget is compared with the score with equal budgets. Every row of a layer takes as
many bytes as the longest row, so rows that share a budget take more bytes for the same number of cells. For
a comparison at equal bytes, the score with equal budgets is therefore interpolated, item by item, between
the measured shares and the full cache. The statistical tests use one number per task: the mean gain over all
shares, and over the policies that were measured with and without sharing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from lab.papers import significance, tables
from lab.papers.experiments.ruler import COUNTED
from lab.papers.lines import Line
from lab.papers.ruler import SHARING, sharing

_WORDS = {"heads": "rows", "layers": "layers"}

_QUESTIONS = {"after": ("after",), "known": ("known",), "both": ("after", "known")}


def gains(lines: Sequence[Line], by: str, questions: Sequence[str], *, in_bytes: bool) -> np.ndarray:
    """Return f64[task], the gain in score (0..1) over equal budgets.

    by: "heads" if the rows of a layer share a budget, "layers" if the layers share the budget.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    where = {(line["label"], line["task"], line["of"], line["budget"]): line for line in lines}
    equal = defaultdict(list)
    for (label, question, of, _), line in where.items():
        equal[label, question, of].append(line)
    for name in SHARING[by]:
        for (label, question, of, budget), line in where.items():
            if label != sharing(name, by) or question not in questions or of not in COUNTED:
                continue
            score, size = np.array(line["scores"]["string_match"]), line["scores"]["device"]
            if in_bytes:
                others = [*equal[name, question, of], where["full", question, of, None]]
                rival = _at(others, size)
            else:
                rival = np.array(where[name, question, of, budget]["scores"]["string_match"])
            by_task[of].append(float((score - rival).mean()))
    return np.array([np.mean(of_task) for of_task in by_task.values()])


def _at(lines: Sequence[Line], size: Sequence[float]) -> np.ndarray:
    """Return f64[item]: the score that each item would have with a cache of `size` bytes.

    The score is interpolated between the caches of `lines`, which have other sizes.
    """
    at, scores = (np.array([line["scores"][name] for line in lines]) for name in ("device", "string_match"))
    order = np.argsort(at, axis=0)
    at, scores = np.take_along_axis(at, order, 0), np.take_along_axis(scores, order, 0)
    return np.array([np.interp(size[i], at[:, i], scores[:, i]) for i in range(len(size))])


def rows() -> Iterator[str]:
    """Yield the lines of the table, which is made from the stored records."""
    lines = tables.kept(["ruler"])
    yield "| what shares | question | equal cells | p | equal bytes | p |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for by, (question, asked) in product(SHARING, _QUESTIONS.items()):
        cells = []
        for in_bytes in (False, True):
            gain = gains(lines, by, asked, in_bytes=in_bytes)
            cells += [f"{100 * gain.mean():+.1f}", f"{significance.sign_flip_test(gain):.3f}"]
        yield f"| {_WORDS[by]} | {question} | {' | '.join(cells)} |"
