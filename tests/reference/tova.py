"""TOVA (arXiv:2401.06104): evict the token with the least attention, one at a time; on ties, the oldest."""

from . import ends, keep_ranked

CASES = [
    [],
    ["window=0"],
    ["per=row", "window=2", "sinks=1"],
    ["per=row", "heads=adaptive"],
    ["per=row", "heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, *, per, **options):
    scores = [{token["pos"]: token["last"] for token in row} for row in rows]
    if per == "layer":
        total = {pos: sum(score[pos] for score in scores) for pos in scores[0]}
        scores = [total] * len(rows)
    return keep_ranked(scores, ends(**options))
