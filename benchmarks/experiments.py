"""The papers' experiments: their commands and their tables, which benchmarks/papers.py runs and writes.

All numbers of papers are copied from their text; figures that print none have none here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import policies
from kvtool.measure import records, statistics
from kvtool.measure.grid import split_policy

Line = dict[str, Any]
"""Of docs/papers: one policy at one budget on one file.

label: the policy as it was asked for. budget: None of what keeps all it needs. of: the file, or the data set.
scores: lists by name, of items, or of blocks of tokens, which then have weights. Then seconds and versions.
"""

_QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")

VERSIONS = ("model", "kvtool", "llama_cpp_python", "patch")


# commands


@dataclass(frozen=True, slots=True)
class Compare:
    """One `kvtool compare`. Without budgets only what needs none runs."""

    file: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    max_tokens: int
    more: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        yield [
            *("compare", self.file, "--policies", ",".join(self.policies)),
            *("--budgets", ",".join(self.budgets), "--types", "f16"),
            *("--max-tokens", str(self.max_tokens), *self.more),
        ]

    def shown(self) -> str:
        return shell(*self.commands())

    @property
    def store(self) -> str:
        """Where its results are: with those of others on the same tokens, so that none is measured twice."""
        return "-".join([Path(self.file).stem, str(self.max_tokens), *self.more])

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            # what has no budget has a cell for each token of the text, or of the context
            has_all = record["budget"] >= record["tokens"]
            label = self._label(record)
            if "error" in record or not label or not (has_all or str(record["budget"]) in self.budgets):
                continue
            counts = statistics.block_counts(record["n_scored"])
            yield {
                "label": label if has_all or label != "corm" else "corm, capped",
                "budget": None if has_all else str(record["budget"]),
                "of": record["text"],
                "tokens": record["tokens"],
                "scores": {
                    "nll": (np.array(record["nll_blocks"]) / counts).tolist(),
                    "evicted": [1 - record["cells"] / record["tokens"]],
                    "ms": [1000 * record["cpu_s"] / record["tokens"]],
                },
                "weights": {"nll": counts.astype(int).tolist()},
                **_about(record),
            }

    def _label(self, record: records.Record) -> str:
        """The policy among those asked for that names the most of the record's parameters; "" if none is."""
        named = [label for label in self.policies if _names(label, record)]
        return max(named, key=lambda label: len(split_policy(label)[1]), default="")


@dataclass(frozen=True, slots=True)
class Eval:
    """`kvtool eval` of files for each policy ("h2o:decay=0.9") at each budget, and once for `full`."""

    task: str
    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    more: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        for label in self.policies:
            for budget in [None] if label == "full" else self.budgets:
                yield self._command(label, ["--budget", budget] if budget else [])

    def shown(self) -> str:
        command = shell(self._command("POLICY", ["--budget", "BUDGET"]))
        chosen = ", ".join(
            " -o ".join([name, *options]) for name, options in map(split_policy, self.policies)
        )
        return f"{command}\n    # POLICY: {chosen}\n    # BUDGET: {', '.join(self.budgets)}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        cells = defaultdict(list)
        for record in found:
            of = record.get("dataset", record.get("file", self._of))
            cells[":".join([record["policy"], *record["options"]]), record["budget"], of].append(record)
        for (label, budget, of), items in cells.items():
            scored = [_scores(record) for record in items]
            names = dict.fromkeys(name for scores in scored for name in scores)
            yield {
                "label": label,
                "budget": budget,
                "task": self.task,
                "of": of,
                "items": [record["id"] for record in items],
                "scores": {name: [scores.get(name) for scores in scored] for name in names},
                **_about(*items),
            }

    @property
    def _of(self) -> str:
        return Path(self.files[0]).name if self.files else self.task

    def _command(self, label: str, budget: Sequence[str]) -> list[str]:
        name, options = split_policy(label)
        own = [part for option in options for part in ("-o", option)]
        return ["eval", self.task, *self.files, "--policy", name, *own, *budget, *self.more]


@dataclass(frozen=True, slots=True)
class Inspect:
    """`kvtool inspect` of each file for each policy. scores: the share of rows that hold a token, by part."""

    files: tuple[str, ...]
    policies: tuple[str, ...]
    budget: str
    max_tokens: int

    def commands(self) -> Iterator[list[str]]:
        for file in self.files:
            for label in self.policies:
                size = ["--budget", self.budget, "--max-tokens", str(self.max_tokens)]
                yield ["inspect", file, "--policy", label, *size, "--json"]

    def shown(self) -> str:
        size = f"--budget {self.budget} --max-tokens {self.max_tokens}"
        chosen = ", ".join(self.policies)
        return f"kvtool inspect FILE --policy POLICY {size} --png POLICY.png\n    # POLICY: {chosen}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            shares = np.array(record["share"])
            for part, of_part in zip(_QUARTERS, np.array_split(shares, len(_QUARTERS)), strict=True):
                yield {
                    "label": record["policy"],
                    "budget": str(record["budget"]),
                    "of": record["file"],
                    "part": part,
                    "scores": {"held": [of_part.mean()]},
                    **_about(record),
                }


Run = Compare | Eval | Inspect


def shell(command: Sequence[str]) -> str:
    """As it is typed: no folders, and quotes around what is empty."""
    return "kvtool " + " ".join(Path(part).name if "/" in part else part or "''" for part in command)


def _names(label: str, record: records.Record) -> bool:
    """Whether a record's policy has that name and those parameters."""
    name, options = split_policy(label)
    if name != record["policy"]:
        return False
    asked = policies.parse_options(policies.load(name), list(options))
    return asked.items() <= record["params"].items()


def _scores(record: records.Record) -> dict[str, float]:
    """An item's scores. Of a choice also how likely the right one is among all, in nats."""
    scores = dict(record["scores"])
    if scores and record["task"] == "choice":
        logp = np.array(record["logp"])
        right = record["choices"].index(record["references"][0])
        scores["right"] = float(logp[right] - np.logaddexp.reduce(logp))
    return scores


def _about(*found: records.Record) -> Line:
    """How long they took all together, and what they were measured with."""
    versions = {name: found[0][name] for name in VERSIONS} | {"model": Path(found[0]["model"]).name}
    # of the CPU where that is known: what else ran does not matter
    seconds = sum(record.get("cpu_s", record.get("seconds", 0)) for record in found)
    return {"seconds": seconds, **versions}


# tables


Cell = tuple[str, str]
"""Row and column of a table."""


@dataclass(frozen=True, slots=True)
class Table:
    """score: one of SCORES; scores: in its place one a task. title: above the table, if not the score's.

    by: fields of a line that make the columns. names: what values are called there. rows, budgets: only
    these, in their order. against: what the other rows are compared with, the paper's own method. pooled: the
    name of a last column with the items of all. paper: its numbers as it prints them; worse: where it prints
    none, the rows that it says are behind its own method.
    """

    score: str
    by: tuple[str, ...] = ("budget",)
    against: str = ""
    rows: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    pooled: str = ""
    paper: Mapping[Cell, str] = field(default_factory=dict)
    worse: tuple[str, ...] = ()
    scores: Mapping[str, str] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """runs: names of RUNS. model: the paper's, whose numbers are in brackets. long: it runs only if named."""

    runs: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    model: str = ""
    long: bool = False


# the papers' numbers


def _paper(text: str) -> dict[Cell, str]:
    """A table as papers have it: columns in the first line, then a policy and its numbers in each."""
    first, *rows = (re.split(r"  +", line.strip()) for line in text.strip().splitlines())
    return {
        (policy, column): number
        for policy, *numbers in rows
        for column, number in zip(first, numbers, strict=True)
        if number != "-"
    }


WEIGHTEDKV_TABLE_1 = _paper("""
                PG19, 256  PG19, 1024  ProofPile, 256  ProofPile, 1024
    full          6.84  6.84  2.51  2.51
    streamingllm  7.99  7.19  3.61  2.84
    tova          7.70  7.00  3.30  2.64
    h2o           7.85  7.06  3.36  2.63
    cam           7.98  7.19  3.62  2.83
    weightedkv    7.49  6.98  3.13  2.63
""")
CORM_TABLE_3 = _paper("""
                                         1024
    full                                 9.79
    corm                                 9.89
    streamingllm                         10.15
    scissorhands:window=256:history=256  10.05
    h2o:window=256                       10.02
""")
CORM_TABLE_4 = _paper("""
                                 2048
    full                         10.58
    corm:window=128:history=128  10.69
""")
CORM_TABLE_4_REDUCTION = _paper("""
                                 2048
    corm:window=128:history=128  74.4
""")
# on English data sets
CORM_TABLE_1 = _paper("""
    narrativeqa  qasper  multifieldqa_en  hotpotqa  2wikimqa  musique  gov_report  qmsum  multi_news
    full                                 19.0  22.1  36.7  27.8  31.5  8.3  26.8  20.7  26.2
    streamingllm                         13.2  15.4  27.2  24.2  25.4  5.3  21.6  19.8  24.4
    scissorhands:window=256:history=256  16.6  18.7  32.4  26.3  32.1  8.9  22.1  20.7  25.4
    h2o:window=256                       17.9  19.5  34.9  27.5  29.7  7.5  24.5  21.0  25.8
    corm                                 18.9  22.2  38.6  27.6  31.6  8.4  26.4  21.0  25.8
""")
CORM_TABLE_2 = _paper("""
    trec  triviaqa  samsum  passage_count  passage_retrieval_en  lcc  repobench-p
    full                                 64.0  83.3  41.4  2.9  7.8  58.3  52.2
    streamingllm                         61.0  82.9  39.1  1.8  4.7  57.6  50.0
    scissorhands:window=256:history=256  52.5  83.6  40.7  3.1  6.5  56.8  52.1
    h2o:window=256                       63.0  81.5  39.9  2.8  7.0  57.8  52.3
    corm                                 64.0  83.5  41.3  2.9  9.0  58.3  52.0
""")
CORM_TABLE_5 = _paper("""
          narrativeqa  qasper  multifieldqa_en  hotpotqa  2wikimqa  musique  gov_report  qmsum  multi_news
    full  21.0  44.1  44.9  47.2  35.8  22.9  29.1  21.6  24.5
    corm  21.0  43.7  44.8  45.7  36.3  23.1  28.6  21.7  24.4
""")
CORM_TABLE_6 = _paper("""
          trec  triviaqa  samsum  passage_count  passage_retrieval_en  lcc  repobench-p
    full  74.5  90.5  42.3  6.0  64.5  56.9  51.6
    corm  74.5  90.6  41.9  6.0  64.0  57.9  52.3
""")
BUZZ_TABLE_2 = _paper("""
                    10%  20%  40%
    buzz            10.9  11.3  12.3
    buzz:logn=true  10.4  11.6  12.0
    h2o             10.2  11.8  11.6
    streamingllm    3.8  10.0  11.2
    local           0.1  1.4  2.9
""")
BUZZ_TABLE_3 = _paper("""
                    50  100
    full            7.382  7.382
    buzz            9.394  8.037
    buzz:logn=true  12.322  10.318
    h2o             9.987  8.881
    streamingllm    11.722  9.330
    local           194.803  35.979
""")
# of its appendix; what its text has lost is missing
BUZZ_TABLE_B = {
    "rouge1": _paper("""
                        10%  20%  40%
        buzz            19.379  20.168  21.389
        buzz:logn=true  17.742  20.208  20.913
        h2o             -  19.916  20.906
        streamingllm    -  18.446  19.831
    """),
    "rouge2": _paper("""
                        10%  20%  40%
        buzz            4.056  4.231  4.783
        buzz:logn=true  4.185  4.484  4.608
        h2o             -  4.841  4.215
        streamingllm    -  3.531  4.162
    """),
    "rougeL": _paper("""
                        10%  20%  40%
        buzz            16.686  16.831  18.234
        buzz:logn=true  15.298  17.346  17.966
        h2o             -  16.824  17.733
        streamingllm    -  15.436  16.871
    """),
}
BUZZ_TABLE_A = _paper("""
                    200
    buzz:window=78  25.3847
    buzz:window=56  25.8219
    buzz:window=43  26.8306
    buzz:window=35  26.9212
    buzz:window=30  26.0562
    buzz:window=26  25.6403
""")
BUMBLEBEE_TABLE_1 = _paper("""
                         OpenBookQA  COPA  PiQA  RTE  MathQA  Winogrande
    full                 44.6  81  80.03  68.95  29.85  71.51
    local                28.4  56  58.27  50.90  23.02  51.38
    random               28.0  63  53.94  51.26  21.76  49.30
    streamingllm         41.6  82  78.07  58.12  27.40  67.80
    h2o                  41.4  78  77.31  63.54  27.50  65.82
    bumblebee            43.2  79  78.24  68.95  27.74  68.75
    bumblebee:phi=power  43.2  79  78.56  63.90  28.51  68.19
""")
# the numbers are in the slides' text only
BUMBLEBEE_TABLE_2 = _paper("""
                         qasper  multifieldqa_en  hotpotqa  2wikimqa  qmsum  trec
    full                 21.60  36.76  27.55  31.58  20.78  64.0
    streamingllm         14.74  22.93  22.08  29.73  19.25  56.0
    h2o                  19.82  26.60  26.28  25.69  21.45  60.0
    bumblebee            19.37  27.73  26.14  27.67  20.68  61.5
    bumblebee:phi=power  19.59  28.60  28.99  30.19  21.05  59.0
""")


# what is run

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
# those on which a model of 135M parameters is better than guessing
_TOLD_APART = ("OpenBookQA", "COPA", "PiQA")
_ESSAYS = tuple(f"paul_graham_essays/{name}.txt" for name in ("gap", "island", "love", "nft", "vb", "weird"))

_BUZZ = ("full", "buzz", "buzz:logn=true", "h2o", "streamingllm", "local")
_BUMBLEBEE = ("full", "local", "random", "streamingllm", "h2o", "bumblebee", "bumblebee:phi=power")
_WEIGHTEDKV = ("full", "streamingllm", "tova", "h2o", "cam", "weightedkv", "weightedkv:merge=false")
_CORM = ("corm", "streamingllm", "scissorhands:window=256:history=256", "h2o:window=256")
_MIXTURES = tuple(f"bumblebee:mixture={mixture}" for mixture in (0, 0.6, 1))
# T / w from 1.5 to 6.5 in steps of 1, of 200 cells, 4 of them sinks and 1 the token being decoded
_WINDOWS = tuple(f"buzz:window={window}" for window in (78, 56, 43, 35, 30, 26))
_BEST_WINDOW = "buzz:window=35"

_SUMMARY = ("--prefill", "whole", "--set", "likelihood=true", "--limit")
_QUESTIONS = ("--set", "n_max=24", "--limit")
_FEW_SHOT = ("--prefill", "stream", "--set", "shots=5", "--limit")
# half of the papers' 3,500 tokens or so, and of their 1,024 cells, which take four times as long
_LONG = ("--max-prompt", "2048")
_SIX = ("--set", "only=qasper,multifieldqa_en,hotpotqa,2wikimqa,qmsum,trec")

# of 100 items each where there are so many
_AT_20 = (("full", "roco", "h2o", "buzz", "streamingllm", "snapkv"), ("20%",))
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
    "inspect": Inspect(_ESSAYS, ("h2o", "bumblebee"), "20", 192),
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


def _few_shot(*names: str, long: bool = False) -> Experiment:
    """Columns of BumbleBee's Table 1."""
    columns = {_CHOICES[name]: name for name in names}
    paper = {cell: number for cell, number in BUMBLEBEE_TABLE_1.items() if cell[1] in names}
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
    """The same table of several scores."""
    return tuple(Table(score, **how) for score in scores)


def _tasks(title: str, **shown: tuple[str, str]) -> Table:
    """A row for each policy, a column for each task: its name there and its score."""
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
                paper=WEIGHTEDKV_TABLE_1,
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
        ("wikitext",), (Table("nll", against="buzz", paper=BUZZ_TABLE_3),), "Llama-2-7B"
    ),
    "corm-table-3": Experiment(
        ("pg19-corm",),
        (
            Table(
                "nll", against="corm", rows=("full", "corm", "corm, capped", *_CORM[1:]), paper=CORM_TABLE_3
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
            Table("nll", ("tokens",), paper=CORM_TABLE_4),
            Table(
                "evicted", ("tokens",), rows=("corm:window=128:history=128",), paper=CORM_TABLE_4_REDUCTION
            ),
        ),
        "LLaMA1-7B",
    ),
    "buzz-table-2": Experiment(
        ("xsum",),
        (
            Table("rouge", against="buzz", paper=BUZZ_TABLE_2),
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
    "bumblebee-figure-6": Experiment(("inspect",), (Table("held", ("part",)),)),
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
                paper={cell: number for cell, number in BUMBLEBEE_TABLE_2.items() if cell[1] == "hotpotqa"},
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
        tuple(Table(score, against="buzz", paper=numbers) for score, numbers in BUZZ_TABLE_B.items()),
        "Llama-2-7B",
    ),
    "bumblebee-table-1-rest": _few_shot("RTE", "MathQA", "Winogrande", long=True),
    "buzz-figure-4-cnn": Experiment(
        ("cnn",),
        (Table("rouge1", against=_BEST_WINDOW, paper=BUZZ_TABLE_A), Table("logp", against=_BEST_WINDOW)),
        "Llama-2-7B",
        long=True,
    ),
    "bumblebee-table-2-longbench": Experiment(
        ("longbench-bumblebee",),
        (Table("score", ("of",), "bumblebee", pooled="all", paper=BUMBLEBEE_TABLE_2),),
        "Llama-2-7B-chat",
        long=True,
    ),
    "corm-tables-1-2": Experiment(
        ("longbench", "longbench-corm"),
        (Table("score", ("of",), "corm", pooled="all", paper=CORM_TABLE_1 | CORM_TABLE_2),),
        "LLaMA2-7B-Chat",
        long=True,
    ),
    "corm-tables-5-6": Experiment(
        ("longbench", "longbench-corm"),
        (Table("score", ("of",), "corm", ("full", "corm"), pooled="all", paper=CORM_TABLE_5 | CORM_TABLE_6),),
        "LLaMA3-8B-Instruct",
        long=True,
    ),
}
