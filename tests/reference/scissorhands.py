"""Scissorhands (arXiv:2305.17118): evict the token that has the most low scores in the history.

One token is evicted at a time.
"""

from . import ends, keep_ranked, news

CASES = [
    [],
    ["history=1"],
    ["history=6", "window=2"],
    ["history=37", "window=0", "sinks=3"],
    ["t=cells", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "history=6", "window=2", "sinks=3"],
]


def keep(rows, *, next, slack, history, t, **options):
    n_part = min(8, -(-history // slack))
    n_query = -(-history // n_part)
    counts = [_count(row, next, n_part, n_query) for row in rows]
    scores = [{pos: -count for pos, count in row_counts.items()} for row_counts in counts]
    return keep_ranked(scores, ends(next=next, slack=slack, **options))


def _count(row, next, n_part, n_query):
    """Return {pos: number of low scores that the token got in the history}.

    The stream is divided into parts of n_query queries. The history is the newest n_part parts. A head of a
    query gives a token a low score if the head's attention to the token is less than 1 / t.
    """
    part = (next - 1) // n_query
    count = {}
    for token, attention in zip(row, news(row), strict=True):
        history = token["notes"].setdefault("history", {})
        low = sum(a < 1 / t for t, heads in attention for a in heads)
        history[part] = history.get(part, 0) + low
        count[token["pos"]] = sum(history.get(part - i, 0) for i in range(n_part))
    return count
