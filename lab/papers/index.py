"""The index of lab/papers/README.md: the experiments of each paper, and how their tests ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lab.papers import tables
from lab.papers.experiments import EXPERIMENTS
from lab.papers.experiments.kinds import UNGROUPED
from lab.papers.places import samples
from lab.papers.samples import SCORES
from lab.papers.tables import RESULTS
from lab.papers.verdicts import Verdict, verdict

PAPERS = {
    "weightedkv": {
        "weightedkv-table-1": "perplexity of policies",
        "weightedkv-table-1-each": "an eviction after each token, as in the paper",
        "weightedkv-figure-1": "singular values of keys and values",
        "weightedkv-figure-4": "merging against evicting",
        "weightedkv-figure-4-each": "the same with an eviction after each token",
    },
    "buzz": {
        "buzz-table-2": "summaries",
        "buzz-table-3": "perplexity with small caches",
        "buzz-table-3-kept": "the same; BUZZ holds more cells",
        "buzz-figure-6": "questions about ten documents",
        "buzz-figure-8": "ablations",
    },
    "bumblebee": {
        "bumblebee-table-1": "choices with five examples",
        "bumblebee-figure-3": "summaries with three examples (1.5B: one)",
        "bumblebee-lambda": "Section 6.4: weight of diversity against attention",
        "bumblebee-table-6": "decoding speed",
    },
    "corm": {
        "corm-tables-1-2": "LongBench",
        "corm-table-3": "perplexity",
        "corm-table-4": "perplexity with 128 recent queries",
        "corm-windows": "perplexity with fewer recent queries",
        "corm-figures-1-2-3": "patterns of attention",
    },
}
"""The experiments that repeat each paper, with a few words about each."""

_COLUMNS = {model: (model, UNGROUPED) if not model else (model,) for model in tables.MODELS}
"""The models that each column counts. SmolLM2's column also counts SmolLM2 without grouped queries."""

TITLES = {"weightedkv": "WeightedKV", "buzz": "BUZZ", "bumblebee": "BumbleBee", "corm": "CORM"}


def rows(results: Path = RESULTS) -> Iterator[str]:
    """The lines of the index: a row for each experiment."""
    names = list(tables.MODELS.values())
    yield f"| ID | shows | {' | '.join(names)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in names)} |"
    for paper, experiments in PAPERS.items():
        for name, shows in experiments.items():
            verdicts = (_verdict(name, model, results) for model in tables.MODELS)
            yield f"| [`{name}`]({paper}.md) | {shows} | {' | '.join(verdicts)} |"


def _verdict(name: str, model: str, results: Path) -> str:
    """Say, for each score, how many of the paper's differences are significant with this model."""
    counts: dict[str, Verdict] = defaultdict(Verdict)
    measured = lacks_own = False
    experiment = EXPERIMENTS[name]
    for version in _COLUMNS[model]:
        lines = tables.kept(tables.of_model(experiment, version), results)
        for table in experiment.tables:
            places = samples(lines, table)
            measured = measured or bool(places)
            rows = {row for row, _ in places}
            lacks_own = lacks_own or bool(rows and table.against and table.against not in rows)
            if (of_table := verdict(places, table)).n:
                counts[SCORES[table.score].short] += of_table
    if not measured:
        return "not measured"
    if lacks_own:
        return "only the other policies are measured"
    if not counts:
        return "no test"
    if len(counts) == 1:
        return _in_words(*counts.values())
    return "; ".join(f"{short}: {_in_words(of_score)}" for short, of_score in counts.items())


def _in_words(result: Verdict) -> str:
    if result.untested == result.n:
        return "too few for a test"
    if not result.same and not result.other:
        return f"0 of {result.n}"
    counts = (("same", result.same), ("other", result.other))
    return f"{', '.join(f'{n} {direction}' for direction, n in counts if n)}, of {result.n}"
