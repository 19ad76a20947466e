"""Recall: StreamingLLM with a smaller budget, which leaves cells for recalled tokens.

tests/reference/transformer.py chooses the archived tokens that a step recalls.
"""

from . import streamingllm

CASES = [[], ["sinks=0"], ["recalled=2"]]


def keep(rows, *, next, pinned, budget, slack, sinks, recalled, chunk, search, exact):
    return streamingllm.keep(
        rows, next=next, pinned=pinned, budget=budget - (recalled or 1), slack=slack, sinks=sinks
    )
