"""KeyDiff (arXiv:2504.15364): evict the token whose key is most similar to the average of the row's keys.

Window and sinks are not evicted. One token is evicted at a time.
"""

import math

# scores are float32, like the policy's, so that policy and twin find the same ties
import numpy as np

from . import ends, keep_ranked, normalised

CASES = [
    [],
    ["sinks=0"],
    ["sinks=2", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, **options):
    return keep_ranked([_unlikeness(row) for row in rows], ends(**options))


def _unlikeness(row):
    unit = {token["pos"]: normalised(token["key"]) for token in row}
    total = [sum(column) for column in zip(*unit.values(), strict=True)]
    dot = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731
    norm = math.sqrt(dot(total, total)) or 1
    return {pos: np.float32(-dot(key, total) / norm) for pos, key in unit.items()}
