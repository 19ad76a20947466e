"""Local: evict the oldest token that is not pinned, one at a time."""

CASES = [[]]


def keep(rows, *, next, pinned, budget, slack):
    return [_keep(row, pinned, budget - slack) for row in rows]


def _keep(row, pinned, n_keep):
    alive = [token["pos"] for token in row]
    while len(alive) > n_keep:
        alive.remove(min(pos for pos in alive if pos >= pinned))
    return alive
