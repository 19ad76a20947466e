"""BUZZ (arXiv:2410.23079, Algorithms 1 and 2, Remark 2); the first of equals is the local maximum."""

CASES = [
    [],
    ["stride=3"],
    ["stride=4", "sinks=0"],
    ["stride=6", "threshold=2"],
    ["window=7"],
    ["swap=true"],
    ["logn=true", "logn_n=cells"],
    ["swap=true", "stride=3", "sinks=1"],
    ["local_max=false"],
    ["local_max=false", "swap=true", "stride=8", "window=3"],
]


def keep(
    rows, *, next, pinned, budget, slack, window, threshold, sinks, stride, swap=False, local_max=True, **logn
):
    first, n_max = max(sinks, pinned), sinks + window + threshold
    small_stride = (stride + 1) // 2
    strides = (small_stride, stride) if swap else (stride, small_stride)
    return [_keep(row, first, window, n_max, *strides, local_max) for row in rows]


def _keep(row, first, window, n_max, stride, old_stride, local_max):
    if len(row) <= n_max:
        return [token["pos"] for token in row]
    head = [token for token in row if token["pos"] < first]
    body = [token for token in row if token["pos"] >= first]
    window = min(window, n_max - len(head))
    middle, tail = body[: len(body) - window], body[len(body) - window :]

    old = [token for token in middle if token["old"]]
    new = [token for token in middle if not token["old"]]
    sample = local_max_sample if local_max else interval_sample
    middle = interval_sample(old_stride, old) + sample(stride, new)
    while len(head) + len(middle) + len(tail) > n_max:
        # a middle of one token cannot be thinned any more
        middle = interval_sample(old_stride, middle) if len(middle) > 1 else []
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
