"""TOVA (arXiv:2401.06104): the least attended, oldest token goes, one at a time."""

from . import keep_shared

CASES = [
    [],
    ["window=0"],
    ["per=row", "window=2", "sinks=1"],
    ["per=row", "heads=adaptive"],
    ["per=row", "heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, *, next, pinned, budget, slack, per, window, sinks, heads, floor):
    scores = [{token["pos"]: token["last"] for token in row} for row in rows]
    if per == "layer":
        total = {pos: sum(score[pos] for score in scores) for pos in scores[0]}
        scores = [total] * len(rows)
    first = max(sinks, pinned)
    if heads == "adaptive":
        # a row holds twice the budget at most
        n_keep = budget // 2 - slack
        return keep_shared(scores, first, next - min(window, n_keep - first), n_keep, floor, budget - slack)
    n_keep = budget - slack
    return [_keep(score, next, first, n_keep, window) for score in scores]


def _keep(score, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    alive = sorted(score)
    while len(alive) > n_keep:
        alive.remove(min((pos for pos in alive if first <= pos < recent), key=lambda pos: (score[pos], pos)))
    return alive
