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
    old    for buzz: True for a token that an eviction has kept while it lay between sinks and window
    row    the row's number among the rows of all layers
    notes  a dict, empty at first, for values that the twin needs again in the next plan
next
    Position of the next token.
pinned
    Tokens with pos < pinned stay.
params
    All parameters of the policy.

Returns
-------
A list with the sorted positions that stay in each row. A twin that merges returns a pair: this list, and a
list with the merges of each row, {dst pos: [(src pos, weight), ...]}. In `rows`, a twin changes only `notes`;
buzz also sets `old`.

A twin may also have observe(rows, *, next, **params). It is called when positions start over, because the
engine then observes between two plans. If `keep` has a parameter n_ctx, it gets the context length.
"""

from typing import NamedTuple


def news(row):
    """Return, for each token of a row, the entries that `seen` has gained since the last call of `news`."""
    fresh = [token["seen"][token["notes"].get("n_seen", 0) :] for token in row]
    for token in row:
        token["notes"]["n_seen"] = len(token["seen"])
    return fresh


def n_arrived(row):
    """Number of tokens of a row that came since the last plan. Call it before `news`."""
    return sum("n_seen" not in token["notes"] for token in row)


class Ends(NamedTuple):
    """Arguments of keep_ranked. Tokens before position `first` and from `recent` on always stay.

    n_keep: tokens to keep, per row. is_shared: True if they are shared among the rows of a layer. n_most,
    floor: arguments `most` and `floor` of keep_shared.
    """

    first: int
    recent: int
    n_keep: int
    n_most: int
    is_shared: bool
    floor: float


def ends(*, next, pinned, budget, slack, window, sinks=0, heads="equal", floor=0.2, layers="equal"):
    """Return the Ends for the parameters of a policy that ranks tokens."""
    # with heads=adaptive, `budget` is a row's maximum, twice the mean of the layer's rows
    is_shared = heads == "adaptive"
    first, n_keep = max(sinks, pinned), budget // (2 if is_shared else 1) - slack
    return Ends(first, next - min(window, n_keep - first), n_keep, budget - slack, is_shared, floor)


def keep_ranked(scores, ends):
    """Evict the lowest score of each row between the ends, one at a time, the oldest among equals.

    scores: {pos: score} of each row.
    """
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
    """Ada-KV (arXiv:2407.11550): a layer's rows share a budget of n_keep tokens per row.

    scores: {pos: score} of each row. First, each row evicts down to `most` tokens. Then the lowest score of
    all rows is evicted until the budget is met; among equals, the oldest token, and of these the last row's.
    Only tokens from `first` up to `recent` are evicted. A row that is down to `floor` * n_keep tokens evicts
    no more (the safeguard of kvpress).
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
