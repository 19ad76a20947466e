"""H2O (arXiv:2306.14048): of tokens outside window and sinks the lightest, oldest goes, one at a time."""

CASES = [[], ["window=3", "sinks=4"], ["window=0"]]


def keep(rows, *, next, pinned, budget, slack, window, sinks):
    return [_keep(row, next, max(sinks, pinned), budget - slack, window) for row in rows]


def _keep(row, next, first, n_keep, window):
    recent = next - min(window, n_keep - first)
    alive = list(row)
    while len(alive) > n_keep:
        lightest = min(
            (token for token in alive if first <= token["pos"] < recent),
            key=lambda token: (token["mass"], token["pos"]),
        )
        alive.remove(lightest)
    return [token["pos"] for token in alive]
