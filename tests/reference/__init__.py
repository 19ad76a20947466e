"""Brute force by the definitions of the papers, in plain Python; imports nothing from kvtool.

Every policy has a twin here, <policy>.py with one function:

    def keep(rows, *, next, pinned, budget, slack, **params) -> list[list[int]]

rows: one list for each KV head of ONE layer, of one dict for each token of the row, oldest first:
    pos   position in the stream
    mass  attention sum since the token came
    last  last attention
    old   buzz only: True for a token that has survived an eviction in the middle
    row   random only: the row's number among the rows of all layers
next: position of the next token. pinned: tokens with pos < pinned stay. params: the policy's own, all given.

Returns, for each row, the sorted positions that stay. buzz sets `old` where due; nothing else is changed.
"""
