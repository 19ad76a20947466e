"""Scores of what a model wrote against a right answer, by the definitions of those who first used them."""

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
    """The score against the reference that it is highest for; 0 without one."""
    return max((metric(output, reference) for reference in references), default=0.0)


def normalized(text: str) -> str:
    """As SQuAD's evaluation does: lower case, no punctuation (ASCII), no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(output: str, reference: str) -> float:
    """SQuAD's: 1 where both are the same once normalized."""
    return float(normalized(output) == normalized(reference))


def f1(output: str, reference: str) -> float:
    """SQuAD's (1.1), of normalized words; 0 where either has none."""
    return f1_of(normalized(output).split(), normalized(reference).split())


def subspan(output: str, reference: str) -> float:
    """Lost in the Middle's "best subspan EM": 1 where the output has the reference in it, both normalized."""
    return float(normalized(reference) in normalized(output))


def f1_of(output: Sequence[str], reference: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of two bags of words."""
    n = sum((Counter(output) & Counter(reference)).values())
    return 2 * n / (len(output) + len(reference)) if n else 0.0


def rouge(output: str, reference: str) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L by the rouge-score package: f-measures, words stemmed (Porter)."""
    scores = _rouge_scorer().score(reference, output)
    return {name: float(scores[name].fmeasure) for name in ("rouge1", "rouge2", "rougeL")}


def self_bleu(texts: Sequence[str]) -> float:
    """How alike texts are, 0 to 100: the mean of every one's BLEU-4 with all others as its references.

    As Zhu et al. define it (2018, arXiv:1802.01886). BLEU is sacrebleu's of sentences: tokenized by 13a,
    zero counts smoothed exponentially, only the orders that the text is long enough for.
    """
    import sacrebleu

    scores = [
        sacrebleu.sentence_bleu(text, [*texts[:i], *texts[i + 1 :]]).score for i, text in enumerate(texts)
    ]
    return float(sum(scores) / len(scores))


def f1_zh(output: str, reference: str) -> float:
    """LongBench's F1 of Chinese texts: of jieba's words without punctuation."""
    return f1_of(_words_zh(output), _words_zh(reference))


def rouge_l(output: str, reference: str) -> float:
    """LongBench's: the f-measure of ROUGE-L by the rouge package, which stems nothing; 0 where it fails."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([output], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        # an empty text, or a sentence beyond the package's recursion
        return 0.0


def rouge_l_zh(output: str, reference: str) -> float:
    """LongBench's of Chinese texts: jieba's words with spaces between them."""
    return rouge_l(*(" ".join(_jieba().cut(text, cut_all=False)) for text in (output, reference)))


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """LongBench's: one by the number of classes that the output names, if the right one is among them.

    A class whose name is a part of the right one's does not count; as in LongBench, of two such in a row only
    the first is left out.
    """
    named = [name for name in classes if name in output]
    at = 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            del named[at]
        at += 1
    return 1 / len(named) if reference in named else 0.0


def share_of_numbers(output: str, right: str) -> float:
    """LongBench's for counts and paragraphs: the share of the output's numbers that are the right one."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def retrieval(output: str, reference: str) -> float:
    """LongBench's: the share of the output's numbers that are "Paragraph N"'s, or in Chinese 段落N's."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return share_of_numbers(output, found[1]) if found else 0.0


def code_similarity(output: str, reference: str) -> float:
    """LongBench's: how alike the reference is to the output's first line that is neither comment nor fence.

    Its number is fuzzywuzzy's ratio, which without python-Levenshtein (LongBench installs none) is
    difflib's in whole percents.
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
    return [found for word in words if (found := "".join(word.split()))]


@cache
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


@cache
def _jieba() -> ModuleType:
    with warnings.catch_warnings():
        # its code is older than what Python and setuptools warn of now
        warnings.simplefilter("ignore")
        import jieba
    # it tells stderr how its dictionary loads
    jieba.setLogLevel(60)
    return sys.modules["jieba"]
