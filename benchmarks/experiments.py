"""The papers' experiments: their runs and their tables, which benchmarks/papers.py does and writes.

The papers' own numbers are in benchmarks/numbers, copied from the papers' text; figures that print no numbers
have none there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import Compare, Eval, Inspect, Run

NUMBERS = Path(__file__).with_name("numbers")

Place = tuple[str, str]
"""Row and column of a table: a policy, and a budget or a text."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of an experiment: a policy per row.

    Attributes
    ----------
    score
        One of papers.SCORES.
    by
        Fields of a line whose values are the columns.
    against
        The paper's own method, which the other rows are compared with.
    rows
        The rows in their order; all if empty.
    budgets
        The budgets that count; all if empty.
    names
        Headings in place of the columns' values.
    pooled
        Heading of a last column with the items of all columns; none if empty.
    paper
        The paper's numbers, as it prints them.
    worse
        If it prints none: the rows that it says are worse than its own method.
    scores
        In place of score, a score for each task.
    title
        Heading of the table; by default the score's title.
    """

    score: str
    by: tuple[str, ...] = ("budget",)
    against: str = ""
    rows: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    pooled: str = ""
    paper: Mapping[Place, str] = field(default_factory=dict)
    worse: tuple[str, ...] = ()
    scores: Mapping[str, str] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a section of docs/papers.md shows.

    Attributes
    ----------
    runs
        Names of RUNS.
    tables
        What is shown of their results.
    model
        The paper's model; its numbers are in brackets.
    long
        Whether it takes long, and is run only if it is named.
    """

    runs: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    model: str = ""
    long: bool = False


def numbers(paper: str, *tables: str) -> dict[Place, str]:
    """The numbers of a paper's tables as it prints them. Raises ValueError for a row of the wrong length."""
    read = json.loads((NUMBERS / f"{paper}.json").read_text(encoding="utf-8"))["tables"]
    return {
        (policy, column): number
        for table in tables
        for policy, row in read[table]["rows"].items()
        for column, number in zip(read[table]["columns"], row, strict=True)
        if number is not None
    }


# what runs

_BOOK, _OTHER_BOOK = "pg19/10146.txt", "pg19/10321.txt"
_WIKI, _PROOF = "wikitext2/wiki.test.raw", "proofpile/hott-basics.tex"
_XSUM, _CNN = "xsum/xsum_0shot_first300.jsonl", "cnn_dailymail/cnndm_0shot_first300.jsonl"
_HOTPOT = "hotpotqa_distractor/hotpotqa_distractor_100.jsonl"
_LONGBENCH = "longbench/minilongbench_en.jsonl"
_TEN = {at: f"DERIVED-nq10_random_distractors_gold_at_{at}.jsonl.gz" for at in (0, 4, 9)}
_CHOICES = {
    "OpenBookQA": "openbookqa_test.jsonl",
    "COPA": "copa_test.jsonl",
    "PiQA": "piqa_test.jsonl",
    "RTE": "rte_validation.jsonl",
    "MathQA": "mathqa_test.jsonl",
    "Winogrande": "winogrande_test.jsonl",
}
# on these a model of 135M parameters is better than guessing
_TOLD_APART = ("OpenBookQA", "COPA", "PiQA")
_ESSAYS = tuple(
    f"paul_graham_essays/{name}.txt"
    for name in (
        *("gap", "island", "love", "nft", "vb", "weird", "addiction", "apple", "avg", "before", "boss"),
        *("copy", "diff", "founders", "gba", "goodtaste", "hubs", "know", "laundry", "mod"),
    )
)

_BUZZ = ("full", "buzz", "buzz:logn=true", "h2o", "streamingllm", "local")
_BUMBLEBEE = ("full", "local", "random", "streamingllm", "h2o", "bumblebee", "bumblebee:phi=power")
_WEIGHTEDKV = ("full", "streamingllm", "tova", "h2o", "cam", "weightedkv", "weightedkv:merge=false")
_CORM = ("corm", "streamingllm", "scissorhands:window=256:history=256", "h2o:window=256")
_MIXTURES = tuple(f"bumblebee:mixture={mixture}" for mixture in (0, 0.6, 1))
# T / w from 1.5 to 6.5 in steps of 1; of 200 cells 4 are sinks and 1 is the token being decoded
_WINDOWS = tuple(f"buzz:window={window}" for window in (78, 56, 43, 35, 30, 26))
_BEST_WINDOW = "buzz:window=35"

_SUMMARY = ("--prefill", "whole", "--set", "likelihood=true", "--limit")
_QUESTIONS = ("--set", "n_max=24", "--limit")
_FEW_SHOT = ("--prefill", "stream", "--set", "shots=5", "--limit")
# half of the papers' 3,500 tokens and 1,024 cells, which would take four times as long
_LONG = ("--max-prompt", "2048")
_SIX = ("--set", "only=qasper,multifieldqa_en,hotpotqa,2wikimqa,qmsum,trec")

# 100 items of each, if there are so many
_AT_20 = (("full", "recall", "roco", "h2o", "buzz", "streamingllm", "snapkv"), ("20%",))
_HIDDEN = ("--set", "lengths=512", "--set", "repeats=20")
_100 = ("--limit", "100")
_TASKS = (
    Eval("passkey", (), *_AT_20, _HIDDEN),
    Eval("needle", ("paul_graham_essays/",), *_AT_20, _HIDDEN),
    Eval("qa", ("lost_in_the_middle/nq-open-oracle.jsonl.gz",), *_AT_20, ("--set", "n_max=24", *_100)),
    Eval("summarize", (_XSUM,), *_AT_20, ("--set", "likelihood=true", *_100)),
    Eval("choice", (f"lm_eval_tasks/{_CHOICES['OpenBookQA']}",), *_AT_20, ("--set", "shots=5", *_100)),
    Eval("longbench", (_LONGBENCH,), *_AT_20, ("--max-prompt", "1024", *_100)),
    Eval(
        "stream",
        ("mt_bench/question.jsonl", "mt_bench/reference_answer_gpt-4.jsonl"),
        *_AT_20,
        ("--set", "scored=true", *_100),
    ),
    Eval(
        "diversity",
        ("mt_bench/question.jsonl",),
        *(_AT_20[0][1:], _AT_20[1]),
        ("--set", "samples=3", "--set", "n_max=48", *_100),
    ),
)

RUNS: dict[str, Run] = {
    "pg19": Compare(_BOOK, _WEIGHTEDKV, ("256", "1024"), 4096),
    "proofpile": Compare(_PROOF, _WEIGHTEDKV, ("256", "1024"), 4096),
    "pg19-corm": Compare(_BOOK, ("full", *_CORM), ("1024", "1792"), 4096),
    "wikitext": Compare(_WIKI, _BUZZ, ("50", "100"), 4096),
    "ratio": Compare(_WIKI, _WINDOWS, ("200",), 4096),
    "corm-128": Compare(_BOOK, ("full", "corm:window=128:history=128"), (), 2048),
    **{
        f"corm-{size}-{Path(file).stem}": Compare(file, ("full", "corm"), (), size)
        for file in (_BOOK, _OTHER_BOOK)
        for size in (512, 1024, 2048, 4096)
    },
    **{
        f"speed-{Path(file).stem}": Compare(
            file, ("full", "bumblebee", "h2o"), ("410", "205"), 2048, ("-b", "1")
        )
        for file in (_BOOK, _OTHER_BOOK, _PROOF)
    },
    "xsum": Eval("summarize", (_XSUM,), _BUZZ, ("10%", "20%"), (*_SUMMARY, "24")),
    "xsum-ablation": Eval(
        "summarize", (_XSUM,), ("buzz:swap=true", "buzz:local_max=false"), ("10%", "20%"), (*_SUMMARY, "24")
    ),
    "xsum-bumblebee": Eval(
        "summarize", (_XSUM,), ("random", "bumblebee", "bumblebee:phi=power"), ("20%",), (*_SUMMARY, "24")
    ),
    "xsum-mixture": Eval("summarize", (_XSUM,), _MIXTURES, ("20%",), (*_SUMMARY, "24")),
    "cnn": Eval("summarize", (_CNN,), _WINDOWS, ("200",), (*_SUMMARY, "16")),
    **{
        f"choice-{name.lower()}": Eval(
            "choice",
            (f"lm_eval_tasks/{file}",),
            _BUMBLEBEE,
            ("10%",),
            (*_FEW_SHOT, "100" if name in _TOLD_APART else "25"),
        )
        for name, file in _CHOICES.items()
    },
    **{
        f"qa-{at}": Eval(
            "qa",
            (f"lost_in_the_middle/{file}",),
            ("full", "buzz", "h2o", "streamingllm"),
            ("300",),
            (*_QUESTIONS, "12"),
        )
        for at, file in _TEN.items()
    },
    "hotpotqa": Eval(
        "qa", (_HOTPOT,), ("full", *_BUMBLEBEE[3:]), ("20%",), ("--prefill", "whole", *_QUESTIONS, "24")
    ),
    "diversity": Eval("diversity", (_XSUM,), _BUZZ[1:-1], ("20%",), ("--prefill", "whole", "--limit", "12")),
    "inspect": Inspect(_ESSAYS, ("h2o", "bumblebee:sinks=0", "bumblebee"), "20", 192),
    "longbench": Eval(
        "longbench", (_LONGBENCH,), ("full", *_CORM[1:]), ("512",), ("--prefill", "whole", *_LONG)
    ),
    "longbench-corm": Eval("longbench", (_LONGBENCH,), ("corm",), ("100%",), _LONG),
    **{f"task-{run.task}": run for run in _TASKS},
    "longbench-bumblebee": Eval(
        "longbench", (_LONGBENCH,), ("full", *_BUMBLEBEE[3:]), ("20%",), ("--prefill", "whole", *_LONG, *_SIX)
    ),
}


# what is shown

_TEXTS = {"10146.txt": "PG19", "hott-basics.tex": "ProofPile"}


def _columns(paper: Mapping[Place, str], names: Sequence[str]) -> dict[Place, str]:
    return {place: number for place, number in paper.items() if place[1] in names}


def _few_shot(*names: str, long: bool = False) -> Experiment:
    """Some columns of BumbleBee's Table 1."""
    columns = {_CHOICES[name]: name for name in names}
    paper = _columns(numbers("bumblebee", "table-1"), names)
    tables = (
        Table("acc", ("of",), "bumblebee", _BUMBLEBEE, names=columns, pooled="all", paper=paper),
        Table(
            *("right", ("of",), "bumblebee", _BUMBLEBEE),
            names=columns,
            pooled="all",
            worse=("local", "random", "h2o"),
        ),
    )
    return Experiment(tuple(f"choice-{name.lower()}" for name in names), tables, "LLaMA-7B", long)


def _both(*scores: str, **how: Any) -> tuple[Table, ...]:
    """The same table for several scores."""
    return tuple(Table(score, **how) for score in scores)


def _tasks(title: str, **shown: tuple[str, str]) -> Table:
    """A row per policy, a column per task. shown: a heading and a score for each task."""
    names = {task: name for task, (name, _) in shown.items()}
    scores = {task: score for task, (_, score) in shown.items()}
    return Table("", ("task",), "full", _AT_20[0], names=names, scores=scores, title=title)


EXPERIMENTS: dict[str, Experiment] = {
    "weightedkv-table-1": Experiment(
        ("pg19", "proofpile"),
        (
            Table(
                "nll",
                ("of", "budget"),
                "weightedkv",
                _WEIGHTEDKV[:-1],
                names=_TEXTS,
                paper=numbers("weightedkv", "table-1"),
            ),
        ),
        "Llama-2-7B, context 4k",
    ),
    "tasks": Experiment(
        tuple(f"task-{run.task}" for run in _TASKS),
        (
            _tasks(
                "What tells policies apart",
                passkey=("passkey, %", "found"),
                needle=("needle, %", "found"),
                qa=("qa, nats", "logp"),
                choice=("choice, nats", "right"),
                summarize=("summarize, nats", "logp"),
                longbench=("longbench, %", "score"),
                stream=("stream, perplexity", "nll"),
                diversity=("diversity, distance", "distance"),
            ),
            _tasks(
                "What was written",
                qa=("qa, F1 %", "f1"),
                choice=("choice, right %", "acc"),
                summarize=("summarize, ROUGE %", "rouge"),
                diversity=("diversity, Self-BLEU", "self_bleu"),
            ),
        ),
        long=True,
    ),
    "weightedkv-figure-4": Experiment(
        ("pg19", "proofpile"),
        (
            Table(
                "nll",
                ("of", "budget"),
                "weightedkv",
                _WEIGHTEDKV[-2:],
                names=_TEXTS,
                worse=_WEIGHTEDKV[-1:],
            ),
        ),
    ),
    "buzz-table-3": Experiment(
        ("wikitext",), (Table("nll", against="buzz", paper=numbers("buzz", "table-3")),), "Llama-2-7B"
    ),
    "corm-table-3": Experiment(
        ("pg19-corm",),
        (
            Table(
                "nll",
                against="corm",
                rows=("full", "corm", "corm, capped", *_CORM[1:]),
                paper=numbers("corm", "table-3"),
            ),
        ),
        "LLaMA2-7B",
    ),
    "corm-figure-4": Experiment(
        tuple(name for name in RUNS if name.startswith("corm-") and name != "corm-128"),
        (Table("evicted", ("tokens",), rows=("corm",)),),
    ),
    "corm-table-4": Experiment(
        ("corm-128",),
        (
            Table("nll", ("tokens",), paper=numbers("corm", "table-4")),
            Table(
                "evicted",
                ("tokens",),
                rows=("corm:window=128:history=128",),
                paper=numbers("corm", "table-4-reduction"),
            ),
        ),
        "LLaMA1-7B",
    ),
    "buzz-table-2": Experiment(
        ("xsum",),
        (
            Table("rouge", against="buzz", paper=numbers("buzz", "table-2")),
            Table("logp", against="buzz", worse=("streamingllm", "local")),
        ),
        "Llama-2-7B",
    ),
    "bumblebee-figure-3": Experiment(
        ("xsum", "xsum-bumblebee"),
        _both(
            *("rouge", "logp"),
            against="bumblebee",
            rows=_BUMBLEBEE,
            budgets=("20%",),
            worse=("local", "random", "streamingllm", "h2o"),
        ),
    ),
    "bumblebee-table-1": _few_shot(*_TOLD_APART),
    "buzz-figure-6": Experiment(
        tuple(f"qa-{at}" for at in _TEN),
        _both(
            *("subspan_em", "f1", "logp"),
            by=("of",),
            against="buzz",
            names={file: f"gold at {at}" for at, file in _TEN.items()},
            pooled="all",
            worse=("h2o", "streamingllm"),
        ),
    ),
    "buzz-figure-8": Experiment(
        ("xsum", "xsum-ablation"),
        _both(
            *("rouge", "logp"),
            against="buzz",
            rows=("full", "buzz", "buzz:swap=true", "buzz:local_max=false"),
            budgets=("10%", "20%"),
            worse=("buzz:swap=true", "buzz:local_max=false"),
        ),
    ),
    "buzz-figure-4": Experiment(
        ("ratio",),
        (
            Table(
                "nll",
                against=_BEST_WINDOW,
                rows=_WINDOWS,
                worse=tuple(label for label in _WINDOWS if label != _BEST_WINDOW),
            ),
        ),
    ),
    "bumblebee-lambda": Experiment(
        ("xsum-bumblebee", "xsum-mixture"),
        _both(
            *("rouge", "logp"),
            against="bumblebee",
            rows=(_MIXTURES[0], "bumblebee", *_MIXTURES[1:]),
            worse=(_MIXTURES[0], _MIXTURES[-1]),
        ),
    ),
    "bumblebee-figure-6": Experiment(("inspect",), (Table("held", ("part",), "bumblebee:sinks=0"),)),
    "bumblebee-table-6": Experiment(
        tuple(name for name in RUNS if name.startswith("speed-")),
        (Table("ms", against="bumblebee", worse=("full",)),),
    ),
    "bumblebee-table-2": Experiment(
        ("hotpotqa",),
        (
            Table(
                "f1",
                ("of",),
                "bumblebee",
                names={Path(_HOTPOT).name: "hotpotqa"},
                paper=_columns(numbers("bumblebee", "table-2"), ("hotpotqa",)),
            ),
            Table(
                *("logp", ("of",), "bumblebee"),
                names={Path(_HOTPOT).name: "hotpotqa"},
                worse=("streamingllm",),
            ),
        ),
        "Llama-2-7B-chat",
    ),
    "buzz-figure-7": Experiment(
        ("diversity",), (Table("self_bleu"), Table("distance", against="buzz", worse=("streamingllm",)))
    ),
    "buzz-figure-5": Experiment(
        ("xsum",),
        tuple(
            Table(score, against="buzz", paper=numbers("buzz", f"table-b-{score}"))
            for score in ("rouge1", "rouge2", "rougeL")
        ),
        "Llama-2-7B",
    ),
    "bumblebee-table-1-rest": _few_shot("RTE", "MathQA", "Winogrande", long=True),
    "buzz-figure-4-cnn": Experiment(
        ("cnn",),
        (
            Table("rouge1", against=_BEST_WINDOW, paper=numbers("buzz", "table-a")),
            Table("logp", against=_BEST_WINDOW),
        ),
        "Llama-2-7B",
        long=True,
    ),
    "bumblebee-table-2-longbench": Experiment(
        ("longbench-bumblebee",),
        (Table("score", ("of",), "bumblebee", pooled="all", paper=numbers("bumblebee", "table-2")),),
        "Llama-2-7B-chat",
        long=True,
    ),
    "corm-tables-1-2": Experiment(
        ("longbench", "longbench-corm"),
        (Table("score", ("of",), "corm", pooled="all", paper=numbers("corm", "table-1", "table-2")),),
        "LLaMA2-7B-Chat",
        long=True,
    ),
    "corm-tables-5-6": Experiment(
        ("longbench", "longbench-corm"),
        (
            Table(
                "score",
                ("of",),
                "corm",
                ("full", "corm"),
                pooled="all",
                paper=numbers("corm", "table-5", "table-6"),
            ),
        ),
        "LLaMA3-8B-Instruct",
        long=True,
    ),
}
