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
next: position of the next token. pinned: tokens with pos < pinned stay. params: the policy's own, all given.

Returns, for each row, the sorted positions that stay; or that and, for each row, the merges
{dst pos: [(src pos, weight), ...]}. buzz sets `old` where due; nothing else is changed.
"""
