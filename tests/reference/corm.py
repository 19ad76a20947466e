"""CORM (arXiv:2404.15949), Algorithm 1: keep the tokens that any of the last queries marks as important."""

CASES = [
    [],
    ["history=9", "window=5"],
    ["history=20", "window=1", "sinks=2"],
    ["history=1"],
    ["history=30", "window=4", "t=cells"],
]


def keep(rows, *, next, pinned, budget, slack, window, history, sinks, t):
    return [_keep(row, next, max(sinks, pinned), budget - slack, window, history) for row in rows]


def _keep(row, next, first, n_max, window, history):
    recent = next - window
    last_step = {token["pos"]: _last_step(token) for token in row}
    if next < history:
        stay = list(row)
    else:
        stay = [
            token
            for token in row
            if token["pos"] < first or token["pos"] >= recent or last_step[token["pos"]] > next - history
        ]
    while len(stay) > n_max:
        open_ = [token for token in stay if first <= token["pos"] < recent]
        window_ = [token for token in stay if token["pos"] >= max(first, recent)]
        if open_:
            out = min(open_, key=lambda token: (last_step[token["pos"]], token["pos"]))
        else:
            out = min(window_ or stay, key=lambda token: token["pos"])
        stay.remove(out)
    return [token["pos"] for token in stay]


def _last_step(token):
    """Return the last step to whose query the token was important, or 0.

    The first query in `seen` has the step pos + 1.
    """
    seen = token["seen"]
    for i in range(len(seen) - 1, -1, -1):
        t, heads = seen[i]
        if any(attention * t >= 1 for attention in heads):
            return token["pos"] + i + 1
    return 0
