"""BUZZ's experiments (arXiv:2410.23079)."""

from __future__ import annotations

from lab.papers.commands import CompareRun, EvalRun
from lab.papers.experiments.kinds import (
    ALL,
    LARGE,
    Experiment,
    Place,
    Run,
    ScoreTable,
    directions,
    each,
    numbers,
)
from lab.papers.texts import WIKI, XSUM

# with `kept=true` the budget is the number of tokens that an eviction leaves, as in the paper
_KEPT = "buzz:kept=true"
_ALL = ("full", "buzz", _KEPT, "buzz:logn=true", "h2o", "streamingllm", "local")
_FEW = ("full", "buzz", _KEPT, "h2o", "streamingllm")
_OF_LARGE = tuple(label for label in _ALL if label not in ("buzz", "local"))
# `kept=true` has a separate table for streams, because its rows grow to nearly three times the budget between
# two evictions
_STREAMED = tuple(label for label in _ALL if label != _KEPT)
_ABLATIONS = ("buzz:swap=true", "buzz:local_max=false")
_SHARES = ("10%", "20%", "30%", "40%", "50%", "60%")
_TEN = {at: f"DERIVED-nq10_random_distractors_gold_at_{at}.jsonl.gz" for at in (0, 4, 9)}
_WHOLE = ("--prefill", "whole")
_LIKELIHOOD = (*_WHOLE, "--set", "likelihood=true")

RUNS: dict[str, Run] = {
    "wikitext": CompareRun((WIKI,), _STREAMED, ("50", "100"), 4096, minutes=7),
    "wikitext-1.5b": CompareRun((WIKI,), _STREAMED, ("50", "100"), 1024, model=LARGE, minutes=8),
    "wikitext-kept": CompareRun((WIKI,), (_KEPT,), ("50", "100"), 4096, minutes=1),
    "wikitext-kept-1.5b": CompareRun((WIKI,), (_KEPT,), ("50", "100"), 1024, model=LARGE, minutes=2),
    "xsum": EvalRun("summarize", (XSUM,), _ALL, _SHARES, _LIKELIHOOD, 24, minutes=60),
    "xsum-1.5b": EvalRun("summarize", (XSUM,), _OF_LARGE, ("20%", "40%"), _LIKELIHOOD, 9, LARGE, minutes=27),
    "xsum-ablation": EvalRun("summarize", (XSUM,), _ABLATIONS, ("10%", "20%"), _LIKELIHOOD, 24, minutes=6),
    "xsum-ablation-1.5b": EvalRun(
        "summarize", (XSUM,), ("buzz", *_ABLATIONS), ("20%",), _LIKELIHOOD, 9, LARGE, minutes=9
    ),
    **{
        f"qa-{at}": EvalRun(
            *("qa", (f"lost_in_the_middle/{file}",), _FEW, ("300",)),
            (*_WHOLE, "--set", "n_max=24"),
            16,
            minutes=20,
        )
        for at, file in _TEN.items()
    },
}


def _kept(*tables: str) -> dict[Place, str]:
    """The paper's numbers of these tables, with BUZZ's numbers in the row `buzz:kept=true`.

    With `kept=true`, the budget is the number of cells that the paper reports.
    """
    return {
        (_KEPT if row == "buzz" else row, column): number
        for (row, column), number in numbers("buzz", *tables).items()
    }


_TABLE_2 = _kept("table-2")


EXPERIMENTS = {
    "buzz-table-3": Experiment(
        ("wikitext", "wikitext-1.5b"),
        (ScoreTable("nll", against="buzz", rows=_STREAMED, paper=numbers("buzz", "table-3")),),
        "Llama-2-7B",
    ),
    "buzz-table-3-kept": Experiment(
        ("wikitext", "wikitext-kept", "wikitext-1.5b", "wikitext-kept-1.5b"),
        (ScoreTable("nll", against=_KEPT, rows=(_KEPT, "h2o", "streamingllm"), paper=_kept("table-3")),),
        "Llama-2-7B",
        unequal=True,
    ),
    "buzz-table-2": Experiment(
        ("xsum", "xsum-1.5b"),
        (
            ScoreTable("rouge", against=_KEPT, rows=_ALL, paper=_TABLE_2),
            ScoreTable("logp", against=_KEPT, rows=_ALL, theirs=directions(_TABLE_2, _KEPT)),
        ),
        "Llama-2-7B",
    ),
    "buzz-figure-6": Experiment(
        tuple(f"qa-{at}" for at in _TEN),
        each(
            *("subspan_em", "logp"),
            by=("of",),
            against=_KEPT,
            pooled=ALL,
            only_pooled=True,
            same_item=True,
            worse=("h2o", "streamingllm"),
        ),
    ),
    "buzz-figure-8": Experiment(
        ("xsum", "xsum-ablation", "xsum-1.5b", "xsum-ablation-1.5b"),
        (
            ScoreTable(
                "logp",
                against="buzz",
                rows=("full", "buzz", *_ABLATIONS),
                budgets=("10%", "20%"),
                worse=_ABLATIONS,
            ),
        ),
    ),
}
