"""WeightedKV's experiments (arXiv:2503.01330)."""

from __future__ import annotations

from commands import Compare, Map, Run

from experiments.kinds import (
    ALL,
    BOOKS,
    EIGHT,
    LARGE,
    OF_TEXTS,
    TEXTS,
    UNGROUPED,
    Experiment,
    Table,
    numbers,
    of_map,
)

# the paper gives every policy 4 sinks
_POLICIES = ("streamingllm", "tova:sinks=4", "h2o:sinks=4", "cam", "weightedkv")
_EVICTS = "weightedkv:merge=false"

RUNS: dict[str, Run] = {
    "texts": Compare(TEXTS, ("full", *_POLICIES, _EVICTS), ("256", "1024"), 4096),
    "texts-1.5b": Compare(EIGHT, ("full", *_POLICIES, _EVICTS), ("256",), 2048, model=LARGE),
    "texts-ungrouped": Compare(TEXTS, ("weightedkv", _EVICTS), ("256",), 2048, model=UNGROUPED),
    "texts-16k": Compare(BOOKS[:1], _POLICIES, ("256",), 16384, upto=(8192,)),
    "map-values": Map("values", TEXTS, 1024),
    "map-values-1.5b": Map("values", EIGHT, 512, LARGE),
    "curve": Compare(BOOKS[:1], ("weightedkv", _EVICTS), ("256",), 32768),
}

EXPERIMENTS = {
    "weightedkv-table-1": Experiment(
        ("texts", "texts-1.5b"),
        (
            Table(
                *("nll", ("of", "budget"), "weightedkv", ("full", *_POLICIES)),
                names=OF_TEXTS,
                pooled=ALL,
                only_pooled=True,
                paper=numbers("weightedkv", "table-1"),
            ),
        ),
        "Llama-2-7B, context 4k",
        minutes=(100, 70),
    ),
    "weightedkv-table-1-long": Experiment(
        ("texts-16k",),
        (
            Table(
                *("nll", ("tokens",), "weightedkv", _POLICIES),
                names={"8192": "8k", "16384": "16k"},
                paper=numbers("weightedkv", "table-1-long"),
            ),
        ),
        "Llama-2-7B, PG19, cache of 256",
        minutes=(12,),
    ),
    "weightedkv-figure-1": Experiment(
        ("map-values", "map-values-1.5b"),
        of_map("values", "matrix", "values", {("keys", "rank"): -1, ("keys before RoPE", "rank"): -1}),
        minutes=(5, 5),
    ),
    "weightedkv-figure-4": Experiment(
        ("texts", "texts-ungrouped", "texts-1.5b"),
        (
            Table(
                *("nll", ("of", "budget"), "weightedkv", ("weightedkv", _EVICTS)),
                names=OF_TEXTS,
                pooled=ALL,
                only_pooled=True,
                worse=(_EVICTS,),
            ),
        ),
        minutes=(0, 17, 0),
    ),
    "weightedkv-figure-4-curve": Experiment(
        ("curve",),
        (Table("nll", against="weightedkv", worse=(_EVICTS,)),),
        minutes=(10,),
    ),
}
