"""Brute force by the definitions of the papers, in plain Python; imports nothing from kvtool.

Every policy has a twin here: NAME.py with CASES, the options that the two are compared with, and

    def keep(rows, *, next, pinned, budget, slack, **params) -> list[list[int]]

Parameters
----------
rows
    A list for each KV head of ONE layer, with a dict for each token of the row, oldest first:
    pos    position in the stream
    seen   for each query since the token came, its own first: (t, [attention of each head of the group]);
           t is the number of tokens that the query has seen, itself included
    mass   sum of all of that
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
For each row the sorted positions that stay; or that, and for each row the merges
{dst pos: [(src pos, weight), ...]}. buzz sets `old`; nothing else is changed.

A twin may also have observe(rows, *, next, **params): when positions start over, the engine observes between
two plans. A twin that asks for n_ctx gets the context length.
"""

from typing import NamedTuple


def news(row):
    """For each token of a row what it has seen since the last call, which is noted in its notes."""
    fresh = [token["seen"][token["notes"].get("n_seen", 0) :] for token in row]
    for token in row:
        token["notes"]["n_seen"] = len(token["seen"])
    return fresh


def n_arrived(row):
    """Number of tokens of a row that have come since the last plan. Call it before `news`."""
    return sum("n_seen" not in token["notes"] for token in row)


class Ends(NamedTuple):
    """What stays whatever its score, and how many tokens of a row do."""

    first: int
    recent: int
    n_keep: int
    n_most: int
    is_shared: bool
    floor: float


def ends(*, next, pinned, budget, slack, window, sinks=0, heads="equal", floor=0.2, layers="equal"):
    """Of a policy that ranks: tokens before `first` and from `recent` on stay."""
    # rows that share hold twice the budget at most
    is_shared = heads == "adaptive"
    first, n_keep = max(sinks, pinned), budget // (2 if is_shared else 1) - slack
    return Ends(first, next - min(window, n_keep - first), n_keep, budget - slack, is_shared, floor)


def keep_ranked(scores, ends):
    """scores: {pos: score} of each row. One by one the lowest between the ends goes, of equals the oldest."""
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
    """Ada-KV (arXiv:2407.11550), with kvpress's safeguard: the rows of a layer share n_keep tokens a row.

    scores: {pos: score} of each row. While there are too many, the lowest score of all rows goes, and of
    equals the oldest token of the last row: only those from `first` to `recent`, and none of a row that is
    down to a share `floor` of n_keep. Before that a row gives what it has above `most`.
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
