"""WeightedKV's experiments (arXiv:2503.01330)."""

from __future__ import annotations

from lab.papers.commands import CompareRun, MapRun
from lab.papers.experiments.kinds import (
    ALL,
    LARGE,
    UNGROUPED,
    Experiment,
    Run,
    ScoreTable,
    columns,
    numbers,
    of_map,
)
from lab.papers.texts import DATA_SETS, EIGHT, TWELVE

# the paper gives every policy 4 sinks
_POLICIES = ("streamingllm", "tova:sinks=4", "h2o:sinks=4", "cam", "weightedkv")
_EVICTS = "weightedkv:merge=false"

# as in the paper: 4 sinks and a window of 124 tokens, 128 other tokens, and an eviction after each token
_EACH = "weightedkv:window=124"
_EACH_EVICTS = f"{_EACH}:merge=false"
_OF_EACH = "full", *_POLICIES[:-1], _EACH, _EACH_EVICTS
_AFTER_EACH = "--evict-every", "1"

RUNS: dict[str, Run] = {
    "texts": CompareRun(TWELVE, ("full", *_POLICIES, _EVICTS), ("256", "1024"), 4096, minutes=100),
    "texts-1.5b": CompareRun(EIGHT, ("full", *_POLICIES, _EVICTS), ("256",), 2048, model=LARGE, minutes=70),
    "texts-each": CompareRun(TWELVE, _OF_EACH, ("256",), 2048, more=_AFTER_EACH, minutes=40),
    "texts-each-ungrouped": CompareRun(
        TWELVE, _OF_EACH, ("256",), 2048, more=_AFTER_EACH, model=UNGROUPED, minutes=60
    ),
    "map-values": MapRun("values", TWELVE, 1024, minutes=3),
    "map-values-1.5b": MapRun("values", EIGHT, 512, LARGE, minutes=5),
}

_POOLED = {"by": ("of", "budget"), "names": DATA_SETS, "pooled": ALL, "only_pooled": True}
_TABLE_1 = numbers("weightedkv", "table-1")
_OF_256 = ("PG19, 256", "ProofPile, 256", "ArXiv, 256")

EXPERIMENTS = {
    "weightedkv-table-1": Experiment(
        ("texts", "texts-1.5b"),
        (ScoreTable("nll", against="weightedkv", rows=("full", *_POLICIES), paper=_TABLE_1, **_POOLED),),
        "Llama-2-7B, context 4k",
    ),
    "weightedkv-table-1-each": Experiment(
        ("texts-each", "texts-each-ungrouped"),
        (
            ScoreTable(
                "nll",
                against=_EACH,
                rows=_OF_EACH[:-1],
                paper={
                    (_EACH if row == "weightedkv" else row, at): number
                    for (row, at), number in columns(_TABLE_1, _OF_256).items()
                },
                **_POOLED,
            ),
        ),
        "Llama-2-7B, context 4k",
    ),
    "weightedkv-figure-4": Experiment(
        ("texts", "texts-1.5b"),
        (ScoreTable("nll", against="weightedkv", rows=("weightedkv", _EVICTS), worse=(_EVICTS,), **_POOLED),),
    ),
    "weightedkv-figure-4-each": Experiment(
        ("texts-each", "texts-each-ungrouped"),
        (ScoreTable("nll", against=_EACH, rows=(_EACH, _EACH_EVICTS), worse=(_EACH_EVICTS,), **_POOLED),),
    ),
    "weightedkv-figure-1": Experiment(
        ("map-values", "map-values-1.5b"),
        (of_map("values", "matrix", "values", {("keys", "rank"): -1, ("keys before RoPE", "rank"): -1}),),
    ),
}
