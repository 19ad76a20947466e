"""CORM's experiments (arXiv:2404.15949)."""

from __future__ import annotations

from kvtool.tasks.longbench import CATEGORIES, LANGUAGES
from lab.papers.commands import CompareRun, EvalRun, MapRun
from lab.papers.experiments.kinds import ALL, LARGE, Experiment, Run, ScoreTable, numbers, of_map
from lab.papers.texts import DATA_SETS, EIGHT, LONGBENCH, TWELVE

_OTHERS = ("streamingllm", "scissorhands:window=256:history=256", "h2o:window=256")
_WINDOWS = tuple(f"corm:window={window}:history={window}" for window in (128, 64, 32, 16))
# fewer than the paper's 3,500 tokens, which would take four times as long
_LONG = ("--max-prompt", "2048")
# CORM cannot run with --prefill whole. With -b 2048 it reads a prompt in one batch, so that it also evicts
# after the prompt
_WHOLE = ("-b", "2048", *_LONG)

_MAPS = ("share", "attention", "queries")

RUNS: dict[str, Run] = {
    "texts-corm": CompareRun(EIGHT, ("full", "corm", *_OTHERS), ("1792",), 4096, minutes=27),
    "texts-corm-1.5b": CompareRun(EIGHT, ("full", "corm", *_OTHERS), ("448",), 1024, model=LARGE, minutes=30),
    "texts-corm-windows": CompareRun(EIGHT, ("corm", *_WINDOWS), (), 2048, minutes=12),
    "texts-corm-windows-1.5b": CompareRun(
        EIGHT, (_WINDOWS[0], _WINDOWS[-1]), (), 1024, model=LARGE, minutes=10
    ),
    "corm-128": CompareRun(TWELVE, ("full", _WINDOWS[0]), (), 2048, minutes=7),
    **{f"map-{kind}": MapRun(kind, TWELVE, 1024, minutes=3) for kind in _MAPS},
    **{f"map-{kind}-1.5b": MapRun(kind, EIGHT, 512, LARGE, minutes=5) for kind in _MAPS},
    "longbench": EvalRun(
        "longbench", (LONGBENCH,), ("full", *_OTHERS), ("512",), ("--prefill", "whole", *_LONG), minutes=120
    ),
    "longbench-corm": EvalRun("longbench", (LONGBENCH,), ("corm",), ("100%",), _WHOLE, minutes=100),
}

_POOLED = {"names": DATA_SETS, "pooled": ALL, "only_pooled": True}
_OF_TABLE_3 = {"by": ("of", "budget"), "rows": ("full", "corm", "corm, capped", *_OTHERS), **_POOLED}

EXPERIMENTS = {
    "corm-tables-1-2": Experiment(
        ("longbench", "longbench-corm"),
        (
            ScoreTable(
                *("score", ("of",), "corm", ("full", *_OTHERS, "corm")),
                pooled=LANGUAGES,
                only_pooled=True,
                strata={name: category for category, names in CATEGORIES.items() for name in names},
                paper=numbers("corm", "table-2"),
            ),
        ),
        "LLaMA2-7B-Chat",
    ),
    "corm-table-3": Experiment(
        ("texts-corm", "texts-corm-1.5b"),
        (
            # late=True, because before the budget is full, only CORM evicts
            ScoreTable(
                "nll",
                **_OF_TABLE_3,
                against="corm",
                worse=_OTHERS,
                late=True,
                title="Perplexity once the budget is full",
            ),
            *(ScoreTable(score, **_OF_TABLE_3) for score in ("holds", "device")),
        ),
    ),
    "corm-table-4": Experiment(
        ("corm-128", "texts-corm-1.5b", "texts-corm-windows-1.5b"),
        (
            ScoreTable(
                *("nll", ("tokens",), _WINDOWS[0], ("full", _WINDOWS[0])),
                theirs={("full", tokens): -1 for tokens in ("2048", "1024")},
                paper=numbers("corm", "table-4"),
            ),
            ScoreTable("evicted", ("tokens",), rows=_WINDOWS[:1], paper=numbers("corm", "table-4-reduction")),
            ScoreTable("device", ("tokens",), rows=("full", _WINDOWS[0])),
        ),
        "LLaMA1-7B",
    ),
    "corm-windows": Experiment(
        ("texts-corm-windows", "texts-corm-1.5b", "texts-corm-windows-1.5b"),
        (
            ScoreTable("nll", ("of",), "corm", ("corm", *_WINDOWS), worse=_WINDOWS, **_POOLED),
            ScoreTable("evicted", ("of",), rows=("corm", *_WINDOWS), **_POOLED),
        ),
    ),
    "corm-figures-1-2-3": Experiment(
        tuple(f"map-{kind}{size}" for size in ("", "-1.5b") for kind in _MAPS),
        (
            of_map("share", "layers", "all other layers", {("the first two layers", "important keys"): 1}),
            of_map(
                *("attention", "the other query", "a random query"),
                {("the most similar query", "overlap"): 1},
            ),
            of_map(
                *("queries", "where", "by chance"),
                {("the most similar query", f"within {n}"): 1 for n in (1, 16, 256)},
            ),
        ),
    ),
}
