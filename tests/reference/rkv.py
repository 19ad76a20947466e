"""R-KV (arXiv:2505.24133): evict the token with the lowest score before the window, one at a time."""

import math

# scores are float32, like the policy's, so that policy and twin find the same ties
import numpy as np

from . import ends, keep_ranked, normalised

CASES = [
    [],
    ["window=5", "sinks=2", "kernel=1"],
    ["mixture=0", "similar=3", "kernel=3"],
    ["mixture=1", "window=1"],
    ["mixture=0.5", "threshold=0.1", "similar=0"],
    ["threshold=0.9", "kernel=101"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "mixture=0.5", "window=2", "sinks=3"],
]


def keep(rows, *, next, window, mixture, kernel, threshold, similar, **options):
    limits, scores = ends(next=next, window=window, **options), []
    for row in rows:
        before = [token for token in row if token["pos"] < limits.recent]
        votes = [sum(max(heads) for t, heads in token["seen"] if t > next - window) for token in before]
        cosines = similarities([token["key"] for token in row])
        redundancy = softmax(means(spared(cosines, threshold * 127 * 127, similar)))
        score = {
            token["pos"]: np.float32(mixture * vote - (1 - mixture) * alike)
            for token, vote, alike in zip(before, pooled(shares(votes), kernel), redundancy, strict=False)
        }
        scores.append({token["pos"]: score.get(token["pos"]) for token in row})
    return keep_ranked(scores, limits)


def shares(votes):
    total = sum(votes)
    return [vote / total if total else 0.0 for vote in votes]


def pooled(values, kernel):
    """Return, for each value, the maximum of it and its kernel // 2 neighbours on either side."""
    reach = kernel // 2
    padding = [float("-inf")] * reach
    padded = padding + values + padding
    return [max(padded[i : i + kernel]) for i in range(len(values))]


def similarities(keys):
    """Return matrix[i][j]: the dot product of the rounded keys i and j. The diagonal is 0."""
    unit = np.array([normalised(key) for key in keys])
    matrix = unit @ unit.T
    np.fill_diagonal(matrix, 0)
    return matrix.tolist()


def spared(matrix, threshold, n_spared):
    """In each row of the matrix, set the last n_spared values above the threshold to 0.

    The diagonal is not changed, and does not count towards n_spared.
    """
    result = [list(row) for row in matrix]
    for i, row in enumerate(result):
        alike = [j for j, value in enumerate(row) if value > threshold and j != i]
        for j in alike[max(len(alike) - n_spared, 0) :]:
            row[j] = 0
    return result


def means(matrix):
    """Return the mean of each column, divided by 127 * 127. This makes it a mean cosine."""
    n = len(matrix)
    return [sum(column) / (n * 127 * 127) for column in zip(*matrix, strict=True)]


def softmax(values):
    weights = [math.exp(value) for value in values]
    total = 0.0
    for weight in weights:
        # this is a loop, because sum() of Python 3.12 corrects rounding errors and the policy does not
        total += weight
    return [weight / total for weight in weights]
