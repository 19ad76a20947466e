"""Experiments of docs/which-policy.md, which no paper has: policies, recall and quantized caches."""

from __future__ import annotations

from lab.papers.commands import CompareRun, EvalRun
from lab.papers.experiments.kinds import ALL, LARGE, SMALL, Experiment, Run, ScoreTable
from lab.papers.texts import DATA_SETS, FOUR_KINDS, TWELVE

POLICIES = ("recall", "roco", "h2o", "expected", "bumblebee", "buzz", "weightedkv", "streamingllm")
# larger models run with fewer policies, as they take longer
_FEWER = ("recall", "roco", "h2o", "expected", "streamingllm")
_OF_TASKS = ("full", "recall", "roco", "h2o", "streamingllm")
_QUANTIZED = ("full q8_0", "full q4_0")
_TYPES = ("f16", "q8_0", "q4_0")
# policies with newer scores than h2o's, and policies whose rows share a layer's budget
_SCORES = ("h2o", "h2o:heads=adaptive", "roco", "rkv", "expected", "expected:heads=adaptive")
_EXPECTED = "expected:queries=32"
# model, cells of h2o, tokens of a text, minutes. A row of `expected` has 512 cells and, for each of its query
# heads, 32 queries. A query in f32 takes as many bytes as a cell in f16, so h2o gets 512 + 32 * heads cells
_EQUAL = {
    "equal": ("", "608", 3072, 10),
    "equal-0.5b": (SMALL, "736", 2048, 15),
    "equal-1.5b": (LARGE, "704", 2048, 25),
}
_OF_LARGE_CACHES = ("recall", "roco", "h2o")
_FILES = tuple(file for files in FOUR_KINDS.values() for file in files)
_QUESTIONS, _SHORT = ("lost_in_the_middle/nq-open-oracle.jsonl.gz",), ("--set", "n_max=24")


def _passkey(shares: tuple[str, ...], repeats: int, minutes: int, model: str = "") -> EvalRun:
    hidden = ("--set", "lengths=512", "--set", f"repeats={repeats}")
    return EvalRun("passkey", (), _OF_TASKS, shares, hidden, 5 * repeats, model, minutes=minutes)


def _qa(shares: tuple[str, ...], n: int, minutes: int, model: str = "") -> EvalRun:
    return EvalRun("qa", _QUESTIONS, _OF_TASKS, shares, _SHORT, n, model, minutes=minutes)


_TWO = ("5%", "20%")
_TASKS: dict[str, Run] = {
    "which-passkey": _passkey((*_TWO, "40%"), 4, 18),
    "which-qa": _qa((*_TWO, "40%"), 40, 26),
    "which-passkey-0.5b": _passkey(_TWO, 2, 16, SMALL),
    "which-qa-0.5b": _qa(_TWO, 20, 12, SMALL),
    "which-passkey-1.5b": _passkey(_TWO, 2, 30, LARGE),
    "which-qa-1.5b": _qa(_TWO, 20, 30, LARGE),
}

_SAMPLED = {
    f"sampling-{temp}{size}": EvalRun(
        *("qa", _QUESTIONS, ("full",), ()),
        (*_SHORT, "--temp", temp),
        n,
        model,
        named=f"--temp {temp}",
        minutes=minutes,
    )
    for model, size, n, minutes in (("", "", 80, 4), (SMALL, "-0.5b", 40, 4), (LARGE, "-1.5b", 32, 6))
    for temp in ("0", "0.4", "0.8")
}


def _equal() -> dict[str, Run]:
    """Runs of `h2o` and `expected` that take the same number of bytes."""
    runs: dict[str, Run] = {}
    for name, (model, cells, n, minutes) in _EQUAL.items():
        how = {"model": model, "minutes": minutes}
        runs[name] = CompareRun(_FILES, ("full", "h2o"), (cells,), n, **how)
        runs[f"{name}-expected"] = CompareRun(_FILES, (_EXPECTED,), ("512",), n, **how)
    return runs


RUNS: dict[str, Run] = {
    "which-texts": CompareRun(_FILES, ("full", *POLICIES), ("512", "1024"), 3072, types=_TYPES, minutes=70),
    "scores": CompareRun(TWELVE, ("full", *_SCORES), ("256",), 2048, minutes=30),
    "which-texts-long": CompareRun(
        _FILES[::2], ("full", *_OF_LARGE_CACHES), ("2048", "4096"), 5120, minutes=30
    ),
    "which-texts-0.5b": CompareRun(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=SMALL, types=_TYPES, minutes=45
    ),
    "which-texts-1.5b": CompareRun(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=LARGE, types=_TYPES, minutes=70
    ),
    **_TASKS,
    **_SAMPLED,
    **_equal(),
}


_EXCESS = {"apart": "full", "against": "h2o", "rows": (*_QUANTIZED, *POLICIES)}
_BY_MODEL = {
    "by": ("model", "budget"),
    "names": {
        "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2 135M",
        SMALL: "Qwen 0.5B",
        LARGE: "Qwen 1.5B",
    },
}
_TEXT_RUNS = ("which-texts", "which-texts-0.5b", "which-texts-1.5b")
_ASKED = {
    "passkey": ("Hidden numbers found, %", "found"),
    "qa": ("Log-probability of the right answer to a question, nats a token", "logp"),
}


_POOLED = {"by": ("of", "budget"), "names": DATA_SETS, "pooled": ALL, "only_pooled": True}

EXPERIMENTS = {
    # the tables of docs/which-policy.md: all models side by side
    "which-short": Experiment(
        _TEXT_RUNS,
        (
            ScoreTable("above", **_BY_MODEL, **_EXCESS | {"against": ""}),
            # leave out other policies, which have as many cells and bytes as h2o
            ScoreTable("device", **_BY_MODEL, rows=("full", *_QUANTIZED, "h2o")),
        ),
        together=True,
        commands=False,
    ),
    # few rows: tests are corrected within a table, and eight texts cannot show more than six differences
    "which-default": Experiment(
        _TEXT_RUNS,
        tuple(
            ScoreTable("above", **_BY_MODEL, **_EXCESS | {"rows": rows}, budgets=("512",))
            for rows in (("h2o", "roco", "recall"), ("h2o", "expected"), ("h2o", "streamingllm"))
        )
        + (ScoreTable("host", **_BY_MODEL, rows=("recall",), budgets=("512",)),),
        together=True,
    ),
    # caches of equal bytes; the bytes of `expected` include its queries
    "which-equal": Experiment(
        tuple(_equal()),
        (
            ScoreTable(
                *("above", ("model",), "h2o", ("h2o", _EXPECTED)),
                names=_BY_MODEL["names"],
                apart="full",
                title="Perplexity above the full cache's, %, in equal bytes",
            ),
        ),
        together=True,
    ),
    "which-sampling": Experiment(
        tuple(_SAMPLED),
        (ScoreTable("f1", ("model",), "--temp 0.8", names=_BY_MODEL["names"], head="sampling"),),
        together=True,
    ),
    "which-texts-long": Experiment(
        ("which-texts-long",),
        (ScoreTable("above", apart="full", rows=_OF_LARGE_CACHES),),
    ),
    "scores": Experiment(
        ("scores",),
        (
            ScoreTable("nll", against="h2o", **_POOLED, rows=("full", *_SCORES)),
            ScoreTable("device", **_POOLED, rows=("full", *_SCORES)),
        ),
    ),
    "which-tasks": Experiment(
        tuple(_TASKS),
        tuple(
            ScoreTable("", **_BY_MODEL, against="full", rows=_OF_TASKS, scores={name: score}, title=title)
            for name, (title, score) in _ASKED.items()
        ),
        together=True,
    ),
}
