"""Expected Attention (arXiv:2510.00636): evict the token with the lowest score outside sinks and window.

One token is evicted at a time.
"""

import math

# scores are float32, like the policy's, so that policy and twin find the same ties
import numpy as np

from . import ends, keep_ranked

CASES = [
    [],
    ["sinks=0", "window=1", "epsilon=0"],
    ["sinks=2", "window=5", "covariance=false"],
    ["lengths=false"],
    ["heads=adaptive", "floor=0.5"],
    ["heads=adaptive", "floor=0", "epsilon=0.5"],
]


def keep(rows, *, sinks, queries, ahead, covariance, lengths, epsilon, **options):
    """Keep the tokens with the highest scores.

    rows: in each record, `future` has a pair for each head of the group: the mean and the variance of its
    logits.
    """
    scores = []
    for row in rows:
        behind = [token for token in row if token["pos"] >= sinks]
        score = {token["pos"]: np.float32(0) for token in row}
        shares = [0.0] * len(behind)
        for head in range(len(row[0]["future"])):
            logits = [
                token["future"][head][0] + covariance * 0.5 * token["future"][head][1] for token in behind
            ]
            shares = [total + weight for total, weight in zip(shares, softmax(logits), strict=True)]
        for token, share in zip(behind, shares, strict=True):
            share /= len(token["future"])
            score[token["pos"]] = np.float32((share + epsilon) * token["value_norm"] if lengths else share)
        scores.append(score)
    return keep_ranked(scores, ends(sinks=sinks, **options))


def softmax(values):
    most = max(values, default=0.0)
    weights = [math.exp(value - most) for value in values]
    total = 0.0
    for weight in weights:
        # this is a loop, because sum() of Python 3.12 corrects rounding errors and the policy does not
        total += weight
    return [weight / total for weight in weights]
