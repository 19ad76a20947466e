"""Seven tasks with a fifth of the cache, for lab/papers/policy-numbers.md; no paper has these."""

from __future__ import annotations

from lab.papers.commands import EvalRun
from lab.papers.experiments.bumblebee import CHOICES
from lab.papers.experiments.kinds import Experiment, Run, ScoreTable
from lab.papers.texts import LONGBENCH, XSUM

_POLICIES = ("full", "recall", "roco", "h2o", "buzz", "streamingllm")
_AT_20 = (_POLICIES, ("20%",))
_HIDDEN = ("--set", "lengths=512", "--set", "repeats=20")

# 100 items of each task, or all if it has fewer
_TASKS = (
    EvalRun("passkey", (), *_AT_20, _HIDDEN, minutes=45),
    EvalRun("needle", ("paul_graham_essays/",), *_AT_20, _HIDDEN, minutes=30),
    EvalRun(
        "qa", ("lost_in_the_middle/nq-open-oracle.jsonl.gz",), *_AT_20, ("--set", "n_max=24"), 100, minutes=9
    ),
    EvalRun("summarize", (XSUM,), *_AT_20, ("--set", "likelihood=true"), 100, minutes=25),
    EvalRun(
        "choice", (f"lm_eval_tasks/{CHOICES['OpenBookQA']}",), *_AT_20, ("--set", "shots=5"), 100, minutes=5
    ),
    EvalRun("longbench", (LONGBENCH,), *_AT_20, ("--max-prompt", "1024"), 100, minutes=110),
    EvalRun(
        *("stream", ("mt_bench/question.jsonl", "mt_bench/reference_answer_gpt-4.jsonl"), *_AT_20),
        ("--set", "scored=true", "--limit", "100"),
        minutes=16,
    ),
)

RUNS: dict[str, Run] = {f"task-{run.task}": run for run in _TASKS}


# for each task, the column's heading and the score that the column shows
_SHOWN = {
    "passkey": ("passkey, %", "found"),
    "needle": ("needle, %", "found"),
    "qa": ("qa, nats", "logp"),
    "summarize": ("summarize, nats", "logp"),
    "choice": ("choice, nats", "right"),
    "longbench": ("longbench, %", "score"),
    "stream": ("stream, perplexity", "nll"),
}

EXPERIMENTS = {
    "tasks": Experiment(
        tuple(RUNS),
        (
            ScoreTable(
                *("", ("task",), "full", _POLICIES),
                names={task: name for task, (name, _) in _SHOWN.items()},
                scores={task: score for task, (_, score) in _SHOWN.items()},
                title="Score by task",
            ),
        ),
    ),
}
