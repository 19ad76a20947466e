"""BUZZ (arXiv:2410.23079, Algorithms 1 and 2, Remark 2). On ties, the local maximum is the first token."""

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
    ["kept=true"],
    ["kept=true", "swap=true", "window=3"],
    ["kept=true", "stride=3", "sinks=1", "local_max=false"],
    ["kept=true", "threshold=6"],
]


def keep(
    rows,
    *,
    next,
    pinned,
    budget,
    slack,
    window,
    threshold,
    sinks,
    stride,
    swap=False,
    local_max=True,
    kept=False,
    **logn,
):
    first, n_max = max(sinks, pinned), sinks + window + threshold
    small_stride = (stride + 1) // 2
    strides = (small_stride, stride) if swap else (stride, small_stride)
    n_most = sinks + window + steady(threshold, *strides) if kept else n_max
    return [
        row_keep(row, first, window, n_most, *strides, local_max, kept)
        if len(row) > n_max
        else [token["pos"] for token in row]
        for row in rows
    ]


def steady(threshold, stride, old_stride):
    """Return the number of middle tokens that each eviction leaves in the long run.

    This is the smallest n such that an eviction of n tokens from earlier evictions and threshold + 1 - n
    newer ones leaves at most n tokens.
    """

    def left(n):
        return -(-n // old_stride) + -(-(threshold + 1 - n) // stride)

    return next(n for n in range(threshold + 2) if left(n) <= n)


def row_keep(row, first, window, n_max, stride, old_stride, local_max=True, kept=False):
    head = [token for token in row if token["pos"] < first]
    body = [token for token in row if token["pos"] >= first]
    window = min(window, n_max - len(head))
    middle, tail = body[: len(body) - window], body[len(body) - window :]

    old = [token for token in middle if token["old"]]
    new = [token for token in middle if not token["old"]]
    sample = local_max_sample if local_max else interval_sample
    middle = interval_sample(old_stride, old) + sample(stride, new)
    while len(head) + len(middle) + len(tail) > n_max:
        # if the middle has only one token, this token is evicted here, because interval_sample always keeps
        # the first token
        if len(middle) > 1:
            n_spare = len(head) + len(middle) + len(tail) - n_max if kept else len(middle)
            middle = interval_sample(old_stride, middle, n_spare)
        else:
            middle = []
    for token in middle:
        token["old"] = True
    return [token["pos"] for token in head + middle + tail]


def interval_sample(stride, tokens, n_spare=None):
    """Keep the first of every `stride` tokens, and evict the other tokens, oldest first.

    At most n_spare tokens are evicted.
    """
    if n_spare is None:
        n_spare = len(tokens)
    goes = [i % stride != 0 for i in range(len(tokens))]
    goes = [went and sum(goes[:i]) < n_spare for i, went in enumerate(goes)]
    return [token for token, went in zip(tokens, goes, strict=True) if not went]


def local_max_sample(stride, tokens):
    maxima = []
    for i in range(0, len(tokens), stride):
        segment = tokens[i : i + stride]
        maxima.append(max(segment, key=lambda token: token["mass"]))
    return maxima
