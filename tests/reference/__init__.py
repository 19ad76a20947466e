"""Brute-force twins of the policies, by the papers' definitions, in plain Python without kvtool.

Every policy has a twin: NAME.py with CASES, the options to compare with, and

    def keep(rows, *, next, pinned, budget, slack, **params) -> list[list[int]]

Parameters
----------
rows
    A list for each KV head of ONE layer, with a dict for each token of the row, oldest first:
    pos    position in the stream
    seen   for each query since the token came, its own first: (t, [attention of each head of the group]);
           t is the number of tokens that the query has seen, itself included
    mass   sum of all attention in `seen`
    last   attention of the last query, summed over the group
    key    the key before RoPE, a list of floats
    old    for buzz: True for a token that has survived an eviction in the middle
    row    the row's number among the rows of all layers
    notes  the twin's own dict, empty at first: what it must remember from one plan to the next
next
    Position of the next token.
pinned
    Tokens with pos < pinned stay.
params
    All parameters of the policy.

Returns
-------
For each row the sorted positions that stay; or a pair: these, and for each row the merges
{dst pos: [(src pos, weight), ...]}. Of `rows`, a twin changes only its notes, and buzz sets `old`.

A twin may also have observe(rows, *, next, **params). It is called when positions start over, because the
engine then observes between two plans. A twin with a parameter n_ctx gets the context length.
"""

from typing import NamedTuple


def news(row):
    """Return for each token of a row the entries of `seen` since the last call. Its notes count them."""
    fresh = [token["seen"][token["notes"].get("n_seen", 0) :] for token in row]
    for token in row:
        token["notes"]["n_seen"] = len(token["seen"])
    return fresh


def n_arrived(row):
    """Number of tokens of a row that came since the last plan. Call it before `news`."""
    return sum("n_seen" not in token["notes"] for token in row)


class Ends(NamedTuple):
    """Protected ends of a row, and number of tokens to keep."""

    first: int
    recent: int
    n_keep: int
    n_most: int
    is_shared: bool
    floor: float


def ends(*, next, pinned, budget, slack, window, sinks=0, heads="equal", floor=0.2, layers="equal"):
    """Ends of a policy that ranks: tokens before `first` and from `recent` on stay."""
    # a row that shares a budget may hold twice the mean: `budget` is that maximum
    is_shared = heads == "adaptive"
    first, n_keep = max(sinks, pinned), budget // (2 if is_shared else 1) - slack
    return Ends(first, next - min(window, n_keep - first), n_keep, budget - slack, is_shared, floor)


def keep_ranked(scores, ends):
    """Evict the lowest of scores {pos: score} between the ends, one at a time, the oldest among equals."""
    if ends.is_shared:
        return keep_shared(scores, ends.first, ends.recent, ends.n_keep, ends.floor, ends.n_most)
    kept = []
    for score in scores:
        alive = sorted(score)
        while len(alive) > ends.n_keep:
            between = (pos for pos in alive if ends.first <= pos < ends.recent)
            alive.remove(min(between, key=lambda pos: (score[pos], pos)))
        kept.append(alive)
    return kept


def keep_shared(scores, first, recent, n_keep, floor, most):
    """Ada-KV (arXiv:2407.11550), with kvpress's safeguard: a layer's rows share n_keep tokens per row.

    scores: {pos: score} of each row. First, each row evicts down to `most` tokens. Then, while there are too
    many, the lowest score of all rows is evicted; among equals, the oldest token of the last row. Only tokens
    from `first` to `recent` are evicted, and a row with `floor` * n_keep tokens evicts no more.
    """
    alive = [sorted(row) for row in scores]
    lowest = lambda row: min(  # noqa: E731
        (pos for pos in alive[row] if first <= pos < recent), key=lambda pos: (scores[row][pos], pos)
    )
    for row, own in enumerate(alive):
        while len(own) > most and any(first <= pos < recent for pos in own):
            own.remove(lowest(row))
    while sum(map(len, alive)) > n_keep * len(alive):
        may = [
            row
            for row, own in enumerate(alive)
            if len(own) > int(floor * n_keep) and any(first <= pos < recent for pos in own)
        ]
        if not may:
            break
        goes = {row: lowest(row) for row in may}
        out = min(may, key=lambda row: (scores[row][goes[row]], goes[row], -row))
        alive[out].remove(goes[out])
    return alive
