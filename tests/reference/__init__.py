"""Brute force by the definitions of the papers, in plain Python; imports nothing from kvtool.

Every policy has a twin here, <policy>.py with CASES, the options that the two are compared with, and

    def keep(rows, *, next, pinned, budget, slack, **params) -> list[list[int]]

rows: one list for each KV head of ONE layer, of one dict for each token of the row, oldest first:
    pos   position in the stream
    seen  for each query since the token came (its own the first): (t, [attention of each head of the group]),
          t being the tokens that the query has seen, itself included
    mass  sum of all of that
    last  attention of the last query, summed over the group
    key   the key before RoPE, a list of floats
    old   buzz only: True for a token that has survived an eviction in the middle
    row   the row's number among the rows of all layers
    notes the twin's own dict, empty at first: what it must remember from one plan to the next
next: position of the next token. pinned: tokens with pos < pinned stay. params: the policy's own, all given.

Returns, for each row, the sorted positions that stay; or that and, for each row, the merges
{dst pos: [(src pos, weight), ...]}. buzz sets `old` where due; nothing else is changed.

A twin may have observe(rows, *, next, **params) as well, for what it notes when the engine observes between
two plans: before positions start over. One that asks for n_ctx gets the context.
"""


def news(row):
    """For each token of a row what it has seen since the last plan, by the notes that this takes."""
    fresh = [token["seen"][token["notes"].get("n_seen", 0) :] for token in row]
    for token in row:
        token["notes"]["n_seen"] = len(token["seen"])
    return fresh


def n_arrived(row):
    """How many tokens of a row have come since the last plan; to be asked before `news`."""
    return sum("n_seen" not in token["notes"] for token in row)
