"""Full: keep all tokens."""

CASES = [[]]


def keep(rows, *, next, pinned, budget, slack):
    return [[token["pos"] for token in row] for row in rows]
