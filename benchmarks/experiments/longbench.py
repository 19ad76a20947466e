"""LongBench's data sets, in its categories and languages."""

from __future__ import annotations

ENGLISH = "longbench/minilongbench_en.jsonl"
CHINESE = "longbench/minilongbench_zh.jsonl"

ONLY_SIX = ("--set", "only=qasper,multifieldqa_en,hotpotqa,2wikimqa,qmsum,trec")
"""The data sets of BumbleBee's Table 2."""

_SETS = {
    "single-document questions": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "questions on several documents": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summaries": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}

STRATA = {name: category for category, names in _SETS.items() for name in names}
"""The category of each data set."""

_ZH = frozenset({"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"})

POOLED = {
    "EN": frozenset(STRATA) - _ZH,
    # code counts in both
    "ZH": _ZH | frozenset(_SETS["code"]),
    "all": frozenset(STRATA),
}
"""The macro-averages of the CORM paper's Table 2."""
