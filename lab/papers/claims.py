"""Claims of the papers' abstracts and their tests: the first table of lab/papers/README.md."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from lab.papers import significance, tables
from lab.papers.experiments import EXPERIMENTS
from lab.papers.experiments.kinds import Place, ScoreTable
from lab.papers.index import PAPERS, TITLES
from lab.papers.lines import Line
from lab.papers.places import samples
from lab.papers.samples import SCORES, Measurements
from lab.papers.tables import RESULTS
from lab.papers.verdicts import compared

MARGIN = 0.01
"""A method is about as good as the full cache if it loses at most this share of score or perplexity."""

_LEVEL = 0.05

_CELL_BYTES = {"": 30 * 3 * 64 * 2 * 2, tables.LARGE: 28 * 2 * 128 * 2 * 2}
"""Size of a token's K and V in bytes, by model: layers x KV heads x head size x 2 (key, value) x 2 bytes."""


Key = tuple[str, str, str, str]
"""Key of a test: its experiment, model, score and column."""


@dataclass(frozen=True, slots=True)
class Look:
    """One test of a claim.

    Attributes
    ----------
    experiment
        The experiment whose tables have the numbers.
    of
        Description of the texts or items. {n} is replaced by their number, {tokens} by a text's number of
        tokens, and {of} by the budget.
    method
        The paper's method.
    rivals
        Rows of the tables that the method's row is compared with. The claim is that the method is better than
        these rows. If `full` (the full cache) is the only rival and `above` is False, the claim is only that
        the method is about as good as the full cache.
    column
        Heading of the column in the tables, or the beginning of the heading.
    scores
        Scores of the tables.
    above
        True if the claim is that the method is better than `full`.
    """

    experiment: str
    of: str
    method: str
    rivals: tuple[str, ...]
    column: str
    scores: tuple[str, ...]
    above: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A headline of a paper, and its tests.

    Attributes
    ----------
    paper
        Name of the paper.
    says
        The claim.
    looks
        Tests of the claim.
    """

    paper: str
    says: str
    looks: tuple[Look, ...]


_KEPT, _SUBMODULAR = "buzz:kept=true", "bumblebee:sinks=0"
_PAPERS_WINDOW = "corm:window=128:history=128"
_OF_WEIGHTEDKV = ("streamingllm", "tova:sinks=4", "h2o:sinks=4", "cam")
_OF_CORM = ("full",)

CLAIMS = (
    Claim(
        "BUZZ",
        "2.5 times less cache with over 99 % of the accuracy of summaries",
        (Look("buzz-table-2", "{n} articles of XSUM", _KEPT, ("full",), "40%", ("rouge", "logp")),),
    ),
    Claim(
        "BUZZ",
        "7.69 % ahead of the state of the art in questions about several documents",
        (
            Look(
                *("buzz-figure-6", "16 questions, thrice", _KEPT, ("h2o", "streamingllm"), "all"),
                ("subspan_em", "logp"),
            ),
        ),
    ),
    Claim(
        "CORM",
        "up to 70 % less cache with negligible loss, on six tasks of LongBench",
        (
            Look("corm-tables-1-2", "{n} items of LongBench", "corm", _OF_CORM, "EN", ("score",)),
            Look(
                "corm-table-3",
                "{tokens} tokens of {n} texts, from {of} on",
                "corm",
                _OF_CORM,
                "all, ",
                ("nll",),
            ),
            Look("corm-table-4", "{tokens} tokens of {n} texts", _PAPERS_WINDOW, _OF_CORM, "", ("nll",)),
        ),
    ),
    Claim(
        "WeightedKV",
        "the lowest perplexity of all, above all with few cells",
        tuple(
            Look(
                *("weightedkv-table-1", "{tokens} tokens of {n} texts", "weightedkv", _OF_WEIGHTEDKV),
                *(f"all, {budget}", ("nll",)),
            )
            for budget in (256, 1024)
        )
        + (
            Look(
                *("weightedkv-table-1-each", "{tokens} tokens of {n} texts", "weightedkv:window=124"),
                *(_OF_WEIGHTEDKV, "all, 256", ("nll",)),
            ),
        ),
    ),
    Claim(
        "BumbleBee",
        "more accurate than others at the same reduction",
        (
            Look(
                *("bumblebee-table-1", "{n} choices", _SUBMODULAR, ("h2o", "streamingllm"), "all"),
                ("acc_norm", "right"),
            ),
            Look(
                *("bumblebee-figure-3", "{n} articles of XSUM", _SUBMODULAR, ("h2o", "streamingllm"), "20%"),
                ("rouge", "logp"),
            ),
        ),
    ),
    Claim(
        "BumbleBee",
        "its Figure 3: above the full cache, with LLaMA-7B",
        (
            Look(
                *("bumblebee-figure-3", "{n} articles of XSUM", _SUBMODULAR, ("full",), "20%"),
                ("rouge", "logp"),
                above=True,
            ),
        ),
    ),
    Claim(
        "BumbleBee",
        "its Table 6: it decodes faster with a tenth of the cache than with a fifth",
        (Look("bumblebee-table-6", "{tokens} tokens of {n} texts", "51", ("102",), _SUBMODULAR, ("ms",)),),
    ),
)


def rows(results: Path = RESULTS) -> Iterator[str]:
    """Yield the lines of the table, then a sentence that counts the tests against H2O."""
    yield "| the paper says | measured with | cells and bytes held | found | test |"
    yield "| --- | --- | --- | --- | --- |"
    as_good = _as_good(results)
    for claim in CLAIMS:
        head = f"**{claim.paper}**: {claim.says}"
        for look in claim.looks:
            for model in tables.MODELS:
                if seen := _seen(look, model, results):
                    yield f"| {head} | {' | '.join(_cells(look, model, seen, as_good))} |"
                    head = ""
    yield ""
    yield textwrap.fill(_against_h2o(results), 140, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Measurements for one test of a claim with one score.

    Attributes
    ----------
    table
        The experiment's table that shows the score.
    places
        The numbers of the table, by row and column.
    column
        Heading of the column that the test uses.
    lines
        The experiment's lines in the records.
    """

    table: ScoreTable
    places: Mapping[Place, Measurements]
    column: str
    lines: Sequence[Line]

    def lines_of(self, label: str) -> list[Line]:
        """Return the lines of a table row. `label` is the name of the row.

        Return only the lines whose budget or policy is in the column's heading, if there are any.
        """
        lines = [line for line in self.lines if line[self.table.row] == label]
        parts = self.column.split(", ")
        return [line for line in lines if not {line["budget"], line["label"]}.isdisjoint(parts)] or lines


def _seen(look: Look, model: str, results: Path) -> list[_Seen]:
    """Return the measurements for a test with this model: one for each measured score of the test."""
    experiment = EXPERIMENTS[look.experiment]
    lines = tables.kept(tables.of_model(experiment, model), results)
    seen = []
    for table in (table for table in experiment.tables if table.score in look.scores and table.against):
        places = samples(lines, table)
        columns = (column for row, column in places if row == look.method and column.startswith(look.column))
        if column := next(columns, ""):
            seen.append(_Seen(table, places, column, lines))
    return seen


def _cells(
    look: Look, model: str, seen: Sequence[_Seen], as_good: Mapping[Key, tuple[float, float]]
) -> tuple[str, ...]:
    """Return the texts of a row of the claims table, without its first column."""
    numbers, results = [], {}
    for each in seen:
        method, signs = each.places[look.method, each.column], compared(each.places, each.table)
        short = SCORES[each.table.score].short or each.table.score
        if look.rivals == ("full",):
            full, sign = each.places["full", each.column], signs.get(("full", each.column), 0)
            distance = "" if look.above else _how_far(look, each)
            numbers.append(f"{short} {_number(method)} against {_number(full)}{distance}")
            if sign or look.above:
                results[short] = {1: "behind full", -1: "ahead of full", 0: "no difference"}[sign]
            else:
                results[short] = _in_words(*as_good[_key(look, model, each)])
        else:
            rivals = [name for name in look.rivals if (name, each.column) in each.places]
            listed = (f"{_rival(name)} {_number(each.places[name, each.column])}" for name in rivals)
            numbers.append(f"{short} {_number(method)}; {', '.join(listed)}")
            results[short] = _of_rivals(rivals, each.column, signs)
    method_lines = seen[-1].lines_of(look.method)
    n = len({of for of, _ in method.values} if method.of_text else method.values)
    tokens = max((line["tokens"] for line in method_lines if "tokens" in line), default=0)
    sizes = _sizes(method_lines, seen[-1].lines_of("full"), model)
    of = look.of.format(n=n, tokens=f"{tokens:,}", of=_grouped(seen[-1].column.rpartition(", ")[2]))
    if len(set(results.values())) == 1:
        result = next(iter(results.values()))
    else:
        result = "; ".join(f"{short}: {of_score}" for short, of_score in results.items())
    return f"{tables.SHORT[model]}, {of}", sizes, "; ".join(numbers), result


def _grouped(budget: str) -> str:
    return f"{int(budget):,}" if budget.isdecimal() else budget


def _rival(row: str) -> str:
    return f"{_grouped(row)} cells" if row.isdecimal() else f"`{row.partition(':')[0]}`"


def _number(sample: Measurements) -> str:
    score, mean = SCORES[sample.score], sample.mean()[0]
    return f"{(np.exp(mean) if score.exp else mean) * score.scale:.{score.digits}f}"


def _how_far(look: Look, seen: _Seen) -> str:
    """Return the text that compares the method's score with the full cache's score."""
    method, full = (seen.places[label, seen.column] for label in (look.method, "full"))
    if SCORES[method.score].exp:
        mean, error = method.apart(full).mean()
        return f": {100 * np.expm1(mean):+.1f} % ±{100 * np.exp(mean) * error:.1f}"
    if SCORES[method.score].scale == 1:
        return ""
    ratio, low, high = _ratio(method, full, *(seen.lines_of(label) for label in (look.method, "full")))
    return f": {ratio:.0f} % ({low:.0f} to {high:.0f})"


def _ratio(
    method: Measurements, full: Measurements, method_lines: Sequence[Line], full_lines: Sequence[Line]
) -> tuple[float, float, float]:
    """Return a score in percent of the full cache's score, and the ends of its 95 % interval.

    The interval comes from resampling the items of each data set.
    """
    rng, places = np.random.default_rng(0), list(method.values)
    of = np.array([name for name, _ in places])
    groups = [np.flatnonzero(of == name) for name in dict.fromkeys(of)]
    drawn = np.concatenate(
        [group[rng.integers(len(group), size=(10_000, len(group)))] for group in groups], 1
    )
    order = np.concatenate(groups)[None]
    if method.score == "rouge":
        both = [_three(lines, places) for lines in (method_lines, full_lines)]
        means = [[np.prod(values[:, at].mean(2), 0) ** (1 / 3) for values in both] for at in (order, drawn)]
    else:
        weight = method.weights(places)[order]
        values = [np.array([sample.values[place][0] for place in places]) for sample in (method, full)]
        means = [[(weight * value[at]).sum(1) for value in values] for at in (order, drawn)]
    (ratio,), draws = (100 * np.divide(*each) for each in means)
    return ratio, *np.quantile(draws, [0.025, 0.975])


def _three(lines: Sequence[Line], places: Sequence[Place]) -> np.ndarray:
    """The three ROUGE scores f64[3, item] of these items."""
    by_place = {}
    for line in lines:
        scores = zip(*(line["scores"][name] for name in ("rouge1", "rouge2", "rougeL")), strict=True)
        by_place |= {(line["of"], item): of_item for item, of_item in zip(line["items"], scores, strict=True)}
    return np.array([by_place[place] for place in places]).T


def _key(look: Look, model: str, seen: _Seen) -> Key:
    return look.experiment, model, seen.table.score, seen.column


def _as_good(results: Path) -> dict[Key, tuple[float, float]]:
    """Return p-value and power of each test for the claim that a method is about as good as the full cache.

    The p-values are corrected for the number of tests (Holm).
    """
    tests = {}
    looks = (look for claim in CLAIMS for look in claim.looks if look.rivals == ("full",) and not look.above)
    for look, model in product(looks, tables.MODELS):
        for seen in _seen(look, model, results):
            method, full = (seen.places[label, seen.column] for label in (look.method, "full"))
            sums, weights = method.differences(full)
            score = SCORES[method.score]
            margin = MARGIN * full.mean()[0] if score.scale > 1 else np.log1p(MARGIN)
            how = (-sums if score.lower else sums, weights, margin)
            tests[_key(look, model, seen)] = significance.not_worse_test(*how), significance.power(*how)
    adjusted = significance.holm(np.array([p for p, _ in tests.values()]))
    return {key: (p, power) for (key, (_, power)), p in zip(tests.items(), adjusted, strict=True)}


def _in_words(p: float, power: float) -> str:
    result = "at most 1 % worse" if p <= _LEVEL else "not shown"
    chance = "p < 0.01" if p < 0.01 else f"p = {p:.2f}"
    return f"{result} ({chance}, power {100 * power:.0f} %)"


def _of_rivals(rivals: Sequence[str], column: str, signs: Mapping[Place, int]) -> str:
    """List the rivals by the result of their tests, as in "ahead of `h2o`, behind `cam`"."""
    words = {-1: "ahead of", 1: "behind", 0: "no difference from", None: "too few for a test against"}
    by_result: dict[str, list[str]] = {}
    for name in rivals:
        by_result.setdefault(words[signs.get((name, column))], []).append(_rival(name))
    return ", ".join(f"{word} {_listed(names)}" for word, names in by_result.items())


def _listed(names: Sequence[str]) -> str:
    """The names with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _against_h2o(results: Path) -> str:
    """Say in how many tests of quality a paper's method is ahead of H2O, and in how many H2O is ahead."""
    signs: list[tuple[str, int]] = []
    unequal = []
    for paper, experiments in PAPERS.items():
        for name in experiments:
            experiment = EXPERIMENTS[name]
            if experiment.unequal:
                unequal.append(f"`{name}`")
                continue
            for model, table in product(tables.models_of(name), experiment.tables):
                places = samples(tables.kept(tables.of_model(experiment, model), results), table)
                signs += [
                    (paper, sign)
                    for (row, _), sign in compared(places, table).items()
                    if row.partition(":")[0] == "h2o" and SCORES[table.score].short
                ]
    behind = Counter(paper for paper, sign in signs if sign > 0)
    ahead = sum(sign < 0 for _, sign in signs)
    papers = ", ".join(f"{TITLES[paper]} {n}" for paper, n in behind.items())
    return (
        f"The papers' tables have {len(signs)} tests against H2O of a score, a likelihood or a perplexity: "
        f"the paper's method is ahead in {ahead}, H2O in {behind.total()} ({papers}). {', '.join(unequal)} "
        f"is not counted, because BUZZ holds more cells there."
    )


def _sizes(method_lines: Sequence[Line], full_lines: Sequence[Line], model: str) -> str:
    """Cells that the method and the full cache held at the end, and their bytes."""
    n_own, own_mib = _size(method_lines, model)
    n_full, full_mib = _size(full_lines, model)
    if not n_full and method_lines[0]["budget"] == "100%":
        # with a budget of 100 %, `cells` is the number of cells that the full cache holds
        n_full = float(np.mean([n for line in method_lines for n in line["cells"]]))
        full_mib = n_full * _CELL_BYTES[model] / 2**20
    cells = f"{n_own:,.0f} of {n_full:,.0f} cells" if n_full else f"{n_own:,.0f} cells"
    if not own_mib:
        return f"{cells}, bytes not recorded"
    return f"{cells}, {own_mib:.1f} of {full_mib:.1f} MiB" if n_full else f"{cells}, {own_mib:.1f} MiB"


def _size(lines: Sequence[Line], model: str) -> tuple[float, float]:
    """Return the mean number of cells held at the end, and their MiB. A number that is not known is 0.

    If MiB are not recorded, they are computed from the number of cells. With CORM, MiB stay unknown, because
    the cache's rows have different lengths.
    """
    evicted = [line["tokens"] * (1 - line["scores"]["evicted"][0]) for line in lines if "tokens" in line]
    held = [n for line in lines for n in line["scores"].get("cells_held", ()) if n is not None]
    n_cell = float(np.mean(evicted or held or [0]))
    recorded = [line["bytes"][0] / 2**20 for line in lines if "bytes" in line]
    is_ragged = any(line["label"].startswith("corm") for line in lines)
    mib = np.mean(recorded) if recorded else 0 if is_ragged else n_cell * _CELL_BYTES[model] / 2**20
    return n_cell, float(mib)
