"""Twins of the policies: brute force by the papers' definitions, in plain Python without kvtool.

Every policy has a twin, NAME.py. Its CASES are the options with which it is compared to the policy, and its
function `keep` makes a plan:

    def keep(rows, *, next, pinned, budget, slack, **params) -> list[list[int]]

Parameters
----------
rows
    A list for each KV head of ONE layer. It has a dict for each token of the row, oldest first:
    pos    position in the stream
    seen   (t, [attention of each head of the group]) for each query from the token's own query on;
           t is the number of tokens that the query has seen, including the query's token
    mass   sum of all attention in `seen`
    last   attention of the last query, summed over the group
    key    the key before RoPE, a list of floats
    future, value_norm
           if the policy reads Signal.FUTURE or VALUE_NORMS: (mean, variance) of the future logits of each
           head of the group, and the norm of the value
    old    for buzz: True if an eviction has kept the token while it was between sinks and window
    row    index of the row among the rows of all layers
    notes  a dict, empty at first, for values that the twin needs in the next plan
next
    Position of the next token.
pinned
    Tokens with pos < pinned always stay.
params
    All parameters of the policy.

Returns
-------
A list with the sorted positions of the tokens that stay in each row. A twin that merges returns a pair of
this list and a list of merges. For each row, merges are {dst pos: [(src pos, weight), ...]}. A twin changes
only `notes` in `rows`. Buzz also sets `old`.

Add floats in a loop, in the policy's order: `sum` of Python 3.12 rounds in another way.

A twin may also have a function observe(rows, *, next, **params). The reference calls it when gaps between
positions are closed, because the engine's policy then observes the cache, although no plan is due. If `keep`
has a parameter n_ctx, this is the context length.
"""

import math
from typing import NamedTuple


def news(row):
    """Return the new entries of `seen` for each token of a row: those added since the last call of `news`."""
    fresh = [token["seen"][token["notes"].get("n_seen", 0) :] for token in row]
    for token in row:
        token["notes"]["n_seen"] = len(token["seen"])
    return fresh


def n_arrived(row):
    """Return the number of tokens of a row that came since the last plan. Call this before `news`."""
    return sum("n_seen" not in token["notes"] for token in row)


def normalised(key):
    """Return a key with length 127, rounded to integers; a key of zeros stays zero.

    Some policies round keys in this way. Sums of integers are exact, so twin and policy find the same ties
    between scores.
    """
    norm = math.sqrt(sum(x * x for x in key))
    return [round(x * (127 / norm)) if norm else 0 for x in key]


class Ends(NamedTuple):
    """Arguments of keep_ranked. Tokens before position `first`, and tokens from `recent` on, always stay.

    n_keep: number of tokens to keep per row. If is_shared is True, the mean of the rows.
    is_shared: True if the rows of a layer share a budget.
    n_most, floor: the arguments `most` and `floor` of keep_shared.
    """

    first: int
    recent: int
    n_keep: int
    n_most: int
    is_shared: bool
    floor: float


def ends(*, next, pinned, budget, slack, window, sinks=0, heads="equal", floor=0.2, layers="equal"):
    """Return the Ends for the parameters of a policy that ranks tokens."""
    # with heads=adaptive, `budget` is the maximum of a row. It is twice the mean of the layer's rows
    is_shared = heads == "adaptive"
    first, n_keep = max(sinks, pinned), budget // (2 if is_shared else 1) - slack
    return Ends(first, next - min(window, n_keep - first), n_keep, budget - slack, is_shared, floor)


def keep_ranked(scores, ends):
    """In each row, evict the token with the lowest score between the ends, one token at a time.

    If several tokens have the lowest score, the oldest of them is evicted. scores: {pos: score} of each row.
    """
    if ends.is_shared:
        return keep_shared(scores, ends.first, ends.recent, ends.n_keep, ends.floor, ends.n_most)
    positions = []
    for score in scores:
        alive = sorted(score)
        while len(alive) > ends.n_keep:
            between = (pos for pos in alive if ends.first <= pos < ends.recent)
            alive.remove(min(between, key=lambda pos: (score[pos], pos)))
        positions.append(alive)
    return positions


def keep_shared(scores, first, recent, n_keep, floor, most):
    """Ada-KV (arXiv:2407.11550): a layer's rows share a budget of n_keep tokens per row.

    scores: {pos: score} of each row. First, each row evicts down to `most` tokens. Then, until the budget is
    met, the token with the lowest score in all rows is evicted. If several tokens have this score, the oldest
    is evicted. If these are equally old, the token in the last row is evicted. Only tokens from `first` up to
    `recent` are evicted. A row that has no more than `floor` * n_keep tokens does not evict (the safeguard of
    kvpress), and neither does a row that has only one token.
    """
    alive = [sorted(row) for row in scores]
    lowest = lambda row: min(  # noqa: E731
        (pos for pos in alive[row] if first <= pos < recent), key=lambda pos: (scores[row][pos], pos)
    )
    for row, positions in enumerate(alive):
        while len(positions) > most and any(first <= pos < recent for pos in positions):
            positions.remove(lowest(row))
    while sum(map(len, alive)) > n_keep * len(alive):
        may = [
            row
            for row, positions in enumerate(alive)
            if len(positions) > max(int(floor * n_keep), 1)
            and any(first <= pos < recent for pos in positions)
        ]
        if not may:
            break
        goes = {row: lowest(row) for row in may}
        out = min(may, key=lambda row: (scores[row][goes[row]], goes[row], -row))
        alive[out].remove(goes[out])
    return alive
