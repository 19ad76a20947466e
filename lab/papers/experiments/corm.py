"""CORM's experiments (arXiv:2404.15949)."""

from __future__ import annotations

from lab.papers.commands import Compare, Eval, Map
from lab.papers.experiments.kinds import ALL, LARGE, Experiment, Run, Table, numbers, of_map
from lab.papers.experiments.longbench import ENGLISH, POOLED, STRATA
from lab.papers.texts import BOOKS, CHAPTERS, DATA_SETS, EIGHT, TWELVE

_OTHERS = ("streamingllm", "scissorhands:window=256:history=256", "h2o:window=256")
_WINDOWS = tuple(f"corm:window={window}:history={window}" for window in (128, 64, 32, 16))
# half of the paper's 3,500 tokens and 1,024 cells, which would take four times as long
_LONG = ("--max-prompt", "2048")
# read in one batch, so that the first plan comes after the prompt, as with --prefill whole
_WHOLE = ("-b", "2048", *_LONG)
# 4,096 are in `texts-corm`, and 1,024 with the larger model in `texts-corm-1.5b`
_SIZES = (512, 1024, 2048)
# the fewest that a test of one difference can tell
_SIX = (*BOOKS[:3], *CHAPTERS[:3])

_MAPS = ("share", "attention", "queries")

RUNS: dict[str, Run] = {
    "texts-corm": Compare(EIGHT, ("full", "corm", *_OTHERS), ("1792",), 4096, minutes=27),
    "texts-corm-1.5b": Compare(EIGHT, ("full", "corm", *_OTHERS), ("448",), 1024, model=LARGE, minutes=30),
    "texts-corm-long": Compare(_SIX, ("corm",), (), 8192, minutes=12),
    "texts-corm-long-h2o": Compare(_SIX, _OTHERS[-1:], ("2304",), 8192, minutes=13),
    "texts-corm-long-full": Compare(_SIX, ("full",), (), 8192, minutes=15),
    "texts-corm-windows": Compare(EIGHT, ("corm", *_WINDOWS), (), 2048, minutes=12),
    "texts-corm-windows-1.5b": Compare(EIGHT, (_WINDOWS[0], _WINDOWS[-1]), (), 1024, model=LARGE, minutes=10),
    "corm-128": Compare(TWELVE, ("full", _WINDOWS[0]), (), 2048, minutes=7),
    **{f"corm-{size}": Compare(TWELVE, ("corm",), (), size, minutes=size // 512) for size in _SIZES},
    "corm-512-1.5b": Compare(EIGHT, ("corm",), (), 512, model=LARGE, minutes=3),
    **{f"map-{kind}": Map(kind, TWELVE, 1024, minutes=3) for kind in _MAPS},
    **{f"map-{kind}-1.5b": Map(kind, EIGHT, 512, LARGE, minutes=5) for kind in _MAPS},
    "longbench": Eval(
        "longbench", (ENGLISH,), ("full", *_OTHERS), ("512",), ("--prefill", "whole", *_LONG), minutes=120
    ),
    "longbench-corm": Eval("longbench", (ENGLISH,), ("corm",), ("100%",), _WHOLE, minutes=100),
}

_POOLED = {"names": DATA_SETS, "pooled": ALL, "only_pooled": True}
_BY_BUDGET = {"by": ("of", "budget"), **_POOLED}
_LATE = {"late": True, "title": "Perplexity once the budget is full"}
_OF_TABLE_3 = _BY_BUDGET | {"rows": ("full", "corm", "corm, capped", *_OTHERS)}
_LONGER = _BY_BUDGET | {"rows": ("full", "corm", _OTHERS[-1])}

EXPERIMENTS = {
    "corm-tables-1-2": Experiment(
        ("longbench", "longbench-corm"),
        (
            Table(
                *("score", ("of",), "corm", ("full", *_OTHERS, "corm")),
                pooled=POOLED,
                only_pooled=True,
                strata=STRATA,
                paper=numbers("corm", "table-2"),
            ),
        ),
        "LLaMA2-7B-Chat",
    ),
    "corm-table-3": Experiment(
        ("texts-corm", "texts-corm-1.5b"),
        (
            # before, the others hold all, and CORM alone can lose
            Table("nll", **_OF_TABLE_3, **_LATE, against="corm", worse=_OTHERS),
            *(Table(score, **_OF_TABLE_3) for score in ("holds", "device")),
        ),
    ),
    "corm-tables-7-8": Experiment(
        ("texts-corm-long", "texts-corm-long-h2o", "texts-corm-long-full"),
        (
            # six texts are too few for a test that also counts the full cache
            Table("nll", **_LATE, against="corm", worse=_OTHERS, **_BY_BUDGET, rows=("corm", _OTHERS[-1])),
            Table("nll", **_LONGER, **_LATE | {"title": "The same with `full`, without a test"}),
            Table("device", **_LONGER),
        ),
    ),
    "corm-table-4": Experiment(
        ("corm-128", "texts-corm-1.5b", "texts-corm-windows-1.5b"),
        (
            Table(
                *("nll", ("tokens",), _WINDOWS[0], ("full", _WINDOWS[0])),
                theirs={("full", tokens): -1 for tokens in ("2048", "1024")},
                paper=numbers("corm", "table-4"),
            ),
            Table("evicted", ("tokens",), rows=_WINDOWS[:1], paper=numbers("corm", "table-4-reduction")),
            Table("device", ("tokens",), rows=("full", _WINDOWS[0])),
        ),
        "LLaMA1-7B",
    ),
    "corm-windows": Experiment(
        ("texts-corm-windows", "texts-corm-1.5b", "texts-corm-windows-1.5b"),
        (
            Table("nll", ("of",), "corm", ("corm", *_WINDOWS), worse=_WINDOWS, **_POOLED),
            Table("evicted", ("of",), rows=("corm", *_WINDOWS), **_POOLED),
        ),
    ),
    "corm-figure-4": Experiment(
        (*(f"corm-{size}" for size in _SIZES), "texts-corm", "corm-512-1.5b", "texts-corm-1.5b"),
        (Table("evicted", ("tokens",), rows=("corm",)),),
    ),
    "corm-figures-1-2-3": Experiment(
        tuple(f"map-{kind}{size}" for size in ("", "-1.5b") for kind in _MAPS),
        (
            *of_map("share", "layers", "all other layers", {("the first two layers", "important keys"): 1}),
            *of_map(
                *("attention", "the other query", "a random query"),
                {("the most similar query", "overlap"): 1},
            ),
            *of_map(
                *("queries", "where", "by chance"),
                {("the most similar query", f"within {n}"): 1 for n in (1, 16, 256)},
            ),
        ),
    ),
}
