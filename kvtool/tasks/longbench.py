"""longbench: the 21 tasks of LongBench with its prompts and metrics.

LongBench is by Bai et al. 2023 (arXiv:2308.14508). Prompts, maximum lengths of answers, metrics and the
following rules are taken from its code, THUDM/LongBench (config/*.json, pred.py, eval.py, metrics.py):

- Few-shot and code tasks are plain text, even with a chat model.
- If a prompt is too long, its middle is cut out.
- For trec, triviaqa, samsum and lsht, only the first line of an answer is scored.
- If there are several right answers, the highest score is used.

Scores are 0 to 1. LongBench reports the mean of each task (see the table by dataset). It also reports an
average for English, for Chinese and for all tasks. An average is the mean of six categories, and a category
is the mean of its tasks. Code tasks are part of both languages.

Two things differ. The length to which a prompt is cut (--max-prompt) includes the chat template, while
LongBench adds the template afterwards. The first token of an answer to samsum may be a line break.

Layouts:

- LongBench: {"input", "context", "answers", "all_classes", "dataset"}.
- MiniLongBench, which has the whole prompt: {"prompt", "answers", "all_classes", "task"}.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.tasks import data, metrics
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, RecordTask, ScoredAnswer


@dataclass(frozen=True, slots=True)
class Dataset:
    """One of LongBench's 21 tasks.

    Attributes
    ----------
    metric
        Function that scores an output against a reference. `classification` also gets the classes.
    prompt
        Template with {context} and {input}.
    as_it_is
        True if the prompt is plain text even with a chat model.
    first_line
        True if only the first line of an answer is scored.
    """

    n_max: int
    metric: Callable[..., float]
    prompt: str
    as_it_is: bool = False
    first_line: bool = False


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

PARTS = {name: Dataset(**its | {"metric": getattr(metrics, its["metric"])}) for name, its in _TABLE.items()}
"""Tasks by name, read from longbench.json."""

CATEGORIES = {
    "single-document questions": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "questions on several documents": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summaries": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}

_CHINESE = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})

LANGUAGES = {
    "EN": frozenset(PARTS) - _CHINESE,
    "ZH": _CHINESE | frozenset(CATEGORIES["code"]),
    "all": frozenset(PARTS),
}
"""Tasks that each average includes."""


@dataclass(frozen=True, slots=True)
class LongBench(RecordTask):
    """Parameters of the task.

    Attributes
    ----------
    only
        Names of the tasks to run. If empty, all tasks in the files are run.
    """

    only: tuple[str, ...] = ()

    source: ClassVar[str] = "arXiv:2308.14508"
    chat: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("jieba", "rouge")
    by: ClassVar[tuple[str, ...]] = ("dataset",)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.only if name not in PARTS]:
            raise ValueError(f"unknown LongBench task {', '.join(unknown)}; choose from {', '.join(PARTS)}")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        if not (items := RecordTask.items(self, files, model)):
            raise InputError(f"the files have no records of {', '.join(self.only)}")
        return items

    def items_of(self, record: data.Record) -> Sequence[Item]:
        dataset = record["task" if "task" in record else "dataset"].removesuffix("_e")
        if dataset not in PARTS:
            raise data.Misfit(f"unknown LongBench task {dataset!r}")
        if "prompt" in record:
            prompt = data.text(record["prompt"])
        else:
            prompt = PARTS[dataset].prompt.format(context=record["context"], input=record["input"])
        classes = data.texts(record.get("all_classes") or [])
        if PARTS[dataset].metric is metrics.classification and not classes:
            raise data.Misfit("no all_classes")
        item = Item("", prompt, data.texts(record["answers"]), classes, {"dataset": dataset})
        return [item] if not self.only or dataset in self.only else []

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        part = PARTS[item.about["dataset"]]
        reader.read(item.prompt, part.n_max, as_it_is=part.as_it_is)
        output = reader.write(part.n_max, stop=["\n"] if part.first_line else ())
        counted = output.lstrip("\n").split("\n")[0] if part.first_line else output
        metric = part.metric
        if metric is metrics.classification:
            metric = partial(metric, classes=item.choices)
        return ScoredAnswer(output, {"score": metrics.best(metric, counted, item.references)})

    def summary(self, finished: Sequence[records.Record]) -> dict[str, float]:
        """Return LongBench's average for each language, over the categories that have items."""
        values: dict[str, list[float]] = defaultdict(list)
        for record in finished:
            if "score" in record["scores"]:
                values[record["dataset"]].append(record["scores"]["score"])
        averages = {}
        for language, parts in LANGUAGES.items():
            datasets = values.keys() & parts
            # code tasks are part of both languages, so a language with only code tasks gets no average
            if datasets and (language == "all" or datasets - frozenset(CATEGORIES["code"])):
                categories = (datasets.intersection(names) for names in CATEGORIES.values())
                means = [fmean(fmean(values[name]) for name in names) for names in categories if names]
                averages[f"average {language}"] = fmean(means)
        return averages


TASK = LongBench
