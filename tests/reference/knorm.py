"""Knorm (arXiv:2406.11430): outside window and sinks the token of the longest key goes, one at a time."""

from . import keep_shared

CASES = [
    [],
    ["sinks=0"],
    ["sinks=2", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, *, next, pinned, budget, slack, sinks, window, heads, floor):
    if heads == "adaptive":
        # a row holds twice the budget at most
        first, n_keep = max(sinks, pinned), budget // 2 - slack
        scores = [{token["pos"]: -sum(x * x for x in token["key"]) for token in row} for row in rows]
        return keep_shared(scores, first, next - min(window, n_keep - first), n_keep, floor, budget - slack)
    return [_keep(row, next, max(sinks, pinned), budget - slack, window) for row in rows]


def _keep(row, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    alive = list(row)
    while len(alive) > n_keep:
        longest = max(
            (token for token in alive if first <= token["pos"] < recent),
            key=lambda token: (sum(x * x for x in token["key"]), -token["pos"]),
        )
        alive.remove(longest)
    return [token["pos"] for token in alive]
