"""BUZZ (arXiv:2410.23079, Algorithms 1 and 2, Remark 2); the first of equals is the local maximum."""

CASES = [[], ["stride=3"], ["stride=4", "sinks=0"], ["stride=6", "threshold=2"], ["window=7"]]


def keep(rows, *, next, pinned, budget, slack, window, threshold, sinks, stride):
    return [_keep(row, max(sinks, pinned), window, sinks + window + threshold, stride) for row in rows]


def _keep(row, first, window, n_max, stride):
    if len(row) <= n_max:
        return [token["pos"] for token in row]
    head = [token for token in row if token["pos"] < first]
    body = [token for token in row if token["pos"] >= first]
    window = min(window, n_max - len(head))
    middle, tail = body[: len(body) - window], body[len(body) - window :]

    small_stride = (stride + 1) // 2
    old = [token for token in middle if token["old"]]
    new = [token for token in middle if not token["old"]]
    middle = interval_sample(small_stride, old) + local_max_sample(stride, new)
    while len(head) + len(middle) + len(tail) > n_max:
        # a middle of one token cannot be thinned any more
        middle = interval_sample(small_stride, middle) if len(middle) > 1 else []
    for token in middle:
        token["old"] = True
    return [token["pos"] for token in head + middle + tail]


def interval_sample(stride, tokens):
    return [token for i, token in enumerate(tokens) if i % stride == 0]


def local_max_sample(stride, tokens):
    kept = []
    for i in range(0, len(tokens), stride):
        segment = tokens[i : i + stride]
        kept.append(max(segment, key=lambda token: token["mass"]))
    return kept
