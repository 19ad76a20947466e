"""KeyDiff (arXiv:2504.15364): outside window and sinks the token most like the average goes, one at a time.

Normalised keys are rounded to whole numbers, 127 being one, so that equal scores are equal.
"""

import math

# for float32 alone, whose rounding decides which scores are equal
import numpy as np

CASES = [[], ["sinks=0"], ["sinks=2", "window=4"]]


def keep(rows, *, next, pinned, budget, slack, sinks, window):
    return [_keep(row, next, max(sinks, pinned), budget - slack, window) for row in rows]


def _keep(row, next, first, n_keep, window):
    unit = {token["pos"]: _normalised(token["key"]) for token in row}
    total = [sum(column) for column in zip(*unit.values(), strict=True)]
    likeness = {
        pos: np.float32(sum(x * y for x, y in zip(key, total, strict=True))) for pos, key in unit.items()
    }
    recent = next - min(window, n_keep - first)
    alive = sorted(unit)
    while len(alive) > n_keep:
        alive.remove(
            max((pos for pos in alive if first <= pos < recent), key=lambda pos: (likeness[pos], -pos))
        )
    return alive


def _normalised(key):
    norm = math.sqrt(sum(x * x for x in key))
    return [round(x * (127 / norm)) if norm else 0 for x in key]
