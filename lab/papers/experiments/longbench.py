"""LongBench's data sets, in its categories and languages."""

from __future__ import annotations

from kvtool.tasks.longbench import CATEGORIES, LANGUAGES

ENGLISH = "longbench/minilongbench_en.jsonl"

STRATA = {name: category for category, names in CATEGORIES.items() for name in names}
"""The category of each data set."""

POOLED = LANGUAGES
"""The averages of the CORM paper's Table 2."""
