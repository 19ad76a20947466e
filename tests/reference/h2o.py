"""H2O (arXiv:2306.14048): evict the token with the lowest attention sum outside window and sinks.

One token is evicted at a time. On ties, the oldest token is evicted.
"""

# scores are float32, like the policy's, so that policy and twin find the same ties
import numpy as np

from . import ends, keep_ranked, n_arrived, news

CASES = [
    [],
    ["window=3", "sinks=4"],
    ["window=0"],
    ["score=mean"],
    ["per=layer", "sinks=1"],
    ["per=layer", "score=mean", "group=max"],
    ["group=first"],
    ["group=mean"],
    ["decay=0.75"],
    ["decay=0", "window=2"],
    ["decay=0.96", "score=mean", "per=layer"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0", "window=2", "sinks=3"],
    ["heads=adaptive", "floor=0.8", "window=1", "score=mean"],
    ["heads=adaptive", "floor=1", "decay=0.75"],
]

GROUP = {"sum": sum, "max": max, "first": lambda heads: heads[0]}


def keep(rows, *, next, score="sum", per="row", group="sum", decay=1.0, decay_beyond=1.0, n_ctx=0, **options):
    """Keep the highest scores. Unless `per` is "row", a token's scores in all rows are added up."""
    observe(rows, next=next, score=score, group=group, decay=decay, decay_beyond=decay_beyond, n_ctx=n_ctx)
    scores = [{token["pos"]: token["notes"]["mass"] for token in row} for row in rows]
    if per != "row":
        scores = [
            {pos: sum((row_scores[pos] for row_scores in scores), np.float32(0)) for pos in scores[0]}
        ] * len(rows)
    if score == "mean":
        n_seen = {token["pos"]: np.float32(len(token["seen"])) for row in rows for token in row}
        scores = [{pos: mass / n_seen[pos] for pos, mass in row_scores.items()} for row_scores in scores]
    return keep_ranked(scores, ends(next=next, **options))


def observe(rows, *, next, score, group, decay, decay_beyond, n_ctx, **_):
    if score == "sum" and 0 < n_ctx < next:
        decay = min(decay, decay_beyond)
    for row in rows:
        fading = np.float32(decay ** n_arrived(row))
        for token, attention in zip(row, news(row), strict=True):
            come = np.float32(sum(GROUP[group](heads) for _, heads in attention))
            token["notes"]["mass"] = token["notes"].get("mass", np.float32(0)) * fading + come
