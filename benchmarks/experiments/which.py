"""What docs/choosing.md says of tasks: all policies by share of the prompt. No paper's."""

from __future__ import annotations

from commands import Eval, Run

from experiments.kinds import Experiment, Table

_POLICIES = ("full", "recall", "roco", "h2o", "bumblebee", "buzz", "weightedkv", "streamingllm")
_SHARES = ("5%", "10%", "20%", "40%")
_HIDDEN = ("--set", "lengths=512", "--set", "repeats=4")
_QUESTIONS = ("lost_in_the_middle/nq-open-oracle.jsonl.gz",)

RUNS: dict[str, Run] = {
    "which-passkey": Eval("passkey", (), _POLICIES, _SHARES, _HIDDEN, 20, minutes=38),
    "which-qa": Eval("qa", _QUESTIONS, _POLICIES, _SHARES, ("--set", "n_max=24"), 40, minutes=25),
}

EXPERIMENTS = {
    "which-tasks": Experiment(
        tuple(RUNS),
        (
            Table(
                *("", ("budget",), "full", _POLICIES),
                scores={"passkey": "found"},
                title="Hidden numbers found, %",
            ),
            Table(
                *("", ("budget",), "full", _POLICIES),
                scores={"qa": "logp"},
                title="Log-probability of the right answer to a question, nats a token",
            ),
        ),
    ),
}
