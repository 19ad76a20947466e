"""Scissorhands (arXiv:2305.17118): the token with the most low scores of late goes, one at a time."""

from . import keep_shared, news

CASES = [
    [],
    ["history=1"],
    ["history=6", "window=2"],
    ["history=37", "window=0", "sinks=3"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "history=6", "window=2", "sinks=3"],
]


def keep(rows, *, next, pinned, budget, slack, window, history, sinks, heads, floor):
    n_part = min(8, -(-history // slack))
    n_query = -(-history // n_part)
    first, counts = max(sinks, pinned), [_count(row, next, n_part, n_query) for row in rows]
    if heads == "adaptive":
        # a row holds twice the budget at most
        n_keep = budget // 2 - slack
        scores = [{pos: -count for pos, count in own.items()} for own in counts]
        return keep_shared(scores, first, next - min(window, n_keep - first), n_keep, floor, budget - slack)
    return [_keep(count, next, first, budget - slack, window) for count in counts]


def _count(row, next, n_part, n_query):
    """{pos: pairs of a query and a head that gave it less than 1 / t}, in the last parts of the history."""
    part = (next - 1) // n_query
    count = {}
    for token, seen in zip(row, news(row), strict=True):
        history = token["notes"].setdefault("history", {})
        low = sum(a < 1 / t for t, heads in seen for a in heads)
        history[part] = history.get(part, 0) + low
        count[token["pos"]] = sum(history.get(part - i, 0) for i in range(n_part))
    return count


def _keep(count, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    alive = sorted(count)
    while len(alive) > n_keep:
        alive.remove(max((pos for pos in alive if first <= pos < recent), key=lambda pos: (count[pos], -pos)))
    return alive
