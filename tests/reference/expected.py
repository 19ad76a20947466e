"""Expected Attention (arXiv:2510.00636): outside sinks and window the lowest score goes, one at a time."""

import math

# for float32 alone, whose rounding decides which scores are equal
import numpy as np

from . import keep_shared

CASES = [
    [],
    ["sinks=0", "window=1", "epsilon=0"],
    ["sinks=2", "window=5", "covariance=false"],
    ["lengths=false"],
    ["heads=adaptive", "floor=0.5"],
    ["heads=adaptive", "floor=0", "epsilon=0.5"],
]


def keep(
    rows,
    *,
    next,
    pinned,
    budget,
    slack,
    sinks,
    window,
    queries,
    ahead,
    covariance,
    lengths,
    epsilon,
    heads,
    layers,
    floor,
):
    """A record's `future` has for each head of the group the mean and the variance of its logits."""
    # of rows that share, the budget is what a row may hold
    n_keep = budget // 2 - slack if heads == "adaptive" else budget - slack
    first = max(sinks, pinned)
    recent = next - min(window, n_keep - first)
    scores = []
    for row in rows:
        behind = [token for token in row if token["pos"] >= sinks]
        score = {token["pos"]: np.float32(0) for token in row}
        shares = [0.0] * len(behind)
        for head in range(len(row[0]["future"])):
            logits = [
                token["future"][head][0] + covariance * 0.5 * token["future"][head][1] for token in behind
            ]
            shares = [one + own for one, own in zip(shares, softmax(logits), strict=True)]
        for token, share in zip(behind, shares, strict=True):
            share /= len(token["future"])
            score[token["pos"]] = np.float32((share + epsilon) * token["length"] if lengths else share)
        scores.append(score)
    if heads == "adaptive":
        return keep_shared(scores, first, recent, n_keep, floor, budget - slack)
    kept = []
    for score in scores:
        alive = sorted(score)
        while len(alive) > n_keep:
            alive.remove(
                min((pos for pos in alive if first <= pos < recent), key=lambda pos: (score[pos], pos))
            )
        kept.append(alive)
    return kept


def softmax(values):
    most = max(values, default=0.0)
    weights = [math.exp(value - most) for value in values]
    total = 0.0
    for weight in weights:
        # one after the other, as rounding needs it
        total += weight
    return [weight / total for weight in weights]
