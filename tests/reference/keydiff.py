"""KeyDiff (arXiv:2504.15364): outside window and sinks the token most like the average goes, one at a time.

Normalised keys are rounded to whole numbers, 127 being one, so that equal scores are equal.
"""

import math

# for float32 alone, whose rounding decides which scores are equal
import numpy as np

from . import keep_shared

CASES = [
    [],
    ["sinks=0"],
    ["sinks=2", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, *, next, pinned, budget, slack, sinks, window, heads, floor):
    first, rows = max(sinks, pinned), [_likeness(row) for row in rows]
    if heads == "adaptive":
        # a row holds twice the budget at most
        n_keep = budget // 2 - slack
        scores = [{pos: -alike for pos, alike in likeness.items()} for likeness in rows]
        return keep_shared(scores, first, next - min(window, n_keep - first), n_keep, floor, budget - slack)
    return [_keep(likeness, next, first, budget - slack, window) for likeness in rows]


def _likeness(row):
    unit = {token["pos"]: _normalised(token["key"]) for token in row}
    total = [sum(column) for column in zip(*unit.values(), strict=True)]
    return {pos: np.float32(sum(x * y for x, y in zip(key, total, strict=True))) for pos, key in unit.items()}


def _keep(likeness, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    alive = sorted(likeness)
    while len(alive) > n_keep:
        alive.remove(
            max((pos for pos in alive if first <= pos < recent), key=lambda pos: (likeness[pos], -pos))
        )
    return alive


def _normalised(key):
    norm = math.sqrt(sum(x * x for x in key))
    return [round(x * (127 / norm)) if norm else 0 for x in key]
