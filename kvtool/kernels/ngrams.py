"""Find earlier places in a text that match the end of the text.

Places with the same hash form a chain, as in LZ77.
"""

from __future__ import annotations

import numpy as np

from kvtool.kernels.kernel import kernel

N_KEY = 3
"""Minimum length of a match, and number of tokens that are hashed together."""

N_BIT = 14
"""Number of bits of a hash."""

_MAX_PLACES = 64
"""Maximum number of earlier places that are compared with the end of the text, newest first."""

_MAX_SAME = 64
"""Maximum number of tokens before a place that are compared with the last tokens of the text."""


@kernel("i8(i4[::1], i8)")
def key_of(tokens, end):
    """Hash the N_KEY tokens before position `end`, which must be at least N_KEY."""
    key = np.uint64(0)
    for i in range(end - N_KEY, end):
        key = (key ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(key >> np.uint64(64 - N_BIT))


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8)")
def link(tokens, newest, before, first, n):
    """Add the places first + 1 .. n of a text to the chains.

    A place is an index in the text, at least N_KEY; place n is the end of the text. The hash of a place is
    the hash of the N_KEY tokens before it.

    tokens: i32[n], the text. newest: i32[hash], the newest place with each hash. before: i32[n];
    before[place - 1] is the previous place with the same hash.
    """
    for end in range(max(first + 1, N_KEY), n + 1):
        key = key_of(tokens, end)
        before[end - 1] = newest[key]
        newest[key] = end


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8)")
def unlink(tokens, newest, before, n, first):
    """Undo `link`: remove the places n, n - 1, ..., first + 1 from the chains."""
    for end in range(n, max(first + 1, N_KEY) - 1, -1):
        newest[key_of(tokens, end)] = before[end - 1]


@kernel("void(i4[::1], i4[::1], i4[::1], i8, i8[::1])")
def best_place(tokens, newest, before, n, best):
    """Find the earlier place that best matches the end of the text.

    Writes best i64[2]: the place, and the number of matching tokens before it. Both are 0 without a match.
    `link` explains the other arguments.
    """
    best[0] = best[1] = 0
    if n < N_KEY:
        return
    place = before[n - 1]
    for _ in range(_MAX_PLACES):
        if place < 0:
            return
        same = 0
        while same < min(_MAX_SAME, place) and tokens[place - 1 - same] == tokens[n - 1 - same]:
            same += 1
        if same >= N_KEY and same > best[1]:
            best[0], best[1] = place, same
            if same == _MAX_SAME:
                return
        place = before[place - 1]
