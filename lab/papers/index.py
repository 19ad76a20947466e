"""The index of lab/papers/README.md: each table and figure of the papers, and what became of it here."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lab.papers import tables
from lab.papers.experiments import EXPERIMENTS
from lab.papers.experiments.kinds import UNGROUPED
from lab.papers.places import samples
from lab.papers.samples import SCORES
from lab.papers.tables import RESULTS
from lab.papers.verdicts import Verdict, listed, verdict


@dataclass(frozen=True, slots=True)
class Entry:
    """A table or figure of a paper, or several of the same kind.

    Attributes
    ----------
    name
        As the paper calls it.
    shows
        What it shows.
    experiments
        Where it is measured; the verdict is of all their tables.
    said
        In place of that: why it is not, or what to look at.
    link
        Where that is; none if empty.
    """

    name: str
    shows: str
    experiments: tuple[str, ...] = ()
    said: str = ""
    link: str = ""


_DRAWING = "a drawing; nothing to measure"
_ONE_MERGE = "merging.md#one-merge"
_MAPS = "maps.md"

PAPERS: dict[str, tuple[Entry, ...]] = {
    "weightedkv": (
        Entry("Figure 1", "singular values of keys and values", ("weightedkv-figure-1",)),
        Entry("Figure 2", "attention before and after a merge", said="measured", link=_ONE_MERGE),
        Entry("Figure 3", "an example of the algorithm", said=_DRAWING),
        Entry("Figure 4", "merging against evicting", ("weightedkv-figure-4", "weightedkv-figure-4-curve")),
        Entry("Figure 4, no groups", "the same, as in the paper's model", ("weightedkv-figure-4-ungrouped",)),
        Entry("Figure 4, each token", "the paper's schedule and window", ("weightedkv-figure-4-each",)),
        Entry("Table I, 4k", "perplexity of policies", ("weightedkv-table-1",)),
        Entry("Table I, each token", "the paper's schedule and window", ("weightedkv-table-1-each",)),
        Entry("Table I, 8k and 16k", "longer contexts", ("weightedkv-table-1-long",)),
    ),
    "buzz": (
        Entry("Figures 1 to 3, Table 1", "the method, symbols", said=_DRAWING),
        Entry("Figure 4", "threshold and window", ("buzz-figure-4",)),
        Entry("Figure 4, kept", "the same, of what an eviction leaves", ("buzz-figure-4-kept",)),
        Entry("Table 2", "summaries", ("buzz-table-2",)),
        Entry(
            "Figure 5, Tables A and B",
            "ROUGE by its kinds",
            said="left out: 24 summaries tell of them no policy that their mean does not, 16 no threshold",
        ),
        Entry("Figure 6", "ten documents", ("buzz-figure-6",)),
        Entry("Figure 7", "diversity", ("buzz-figure-7",)),
        Entry("Table 3", "perplexity at small caches", ("buzz-table-3",)),
        Entry("Table 3, kept", "the same; BUZZ holds more cells", ("buzz-table-3-kept",)),
        Entry("Figure 8", "ablations", ("buzz-figure-8",)),
        Entry("Figure 9", "four summaries of one article", ("buzz-figure-9",)),
        Entry("Table C", "a larger model: 13B there, 1.5B here", ("buzz-table-c",)),
    ),
    "bumblebee": (
        Entry("Figure 1", "the method", said=_DRAWING),
        Entry("Figure 2", "attention by distance", said="a map of any model and text", link=_MAPS),
        Entry("Table 1", "choices with five examples", ("bumblebee-table-1",)),
        Entry("Table 2", "LongBench", ("bumblebee-table-2", "bumblebee-table-2-hotpotqa")),
        Entry(
            "Table 1, three more data sets; Table 2, LongChat",
            "choices; windows that do not see each other",
            said="left out: 24 choices, and 16 questions, told nothing",
        ),
        Entry("Figure 3", "summaries with three examples (1.5B: one)", ("bumblebee-figure-3",)),
        Entry("Section 6.4", "the mixture", ("bumblebee-lambda",)),
        Entry("Appendix D", "other similarities", ("bumblebee-cosines",)),
        Entry("Section 7", "a budget that grows slowly", ("bumblebee-growing",)),
        Entry("Figures 6 and 7", "which keys stay", ("bumblebee-figure-6",)),
        Entry("Figure 8", "chosen keys among all", ("bumblebee-figure-8",)),
        Entry("Table 6", "decoding speed", ("bumblebee-table-6",)),
        Entry(
            "Tables 3 to 5, Figures 4 and 5",
            "small transformers trained on synthetic data",
            said="not measured: they train models, which kvtool does not do",
        ),
    ),
    "corm": (
        Entry("Figures 1, 6, 7", "share of important keys", ("corm-figure-1",)),
        Entry("Figures 2, 8 to 10", "similar queries, similar keys", ("corm-figure-2",)),
        Entry("Figures 3, 5, 11, 13", "recent queries are the most similar", ("corm-figure-3",)),
        Entry("Figure 4", "compression by length", ("corm-figure-4",)),
        Entry("Tables 1 and 2", "LongBench", ("corm-tables-1-2",)),
        Entry("Table 3", "perplexity", ("corm-table-3",)),
        Entry("Table 4", "other positions", ("corm-table-4",)),
        Entry("Tables 5 and 6", "grouped queries", ("corm-tables-5-6",)),
        Entry(
            "Tables 7 and 8",
            "longer: prompts of 12,000 tokens there, texts of 8,192 here",
            ("corm-tables-7-8",),
        ),
        Entry("Tables 9 and 10", "windows", ("corm-tables-9-10", "corm-windows")),
        Entry("Figure 12", "the data sets of LongBench", said=_DRAWING),
    ),
}

_COLUMNS = {model: (model, UNGROUPED) if not model else (model,) for model in tables.MODELS}
"""The models of each column. SmolLM2's has it without groups, too, in entries of its own."""

TITLES = {"weightedkv": "WeightedKV", "buzz": "BUZZ", "bumblebee": "BumbleBee", "corm": "CORM"}


def rows(results: Path = RESULTS) -> Iterator[str]:
    """The lines of the index, a table for each paper."""
    for paper, entries in PAPERS.items():
        names = list(tables.MODELS.values())
        yield f"**{TITLES[paper]}**, [its page]({paper}.md)"
        yield ""
        yield f"| there | what it shows | {' | '.join(names)} | ID |"
        yield f"| --- | --- | {' | '.join('---' for _ in names)} | --- |"
        for entry in entries:
            if entry.experiments:
                said = [_verdict(entry.experiments, model, results) for model in tables.MODELS]
            else:
                words = f"[{entry.said}]({entry.link})" if entry.link else entry.said
                said = [words, ""]
            ids = ", ".join(f"`{name}`" for name in entry.experiments)
            yield f"| {entry.name} | {entry.shows} | {' | '.join(said)} | {ids} |"
        yield ""
    hours = {name: _hours(model, results) for model, name in tables.MODELS.items()}
    took = " and ".join(f"{hour:.1f} hours with {name}" for name, hour in hours.items())
    yield f"All this took {took}, on one core of a small machine."
    yield ""
    yield textwrap.fill(_mixed(results), 140, break_on_hyphens=False)


def _mixed(results: Path) -> str:
    """The experiments in whose tables lines of several patches stand."""
    found = []
    for name in (name for entries in PAPERS.values() for entry in entries for name in entry.experiments):
        for model in tables.models_of(name):
            lines = tables.kept(tables.of_model(EXPERIMENTS[name], model), results)
            if len({line["patch"] for line in lines}) > 1:
                size = " (1.5B)" if model == tables.LARGE else ""
                found.append(f"`{name}`{size}")
    said = ", ".join(found) or "none"
    return (
        f"Tables with lines of more than one patch of llama.cpp, which the last line of each names: {said}."
    )


def _hours(model: str, results: Path) -> float:
    """The time of all that is measured with a model for the papers' tables and figures."""
    entries = (entry for entries in PAPERS.values() for entry in entries)
    runs = {
        run
        for entry in entries
        for name in entry.experiments
        for version in _COLUMNS[model]
        for run in tables.of_model(EXPERIMENTS[name], version)
    }
    return sum(line["seconds"] for line in tables.kept(sorted(runs), results)) / 3600


def _verdict(names: Sequence[str], model: str, results: Path) -> str:
    """What became of the differences that a paper's table or figure shows, with one model."""
    # by what the scores are about
    found: dict[str, Verdict] = defaultdict(Verdict)
    measured = lacks_own = False
    for name, version in product(names, _COLUMNS[model]):
        experiment = EXPERIMENTS[name]
        lines = tables.kept(tables.of_model(experiment, version), results)
        if experiment.examples and any("output" in line for line in lines):
            return "shown"
        for table in experiment.tables:
            places = samples(lines, table)
            measured = measured or bool(places)
            rows = {row for row, _ in places}
            lacks_own = lacks_own or bool(rows and table.against and table.against not in rows)
            if (told := verdict(places, table)).n:
                found[SCORES[table.score].short] += told
    if not measured:
        return "not measured"
    if lacks_own:
        return "only the other policies are measured"
    if not found:
        return "numbers; nothing to compare them with"
    if len(found) == 1:
        return _in_words(*found.values())
    return "; ".join(f"{short}: {_in_words(told)}" for short, told in found.items())


def _in_words(found: Verdict) -> str:
    if found.untested == found.n:
        return "too few texts or items for a test"
    if not found.same and not found.other:
        return f"cannot be told ({found.n} difference{'s' * (found.n > 1)})"
    said = [
        f"**{direction} direction**: {len(rivals)} of {found.n}, {listed(rivals)}"
        for direction, rivals in (("same", found.same), ("other", found.other))
        if rivals
    ]
    return "; ".join(said)


def fill_index(text: str, results: Path = RESULTS) -> str:
    """The document with the index between its marks made anew."""
    return tables.fill_between(text, "index", lambda: rows(results))
