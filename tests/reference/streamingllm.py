"""StreamingLLM (arXiv:2309.17453): keep the sinks and the newest tokens."""

CASES = [[], ["sinks=0"]]


def keep(rows, *, next, pinned, budget, slack, sinks):
    return [_keep([token["pos"] for token in row], max(sinks, pinned), budget - slack) for row in rows]


def _keep(row, first, n_keep):
    if len(row) <= n_keep:
        return row
    start = [pos for pos in row if pos < first]
    return start + row[len(row) - (n_keep - len(start)) :]
