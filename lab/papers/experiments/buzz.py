"""BUZZ's experiments (arXiv:2410.23079)."""

from __future__ import annotations

from lab.papers.commands import Compare, Eval
from lab.papers.experiments.kinds import (
    ALL,
    LARGE,
    WIKI,
    XSUM,
    Examples,
    Experiment,
    Place,
    Run,
    Table,
    directions,
    each,
    numbers,
)

# `kept=true`: its budget is what it holds after an eviction, as the others' is
_KEPT = "buzz:kept=true"
_ALL = ("full", "buzz", _KEPT, "buzz:logn=true", "h2o", "streamingllm", "local")
_FEW = ("full", "buzz", _KEPT, "h2o", "streamingllm")
_OF_TABLE_C = tuple(label for label in _ALL if label not in ("buzz", "local"))
# between two evictions of a stream the rows of `kept=true` grow to nearly three times its budget: they stand
# in tables of their own
_STREAMED = tuple(label for label in _ALL if label != _KEPT)
_OF_TABLE_3 = tuple(label for label in _ALL if label != "buzz")
_ABLATIONS = ("buzz:swap=true", "buzz:local_max=false")
# T / w from 1.5 to 6.5 in steps of 1; of 200 cells 4 are sinks and 1 is the token being decoded
_WINDOWS = tuple(f"buzz:window={window}" for window in (78, 56, 43, 35, 30, 26))
_BEST_WINDOW = "buzz:window=35"
_KEPT_WINDOWS = tuple(f"{_KEPT}:{label.partition(':')[2]}" for label in _WINDOWS)
_BEST_KEPT_WINDOW = f"{_KEPT}:window=35"
_SHARES = ("10%", "20%", "30%", "40%", "50%", "60%")
_TEN = {at: f"DERIVED-nq10_random_distractors_gold_at_{at}.jsonl.gz" for at in (0, 4, 9)}
_EXAMPLE = "xsum_0shot_first300-1"
_WHOLE = ("--prefill", "whole")
_LIKELIHOOD = (*_WHOLE, "--set", "likelihood=true")

RUNS: dict[str, Run] = {
    "wikitext": Compare((WIKI,), _STREAMED, ("50", "100"), 4096, minutes=7),
    "wikitext-1.5b": Compare((WIKI,), _STREAMED, ("50", "100"), 1024, model=LARGE, minutes=8),
    "wikitext-kept": Compare((WIKI,), (_KEPT,), ("50", "100"), 4096, minutes=1),
    "wikitext-kept-1.5b": Compare((WIKI,), (_KEPT,), ("50", "100"), 1024, model=LARGE, minutes=2),
    "ratio": Compare((WIKI,), _WINDOWS, ("200",), 4096, minutes=2),
    "ratio-1.5b": Compare((WIKI,), _WINDOWS, ("200",), 1024, model=LARGE, minutes=4),
    "ratio-kept": Compare((WIKI,), _KEPT_WINDOWS, ("200",), 4096, minutes=2),
    "ratio-kept-1.5b": Compare((WIKI,), _KEPT_WINDOWS, ("200",), 1024, model=LARGE, minutes=4),
    "xsum": Eval("summarize", (XSUM,), _ALL, _SHARES, _LIKELIHOOD, 24, "", _EXAMPLE, minutes=60),
    "xsum-1.5b": Eval(
        "summarize", (XSUM,), _OF_TABLE_C, ("20%", "40%"), _LIKELIHOOD, 9, LARGE, _EXAMPLE, minutes=27
    ),
    "xsum-ablation": Eval("summarize", (XSUM,), _ABLATIONS, ("10%", "20%"), _LIKELIHOOD, 24, minutes=6),
    "xsum-ablation-1.5b": Eval(
        "summarize", (XSUM,), ("buzz", *_ABLATIONS), ("20%",), _LIKELIHOOD, 9, LARGE, minutes=9
    ),
    **{
        f"qa-{at}": Eval(
            *("qa", (f"lost_in_the_middle/{file}",), _FEW, ("300",)),
            (*_WHOLE, "--set", "n_max=24"),
            16,
            minutes=20,
        )
        for at, file in _TEN.items()
    },
    "diversity": Eval("diversity", (XSUM,), ("buzz", *_ALL[3:-1]), ("20%",), _WHOLE, 12, minutes=11),
}


def _kept(*tables: str) -> dict[Place, str]:
    """The numbers of these tables of the paper, of which BUZZ's cache sizes are those after an eviction."""
    return {
        (_KEPT if row == "buzz" else row, column): number
        for (row, column), number in numbers("buzz", *tables).items()
    }


_TABLE_2 = _kept("table-2")


EXPERIMENTS = {
    "buzz-table-3": Experiment(
        ("wikitext", "wikitext-1.5b"),
        (Table("nll", against="buzz", rows=_STREAMED, paper=numbers("buzz", "table-3")),),
        "Llama-2-7B",
    ),
    "buzz-table-3-kept": Experiment(
        ("wikitext", "wikitext-kept", "wikitext-1.5b", "wikitext-kept-1.5b"),
        (Table("nll", against=_KEPT, rows=_OF_TABLE_3, paper=_kept("table-3")),),
        "Llama-2-7B",
        unequal=True,
    ),
    "buzz-table-2": Experiment(
        ("xsum", "xsum-1.5b"),
        (
            Table("rouge", against=_KEPT, rows=_ALL, paper=_TABLE_2),
            Table("logp", against=_KEPT, rows=_ALL, theirs=directions(_TABLE_2, _KEPT)),
        ),
        "Llama-2-7B",
    ),
    "buzz-figure-9": Experiment(
        ("xsum", "xsum-1.5b"),
        examples=Examples(("buzz:logn=true", "buzz", "h2o", "streamingllm", "full"), ("50%", "40%")),
    ),
    "buzz-table-c": Experiment(
        ("xsum-1.5b",),
        tuple(
            Table(score, against=_KEPT, rows=_OF_TABLE_C, paper=_kept(f"table-c-{score}"))
            for score in ("rouge1", "rouge2", "rougeL")
        ),
        "Llama-2-13B",
    ),
    "buzz-figure-4": Experiment(
        ("ratio", "ratio-1.5b"),
        (
            Table(
                *("nll", ("budget",), _BEST_WINDOW, _WINDOWS),
                worse=tuple(label for label in _WINDOWS if label != _BEST_WINDOW),
            ),
        ),
    ),
    "buzz-figure-4-kept": Experiment(
        ("ratio-kept", "ratio-kept-1.5b"),
        (
            Table(
                *("nll", ("budget",), _BEST_KEPT_WINDOW, _KEPT_WINDOWS),
                worse=tuple(label for label in _KEPT_WINDOWS if label != _BEST_KEPT_WINDOW),
            ),
        ),
    ),
    "buzz-figure-6": Experiment(
        tuple(f"qa-{at}" for at in _TEN),
        each(
            *("subspan_em", "f1", "logp"),
            by=("of",),
            against=_KEPT,
            names={file: f"gold at {at}" for at, file in _TEN.items()},
            pooled=ALL,
            only_pooled=True,
            same_item=True,
            worse=("h2o", "streamingllm"),
        ),
    ),
    "buzz-figure-7": Experiment(
        ("diversity",),
        (
            Table("self_bleu"),
            Table("full_self_bleu"),
            Table("alike", against="buzz", theirs={("streamingllm", "20%"): 1}),
        ),
    ),
    "buzz-figure-8": Experiment(
        ("xsum", "xsum-ablation", "xsum-1.5b", "xsum-ablation-1.5b"),
        each(
            *("rouge", "logp"),
            against="buzz",
            rows=("full", "buzz", *_ABLATIONS),
            budgets=("10%", "20%"),
            worse=_ABLATIONS,
        ),
    ),
}
