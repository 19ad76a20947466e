"""LongBench's data sets, in its categories and languages."""

from __future__ import annotations

from kvtool.tasks.longbench import CATEGORIES, LANGUAGES

ENGLISH = "longbench/minilongbench_en.jsonl"

ONLY_SIX = ("--set", "only=qasper,multifieldqa_en,hotpotqa,2wikimqa,qmsum,trec")
"""The data sets of BumbleBee's Table 2."""

STRATA = {name: category for category, names in CATEGORIES.items() for name in names}
"""The category of each data set."""

POOLED = LANGUAGES
"""The averages of the CORM paper's Table 2."""
