"""Places of a text that agree with its end: n-grams in chains, one a hash, as LZ77-like compressors do."""

from __future__ import annotations

import numpy as np

from kvtool.kernels.kernel import kernel

N_KEY = 3
"""Tokens before a place that must agree at least."""

N_BIT = 14
"""Of a hash."""

_MOST_PLACES = 64
"""Places that are compared, the newest first."""

_MOST_SAME = 64
"""Tokens that are compared at each of them."""


@kernel("i8(i4[::1], i8)")
def key_of(tokens, end):
    """The hash of the N_KEY tokens before a place, which must have so many."""
    key = np.uint64(0)
    for i in range(end - N_KEY, end):
        key = (key ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(key >> np.uint64(64 - N_BIT))


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8)")
def link(tokens, newest, before, first, n):
    """Notes the places first + 1 .. n of a text: tokens i32[n], newest i32[hash], before i32[n].

    A place is where a token comes that follows N_KEY others; place n itself has none yet.
    """
    for end in range(max(first + 1, N_KEY), n + 1):
        key = key_of(tokens, end)
        before[end - 1] = newest[key]
        newest[key] = end


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8)")
def unlink(tokens, newest, before, n, first):
    """Takes back what `link` noted of the places first + 1 .. n."""
    for end in range(n, max(first + 1, N_KEY) - 1, -1):
        newest[key_of(tokens, end)] = before[end - 1]


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8[::1])")
def best_place(tokens, newest, before, n, found):
    """Where the end of the text came before: the place, and how many tokens before it agree -> found i64[2].

    0 and 0 if there is none. The place n itself, which is the newest of its hash, does not count.
    """
    found[0] = found[1] = 0
    if n < N_KEY:
        return
    place = before[n - 1]
    for _ in range(_MOST_PLACES):
        if place < 0:
            return
        same = 0
        while same < min(_MOST_SAME, place) and tokens[place - 1 - same] == tokens[n - 1 - same]:
            same += 1
        if same >= N_KEY and same > found[1]:
            found[0], found[1] = place, same
            if same == _MOST_SAME:
                return
        place = before[place - 1]
