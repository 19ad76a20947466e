"""KeyDiff (arXiv:2504.15364): evict the token whose key is most similar to the average of the row's keys.

Window and sinks are not evicted. One token is evicted at a time.

The twin scales normalised keys by 127 and rounds them to integers, as the policy does. Sums of integers are
exact, so twin and policy find the same ties between scores.
"""

import math

# scores are float32, because scores that are equal in the policy must also be equal in the twin
import numpy as np

from . import ends, keep_ranked

CASES = [
    [],
    ["sinks=0"],
    ["sinks=2", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, **how):
    return keep_ranked([_unlikeness(row) for row in rows], ends(**how))


def _unlikeness(row):
    unit = {token["pos"]: _normalised(token["key"]) for token in row}
    total = [sum(column) for column in zip(*unit.values(), strict=True)]
    product = lambda key: sum(x * y for x, y in zip(key, total, strict=True))  # noqa: E731
    return {pos: -np.float32(product(key)) for pos, key in unit.items()}


def _normalised(key):
    norm = math.sqrt(sum(x * x for x in key))
    return [round(x * (127 / norm)) if norm else 0 for x in key]
