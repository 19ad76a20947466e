"""BumbleBee's experiments (COLM 2024)."""

from __future__ import annotations

from lab.papers.commands import CompareRun, EvalRun
from lab.papers.experiments.kinds import ALL, LARGE, Experiment, Run, ScoreTable, each, numbers
from lab.papers.texts import EIGHT, XSUM

# data sets on which a model of 135M parameters is better than guessing
CHOICES = {
    "OpenBookQA": "openbookqa_test.jsonl",
    "COPA": "copa_test.jsonl",
    "PiQA": "piqa_test.jsonl",
}
_LARGE = tuple(CHOICES)[:2]

# no sinks, as in the paper
_OWN = "bumblebee:sinks=0"
_POWER = "bumblebee:sinks=0:phi=power"
_ALL = ("full", "local", "random", "streamingllm", "h2o", _OWN, _POWER)
_FEW = ("full", "random", "streamingllm", "h2o", _OWN)
_MIXTURES = tuple(f"bumblebee:sinks=0:mixture={mixture}" for mixture in (0, 0.2, 0.4, 0.6, 0.8, 1))
_WHOLE = ("--prefill", "whole")
_SUMMARY = (*_WHOLE, "--set", "likelihood=true")
# as in the paper's Algorithm 2, each token is decoded alone and followed by an eviction
_STREAM = ("--prefill", "stream", "-b", "1", "--evict-every", "1", "--set", "shots=5")


def _choice(name: str, policies: tuple[str, ...], n: int, model: str = "") -> EvalRun:
    minutes = 20 if model else max(n // 2, 7)
    files = (f"lm_eval_tasks/{CHOICES[name]}",)
    return EvalRun("choice", files, policies, ("10%",), _STREAM, n, model, minutes=minutes)


RUNS: dict[str, Run] = {
    **{f"choice-{name.lower()}": _choice(name, _ALL, 24) for name in CHOICES},
    **{f"choice-{name.lower()}-1.5b": _choice(name, _FEW, 12, LARGE) for name in _LARGE},
    "xsum-3shots": EvalRun(
        "summarize", (XSUM,), _ALL, ("20%",), (*_SUMMARY, "--set", "shots=3"), 12, minutes=30
    ),
    # use one example, because with three examples this model would need two minutes for a summary
    "xsum-1shot-1.5b": EvalRun(
        *("summarize", (XSUM,), ("full", *_ALL[3:-1]), ("20%",), (*_SUMMARY, "--set", "shots=1"), 8, LARGE),
        minutes=20,
    ),
    "xsum-mixture": EvalRun("summarize", (XSUM,), (_OWN, *_MIXTURES), ("20%",), _SUMMARY, 24, minutes=12),
    "speed": CompareRun(EIGHT, ("full", _OWN, "h2o"), ("102", "51"), 512, ("-b", "1"), minutes=5),
}

_FEW_SHOT = {"by": ("of",), "against": _OWN, "rows": _ALL, "pooled": ALL, "only_pooled": True}
_FEW_SHOT |= {"names": {file: name for name, file in CHOICES.items()}}

EXPERIMENTS = {
    "bumblebee-table-1": Experiment(
        (
            *(f"choice-{name.lower()}" for name in CHOICES),
            *(f"choice-{name.lower()}-1.5b" for name in _LARGE),
        ),
        (
            ScoreTable("acc_norm", paper=numbers("bumblebee", "table-1"), **_FEW_SHOT),
            ScoreTable("right", worse=("local", "random", "h2o"), **_FEW_SHOT),
        ),
        "LLaMA-7B",
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
        (
            ScoreTable(
                "logp",
                against=_OWN,
                rows=(*_MIXTURES[:2], _OWN, *_MIXTURES[2:]),
                worse=(_MIXTURES[0], _MIXTURES[-1]),
            ),
        ),
    ),
    "bumblebee-table-6": Experiment(
        ("speed",),
        (
            # as in the paper, the rows are budgets of BumbleBee: a tenth of the cells (51), a fifth (102)
            ScoreTable(
                *("ms", ("label",), "51", ("51", "102")),
                row="budget",
                theirs={("102", _OWN): 1},
                head="tokens in the cache",
                title="CPU time of a token, ms, with a tenth of the tokens and with a fifth",
            ),
        ),
    ),
}
