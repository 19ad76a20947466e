"""BumbleBee's experiments (COLM 2024)."""

from __future__ import annotations

from lab.papers.commands import Compare, Eval, Inspect
from lab.papers.experiments.kinds import (
    ALL,
    EIGHT,
    LARGE,
    XSUM,
    Experiment,
    Run,
    Table,
    columns,
    directions,
    each,
    numbers,
)
from lab.papers.experiments.longbench import ENGLISH, ONLY_SIX
from lab.papers.programs import Chosen

# on these a model of 135M parameters is better than guessing
CHOICES = {
    "OpenBookQA": "openbookqa_test.jsonl",
    "COPA": "copa_test.jsonl",
    "PiQA": "piqa_test.jsonl",
}
_LARGE = tuple(CHOICES)[:2]
_HOTPOT = "hotpotqa_distractor/hotpotqa_distractor_100.jsonl"
_HOTPOT_NUMBERS = columns(numbers("bumblebee", "table-2"), ("hotpotqa",))
_HOTPOT_NAME = {"hotpotqa_distractor_100.jsonl": "hotpotqa"}
_ESSAYS = tuple(
    f"paul_graham_essays/{name}.txt"
    for name in (
        *("gap", "island", "love", "nft", "vb", "weird", "addiction", "apple", "avg", "before", "boss"),
        *("copy", "diff", "founders", "gba", "goodtaste", "hubs", "know", "laundry", "mod"),
    )
)
_TWELVE = (*_ESSAYS[:3], *_ESSAYS[6:15])

# no policy is given what the paper's does not have; h2o has no sinks unless asked for
_OWN = "bumblebee:sinks=0"
_POWER = "bumblebee:sinks=0:phi=power"
_ALL = ("full", "local", "random", "streamingllm", "h2o", _OWN, _POWER)
_FEW = ("full", "random", "streamingllm", "h2o", _OWN)
_CHOOSERS = _FEW[1:]
_HOLDERS = ("h2o", _OWN, "bumblebee")
_MIXTURES = tuple(f"bumblebee:sinks=0:mixture={mixture}" for mixture in (0, 0.2, 0.4, 0.6, 0.8, 1))
_COSINES = tuple(f"bumblebee:sinks=0:cosine={cosine}" for cosine in ("shifted", "absolute"))
_GROWS = "bumblebee:sinks=0:grow=5"
_WHOLE = ("--prefill", "whole")
_SUMMARY = (*_WHOLE, "--set", "likelihood=true")
_QUESTIONS = ("--set", "n_max=24")
# Algorithm 2: one token, one decision
_STREAM = ("--prefill", "stream", "-b", "1", "--evict-every", "1", "--set", "shots=5")


def _choice(name: str, policies: tuple[str, ...], n: int, model: str = "") -> Eval:
    minutes = 20 if model else max(n // 2, 7)
    files = (f"lm_eval_tasks/{CHOICES[name]}",)
    return Eval("choice", files, policies, ("10%",), _STREAM, n, model, minutes=minutes)


def _few_shot(names: tuple[str, ...], runs: tuple[str, ...]) -> Experiment:
    """Some columns of Table 1."""
    paper = columns(numbers("bumblebee", "table-1"), names)
    how = {
        "by": ("of",),
        "against": _OWN,
        "rows": _ALL,
        "names": {CHOICES[name]: name for name in names},
        "pooled": ALL,
        "only_pooled": True,
    }
    worse = ("local", "random", "h2o")
    return Experiment(
        runs, (Table("acc_norm", **how, paper=paper), Table("right", **how, worse=worse)), "LLaMA-7B"
    )


# it spreads over time, where H2O holds on to the first and does not move with the last
_SPREAD = {
    ("h2o", f"{part} quarter"): sign
    for part, sign in {"first": 1, "second": -1, "third": -1, "last": -1}.items()
}

RUNS: dict[str, Run] = {
    **{f"choice-{name.lower()}": _choice(name, _ALL, 24) for name in CHOICES},
    **{f"choice-{name.lower()}-1.5b": _choice(name, _FEW, 12, LARGE) for name in _LARGE},
    "hotpotqa": Eval("qa", (_HOTPOT,), ("full", *_ALL[3:]), ("20%",), (*_WHOLE, *_QUESTIONS), 24, minutes=25),
    "longbench-bumblebee": Eval(
        *("longbench", (ENGLISH,), ("full", *_ALL[3:]), ("20%",)),
        (*_WHOLE, "--max-prompt", "2048", *ONLY_SIX),
        minutes=40,
    ),
    "xsum-3shots": Eval(
        "summarize", (XSUM,), _ALL, ("20%",), (*_SUMMARY, "--set", "shots=3"), 12, minutes=30
    ),
    # three would take this model two minutes a summary
    "xsum-1shot-1.5b": Eval(
        *("summarize", (XSUM,), ("full", *_ALL[3:-1]), ("20%",), (*_SUMMARY, "--set", "shots=1"), 8, LARGE),
        minutes=20,
    ),
    "xsum-mixture": Eval(
        "summarize", (XSUM,), (_OWN, *_MIXTURES, *_COSINES, _GROWS), ("20%",), _SUMMARY, 24, minutes=17
    ),
    "inspect": Inspect(_ESSAYS, _HOLDERS, "20", 192, minutes=2),
    "inspect-1.5b": Inspect(_ESSAYS, _HOLDERS, "20", 192, LARGE, minutes=8),
    "chosen": Chosen(_TWELVE, _CHOOSERS, 512, minutes=5),
    "chosen-1.5b": Chosen(_TWELVE[:8], _CHOOSERS, 256, LARGE, minutes=7),
    "speed": Compare(EIGHT, ("full", _OWN, "h2o"), ("102", "51"), 512, ("-b", "1"), minutes=5),
}

EXPERIMENTS = {
    "bumblebee-table-1": _few_shot(
        tuple(CHOICES),
        (
            *(f"choice-{name.lower()}" for name in CHOICES),
            *(f"choice-{name.lower()}-1.5b" for name in _LARGE),
        ),
    ),
    "bumblebee-table-2": Experiment(
        ("longbench-bumblebee",),
        (
            Table(
                *("score", ("of",), _OWN, ("full", *_ALL[3:])),
                pooled=ALL,
                only_pooled=True,
                strata=dict.fromkeys(
                    ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "qmsum", "trec"), "all"
                ),
                paper=numbers("bumblebee", "table-2"),
                transposed=True,
            ),
        ),
        "Llama-2-7B-chat",
    ),
    "bumblebee-table-2-hotpotqa": Experiment(
        ("hotpotqa",),
        (
            Table(
                *("f1", ("of",), _OWN),
                names=_HOTPOT_NAME,
                paper=_HOTPOT_NUMBERS,
            ),
            Table("logp", ("of",), _OWN, names=_HOTPOT_NAME, theirs=directions(_HOTPOT_NUMBERS, _OWN)),
        ),
        "Llama-2-7B-chat",
    ),
    "bumblebee-figure-3": Experiment(
        ("xsum-3shots", "xsum-1shot-1.5b"),
        each(
            *("rouge", "logp"),
            against=_OWN,
            rows=_ALL,
            worse=("local", "random", "streamingllm", "h2o"),
        ),
    ),
    "bumblebee-lambda": Experiment(
        ("xsum-mixture",),
        each(
            *("rouge", "logp"),
            against=_OWN,
            rows=(*_MIXTURES[:2], _OWN, *_MIXTURES[2:]),
            worse=(_MIXTURES[0], _MIXTURES[-1]),
        ),
    ),
    "bumblebee-cosines": Experiment(
        ("xsum-mixture",),
        (Table("logp", ("budget",), _OWN, (_OWN, *_COSINES), worse=_COSINES),),
    ),
    "bumblebee-growing": Experiment(("xsum-mixture",), (Table("logp", ("budget",), _OWN, (_OWN, _GROWS)),)),
    "bumblebee-figure-6": Experiment(
        ("inspect", "inspect-1.5b"),
        (Table("held", ("part",), _OWN, theirs=_SPREAD),),
    ),
    "bumblebee-figure-8": Experiment(
        ("chosen", "chosen-1.5b"),
        (Table("nearest", ("tokens",), _OWN, worse=("random", "streamingllm", "h2o")),),
    ),
    "bumblebee-table-6": Experiment(
        ("speed",),
        (
            # the paper's own comparison: 10:1 against 5:1
            Table(
                *("ms", ("label",), "51", ("51", "102")),
                row="budget",
                theirs={("102", _OWN): 1},
                head="tokens in the cache",
                title="CPU time of a token, ms, with a tenth of the tokens and with a fifth",
            ),
            Table("ms", against=_OWN),
            Table("device"),
        ),
    ),
}
