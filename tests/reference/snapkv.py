"""SnapKV (arXiv:2404.14469): evict the token with the lowest pooled vote before the window, one at a time."""

from . import ends, keep_ranked

CASES = [
    [],
    ["pool=max"],
    ["kernel=1", "window=1"],
    ["kernel=3", "sinks=2", "window=5"],
    ["kernel=101", "pool=max"],
    ["kernel=101", "window=3"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0", "window=2", "sinks=3", "kernel=1"],
    ["heads=adaptive", "floor=0.8", "window=1", "pool=max"],
]


def keep(rows, *, next, window, kernel, pool, **options):
    limits, scores = ends(next=next, window=window, **options), []
    for row in rows:
        before = [token for token in row if token["pos"] < limits.recent]
        votes = [sum(sum(heads) for t, heads in token["seen"] if t > next - window) for token in before]
        score = dict(zip([token["pos"] for token in before], pooled(votes, kernel, pool), strict=True))
        scores.append({token["pos"]: score.get(token["pos"]) for token in row})
    return keep_ranked(scores, limits)


def pooled(values, kernel, pool):
    """Pool each value with kernel // 2 neighbours on either side. Padding is 0 for "avg", -inf for "max"."""
    reach = kernel // 2
    padding = [0.0 if pool == "avg" else float("-inf")] * reach
    padded = padding + values + padding
    windows = [padded[i : i + kernel] for i in range(len(values))]
    # with "avg", the policy compares sums instead of means, and so does the twin. Sums have the same order as
    # means, and they are exact in the tests
    return [sum(window) if pool == "avg" else max(window) for window in windows]
