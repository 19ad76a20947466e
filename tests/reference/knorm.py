"""Knorm (arXiv:2406.11430): evict the token with the largest key norm outside window and sinks.

One token is evicted at a time.
"""

from . import ends, keep_ranked

CASES = [
    [],
    ["sinks=0"],
    ["sinks=2", "window=4"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0.7", "window=2", "sinks=3"],
]


def keep(rows, **options):
    scores = [{token["pos"]: -sum(x * x for x in token["key"]) for token in row} for row in rows]
    return keep_ranked(scores, ends(**options))
