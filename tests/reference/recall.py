"""Recall: StreamingLLM's rows in what the recalled tokens leave of the budget.

Which archived tokens a step recalls, tests/reference/transformer.py says.
"""

from tests.reference import streamingllm

CASES = [[], ["sinks=0"], ["recalled=2"]]


def keep(rows, *, next, pinned, budget, slack, sinks, recalled, chunk, search, exact):
    return streamingllm.keep(
        rows, next=next, pinned=pinned, budget=budget - (recalled or 1), slack=slack, sinks=sinks
    )
