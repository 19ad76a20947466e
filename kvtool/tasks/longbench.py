"""longbench: the 21 tasks of LongBench with its prompts and metrics.

Bai et al. 2023 (arXiv:2308.14508), code of THUDM/LongBench (config/*.json, pred.py, eval.py, metrics.py).
From there come the prompts, the most tokens of an answer, the metrics, and these rules: few-shot and code
tasks are asked as plain text even with a chat model; a prompt that is too long loses its middle; for trec,
triviaqa, samsum and lsht only the first line of an answer counts; the best score over the right answers
counts. Scores are 0 to 1. LongBench reports the mean of each task (see the table by dataset), and averages
of its six categories for English, Chinese and all tasks: means of categories, each the mean of its tasks.
Code counts in both languages.

Differs: the chat template counts when a prompt is cut to --max-prompt, while LongBench adds it afterwards;
the first token of an answer to samsum may be a line break.

Layouts: LongBench's ({"input", "context", "answers", "all_classes", "dataset"}), or with the whole prompt
({"prompt", "answers", "all_classes", "task"}), as in MiniLongBench.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.tasks import data, metrics
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given "
    "passages. Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_CODE = "Please complete the code given below. \n{context}{input}Next line of code:\n"


@dataclass(frozen=True, slots=True)
class Part:
    """One of the 21 tasks.

    Attributes
    ----------
    prompt
        With {context} and {input} to be filled in.
    n_max
        The most tokens of an answer.
    metric
        Score of an output against a reference; `classification` also takes the classes.
    as_it_is
        Whether the prompt is plain text even with a chat model.
    first_line
        Whether only the first line of an answer counts.
    """

    prompt: str
    n_max: int
    metric: Callable[..., float]
    as_it_is: bool = False
    first_line: bool = False


_few_shot = partial(Part, as_it_is=True, first_line=True)
_code = partial(Part, _CODE, 64, metrics.code_similarity, as_it_is=True)

PARTS = {
    "narrativeqa": Part(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        "question asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
        "\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a "
        "single phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        metrics.f1,
    ),
    "qasper": Part(
        "You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase or sentence if possible. If the question cannot be answered based on the "
        'information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n Answer '
        "the question based on the above article as concisely as you can, using a single phrase or sentence "
        "if possible. If the question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not '
        "provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        metrics.f1,
    ),
    "multifieldqa_en": Part(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question "
        "based on the above text, only give me the answer and do not output any other words.\n\n"
        "Question: {input}\nAnswer:",
        64,
        metrics.f1,
    ),
    "multifieldqa_zh": Part(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，"
        "只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        metrics.f1_zh,
    ),
    "hotpotqa": Part(_PASSAGES, 32, metrics.f1),
    "2wikimqa": Part(_PASSAGES, 32, metrics.f1),
    "musique": Part(_PASSAGES, 32, metrics.f1),
    "dureader": Part(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        metrics.rouge_l_zh,
    ),
    "gov_report": Part(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
        "{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "qmsum": Part(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the "
        "above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        metrics.rouge_l,
    ),
    "multi_news": Part(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "vcsum": Part(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        metrics.rouge_l_zh,
    ),
    "trec": _few_shot(
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        64,
        metrics.classification,
    ),
    "triviaqa": _few_shot(
        "Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        metrics.f1,
    ),
    "samsum": _few_shot(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        metrics.rouge_l,
    ),
    "lsht": _few_shot(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, metrics.classification
    ),
    "passage_count": Part(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format "
        "should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        metrics.share_of_numbers,
    ),
    "passage_retrieval_en": Part(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the "
        "number of the paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        metrics.retrieval,
    ),
    "passage_retrieval_zh": Part(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n"
        '{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        metrics.retrieval,
    ),
    "lcc": _code(),
    "repobench-p": _code(),
}

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
"""The tasks of each average."""


@dataclass(frozen=True, slots=True)
class LongBench(Task):
    """Parameters of the task.

    Attributes
    ----------
    only
        Names of the tasks to ask; all in the files if empty.
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
        found = []
        for path, number, (dataset, prompt, answers, classes) in data.each(files, "longbench", _parsed):
            if not self.only or dataset in self.only:
                name = f"{data.stem(path)}-{number}"
                found.append(Item(name, prompt, answers, classes, {"dataset": dataset}))
        if not found:
            raise InputError(f"the files have no records of {', '.join(self.only)}")
        return found

    def answer(self, item: Item, reader: Reader) -> Answer:
        part = PARTS[item.about["dataset"]]
        reader.read(item.prompt, part.n_max, as_it_is=part.as_it_is)
        output = reader.write(part.n_max, stop=["\n"] if part.first_line else ())
        counted = output.lstrip("\n").split("\n")[0] if part.first_line else output
        metric = part.metric
        if metric is metrics.classification:
            metric = partial(metric, classes=item.choices)
        return Answer(output, {"score": metrics.best(metric, counted, item.references)})

    def summary(self, found: Sequence[records.Record]) -> dict[str, float]:
        """LongBench's averages: of the categories of each language of which there are items."""
        values: dict[str, list[float]] = defaultdict(list)
        for record in found:
            if "score" in record["scores"]:
                values[record["dataset"]].append(record["scores"]["score"])
        averages = {}
        for language, parts in LANGUAGES.items():
            asked = values.keys() & parts
            # code alone is of no language
            if asked and (language == "all" or asked - frozenset(CATEGORIES["code"])):
                categories = (asked.intersection(names) for names in CATEGORIES.values())
                means = [fmean(fmean(values[name]) for name in names) for names in categories if names]
                averages[f"average {language}"] = fmean(means)
        return averages


def _parsed(record: data.Record) -> tuple[str, str, list[str], list[str]]:
    dataset = record["task" if "task" in record else "dataset"].removesuffix("_e")
    if dataset not in PARTS:
        raise ValueError(f"unknown LongBench task {dataset!r}")
    if "prompt" in record:
        prompt = data.text(record["prompt"])
    else:
        prompt = PARTS[dataset].prompt.format(context=record["context"], input=record["input"])
    classes = data.texts(record.get("all_classes") or [])
    if PARTS[dataset].metric is metrics.classification and not classes:
        raise KeyError("all_classes")
    return dataset, prompt, data.texts(record["answers"]), classes


TASK = LongBench
