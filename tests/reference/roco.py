"""RoCo (arXiv:2402.06262): evict the token with the lowest mean outside window and sinks.

Tokens with the highest deviations are not evicted.
"""

# scores are float32, like the policy's, so that policy and twin find the same ties
import numpy as np

CASES = [
    [],
    ["keep_std=0"],
    ["keep_std=3"],
    ["window=3", "sinks=0", "keep_std=6"],
    ["window=0", "sinks=1", "keep_std=1"],
]


def keep(rows, *, next, pinned, budget, slack, window, keep_std, sinks):
    return [_keep(row, next, max(sinks, pinned), budget - slack, window, keep_std) for row in rows]


def _keep(row, next, first, n_keep, window, keep_std):
    window = min(window, n_keep - first)
    mean, variance = {}, {}
    for token in row:
        attention = [sum(heads) for _, heads in token["seen"]]
        average = sum(attention) / len(attention)
        mean[token["pos"]] = np.float32(average)
        variance[token["pos"]] = np.float32(
            sum(a * a for a in attention) / len(attention) - average * average
        )
    alive = [token["pos"] for token in row]
    scope = [pos for pos in alive if first <= pos < next - window]
    for _ in range(min(keep_std, n_keep - first - window)):
        if scope:
            scope.remove(max(scope, key=lambda pos: (variance[pos], pos)))
    while len(alive) > n_keep:
        lowest = min(scope, key=lambda pos: (mean[pos], pos))
        scope.remove(lowest)
        alive.remove(lowest)
    return alive
