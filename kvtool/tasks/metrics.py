"""Scores that compare a model's output with a right answer. They follow their original definitions."""

from __future__ import annotations

import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

_PUNCTUATION = frozenset(string.punctuation)

_PUNCTUATION_ZH = _PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)

Metric = Callable[[str, str], float]


def best(metric: Metric, output: str, references: Sequence[str]) -> float:
    """Return the highest score over the references, or 0 if `references` is empty."""
    return max((metric(output, reference) for reference in references), default=0.0)


def normalized(text: str) -> str:
    """Normalize the text as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(output: str, reference: str) -> float:
    """SQuAD's exact match: 1 if both are the same after normalization."""
    return float(normalized(output) == normalized(reference))


def f1(output: str, reference: str) -> float:
    """SQuAD's F1 (evaluation script 1.1) of the normalized words. 0 if either text has no words."""
    return f1_of(normalized(output).split(), normalized(reference).split())


def subspan(output: str, reference: str) -> float:
    """Lost in the Middle's "best subspan EM": 1 if the output contains the reference, both normalized."""
    return float(normalized(reference) in normalized(output))


def f1_of(output: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words."""
    n = sum((Counter(output) & Counter(reference)).values())
    return 2 * n / (len(output) + len(reference)) if n else 0.0


def rouge(output: str, reference: str) -> dict[str, float]:
    """f-measures of ROUGE-1, ROUGE-2 and ROUGE-L from the rouge-score package, with Porter's stemmer."""
    scores = _rouge_scorer().score(reference, output)
    return {name: float(scores[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")}


def f1_zh(output: str, reference: str) -> float:
    """LongBench's F1 for Chinese texts: jieba finds the words, and punctuation is removed."""
    return f1_of(_words_zh(output), _words_zh(reference))


def rouge_l(output: str, reference: str) -> float:
    """LongBench's ROUGE-L: the f-measure of the rouge package without stemming. 0 if the package fails."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([output], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        # the text is empty, or a sentence is too long for the package's recursion
        return 0.0


def rouge_l_zh(output: str, reference: str) -> float:
    """LongBench's ROUGE-L for Chinese texts: jieba finds the words, and spaces are put between them."""
    return rouge_l(*(" ".join(_jieba().cut(text, cut_all=False)) for text in (output, reference)))


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """LongBench's classification score.

    It is 1 / n if the output names n classes and one of them is the right class, otherwise 0.

    A class whose name is part of the right class's name is not counted. As in LongBench, there is an
    exception: if two such classes follow each other among the n named classes, the second is counted.
    """
    named = [name for name in classes if name in output]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            del named[at]
        at += 1
    return 1 / len(named) if reference in named else 0.0


def share_of_numbers(output: str, right: str) -> float:
    """LongBench's score for counts: the share of the output's numbers that are right."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def retrieval(output: str, reference: str) -> float:
    """LongBench's score for "Paragraph N" or "段落N": the share of the output's numbers that are N."""
    match = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return share_of_numbers(output, match[1]) if match else 0.0


def code_similarity(output: str, reference: str) -> float:
    """LongBench's code score: similarity of the reference and the output's first line of code.

    Lines with a comment or a code fence are skipped. LongBench uses fuzzywuzzy's ratio without
    python-Levenshtein. This is difflib's ratio in whole percents.
    """
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def _words_zh(text: str) -> list[str]:
    words = (
        "".join(c for c in word.lower() if c not in _PUNCTUATION_ZH)
        for word in _jieba().cut(text, cut_all=False)
    )
    return [joined for word in words if (joined := "".join(word.split()))]


@cache
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


@cache
def _jieba() -> ModuleType:
    with warnings.catch_warnings():
        # jieba's old code makes Python and setuptools warn
        warnings.simplefilter("ignore")
        import jieba
    # without this, jieba reports on stderr how its dictionary loads
    jieba.setLogLevel(60)
    return sys.modules["jieba"]
