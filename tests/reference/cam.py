"""CaM: evict the first token after the sinks, one at a time.

The value of an evicted token may be merged into the next kept tokens.
"""

from .random import hash_of

CASES = [
    [],
    ["merge=3", "sinks=1", "seed=5"],
    ["score=sum", "merge=16"],
    ["score=sum", "merge=3", "denominator=targets"],
    ["score=average", "denominator=max", "merge=5", "sinks=0"],
]


def keep(rows, *, next, pinned, budget, slack, sinks, merge, score, denominator, seed):
    positions, merges = [], []
    for row in rows:
        attention = {t["pos"]: _score(t, score) for t in row}
        evicted = [pos for pos in attention if pos >= max(sinks, pinned)][
            : max(len(row) - (budget - slack), 0)
        ]
        stay = [pos for pos in attention if pos not in evicted]
        positions.append(stay)
        merges.append({})
        for pos in evicted[-merge:]:
            after = [other for other in stay if other > pos]
            compared = {"mean": after, "targets": after[:merge], "max": stay}[denominator]
            compared = [attention[other] for other in compared]
            right = max(compared) if denominator == "max" else sum(compared) / len(compared)
            chance = hash_of(seed, next, row[0]["row"], pos) >> 40
            if chance / 2**24 < _probability(attention[pos], right):
                for other in after[:merge]:
                    merges[-1].setdefault(other, [(other, 1)]).append((pos, 1 / merge))
    return positions, merges


def _score(token, score):
    if score == "last":
        return token["last"]
    return token["mass"] / len(token["seen"]) if score == "average" else token["mass"]


def _probability(score, right):
    """Return score / right, but at most 1. As in the authors' code, 0 / 0 is 0."""
    if right == 0:
        return 1 if score > 0 else 0
    return min(score / right, 1)
