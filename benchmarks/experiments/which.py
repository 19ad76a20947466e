"""What docs/which-policy.md says: the papers' policies beside recall and quantized caches. No paper's."""

from __future__ import annotations

from commands import Compare, Eval, Run

from experiments.kinds import LARGE, SMALL, WIKI, XSUM, Experiment, Table

POLICIES = ("recall", "roco", "h2o", "bumblebee", "buzz", "weightedkv", "streamingllm")
_FULL = ("full", "full q8_0", "full q4_0")
# two texts of each of four kinds
_TEXTS = {
    "books": ("pg19/10321.txt", "janeausten/emma.txt"),
    "articles": (WIKI, "paul_graham_essays/worked.txt"),
    "papers": ("arxiv/2404.15949.txt", "arxiv/2410.23079.txt"),
    "code": ("code/argparse.py", "code/llama-vocab.cpp"),
}
FILES = tuple(file for files in _TEXTS.values() for file in files)
KINDS = {file.rpartition("/")[2]: kind for kind, files in _TEXTS.items() for file in files}
_TYPES = ("f16", "q8_0", "q4_0")
_SHARES = ("5%", "10%", "20%", "40%")
_HIDDEN = ("--set", "lengths=512", "--set", "repeats=4")
_QUESTIONS = ("--prefill", "whole", "--set", "n_max=24")
_SUMMARY = ("--prefill", "whole", "--set", "likelihood=true")


def _texts(budgets: tuple[str, ...], n_token: int, model: str = "") -> Compare:
    return Compare(FILES, ("full", *POLICIES), budgets, n_token, model=model, types=_TYPES)


def _tasks(suffix: str, n: int, shares: tuple[str, ...], model: str = "") -> dict[str, Run]:
    policies = ("full", *POLICIES)
    return {
        f"which-passkey{suffix}": Eval("passkey", (), policies, shares, _HIDDEN, n, model),
        f"which-qa{suffix}": Eval(
            *("qa", ("lost_in_the_middle/nq-open-oracle.jsonl.gz",), policies, shares, _QUESTIONS, n, model)
        ),
        f"which-summarize{suffix}": Eval("summarize", (XSUM,), policies, shares, _SUMMARY, n, model),
    }


RUNS: dict[str, Run] = {
    "which-texts": _texts(("512", "1024", "2048"), 4096),
    "which-texts-4096": Compare(FILES[::2], ("full", *POLICIES), ("4096",), 8192, types=_TYPES),
    "which-texts-0.5b": _texts(("512", "1024"), 2048, SMALL),
    "which-texts-1.5b": _texts(("512", "1024"), 2048, LARGE),
    **_tasks("", 20, _SHARES),
    **_tasks("-0.5b", 12, _SHARES, SMALL),
    **_tasks("-1.5b", 8, _SHARES[1:3], LARGE),
}


def _task_table(title: str, task: str, score: str) -> Table:
    return Table("", ("budget",), "full", ("full", *POLICIES), scores={task: score}, title=title)


EXPERIMENTS = {
    "which-texts": Experiment(
        ("which-texts", "which-texts-0.5b", "which-texts-1.5b"),
        (Table("nll", ("budget",), "h2o", (*_FULL, *POLICIES)),),
        minutes=(120, 60, 130),
    ),
    "which-texts-4096": Experiment(
        ("which-texts-4096",), (Table("nll", ("budget",), "h2o", (*_FULL, *POLICIES)),), minutes=(45,)
    ),
    "which-tasks": Experiment(
        tuple(_tasks("", 0, ())) + tuple(_tasks("-0.5b", 0, ())) + tuple(_tasks("-1.5b", 0, ())),
        (
            _task_table("Hidden numbers found, %", "passkey", "found"),
            _task_table("Likelihood of the right answer to a question, nats a token", "qa", "logp"),
            _task_table("Likelihood of a right summary, nats a token", "summarize", "logp"),
        ),
        minutes=(120, 100, 80),
    ),
}
