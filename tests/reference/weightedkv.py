"""WeightedKV (arXiv:2503.01330, Algorithm 1): evict one token at a time; merge its value into the next token.

The average attention to each token is computed once, before the first eviction. A value is a dictionary
{position: weight}: it gives the weights of the original values that were merged into it.
"""

import numpy as np

CASES = [[], ["window=3", "sinks=0"], ["merge=false"]]


def keep(rows, *, next, pinned, budget, slack, window, sinks, merge):
    answers = [_keep(row, next, max(sinks, pinned), budget - slack, window) for row in rows]
    positions = [stay for stay, _ in answers]
    return (positions, [terms for _, terms in answers]) if merge else positions


def _keep(row, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    average = {t["pos"]: np.float32(t["mass"]) / np.float32(len(t["seen"])) for t in row}
    value = {pos: {pos: 1.0} for pos in average}
    while len(value) > n_keep:
        alive = sorted(value)
        evicted = min((pos for pos in alive if first <= pos < recent), key=lambda pos: (average[pos], pos))
        right = alive[alive.index(evicted) + 1]
        a, b = float(average[evicted]), float(average[right])
        if a + b == 0:
            a = b = 1
        value[right] = _sum(_scaled(value.pop(evicted), a / (a + b)), _scaled(value[right], b / (a + b)))
    return sorted(value), {dst: list(made.items()) for dst, made in value.items() if len(made) > 1}


def _scaled(value, by):
    return {pos: weight * by for pos, weight in value.items()}


def _sum(one, other):
    return {pos: one.get(pos, 0) + other.get(pos, 0) for pos in [*one, *other]}
