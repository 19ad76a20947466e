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
    if next < history:
        stay = list(row)
    else:
        stay = [
            token
            for token in row
            if token["pos"] < first
            or token["pos"] >= recent
            or any(mark for step, mark in _marks(token) if step > next - history)
        ]
    while len(stay) > n_max:
        open_ = [token for token in stay if first <= token["pos"] < recent]
        window_ = [token for token in stay if token["pos"] >= max(first, recent)]
        if open_:
            out = min(open_, key=lambda token: (_last_step(token), token["pos"]))
        else:
            out = min(window_ or stay, key=lambda token: token["pos"])
        stay.remove(out)
    return [token["pos"] for token in stay]


def _marks(token):
    """Return a list of (step, True if the token was important to the query of this step).

    The first step is that of the token itself.
    """
    return [
        (token["pos"] + i + 1, any(attention * t >= 1 for attention in heads))
        for i, (t, heads) in enumerate(token["seen"])
    ]


def _last_step(token):
    return max((step for step, mark in _marks(token) if mark), default=0)
