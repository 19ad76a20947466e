"""BumbleBee (COLM 2024, Algorithms 1 and 2): the objective, computed from scratch for each set."""

import math
import struct

import numpy as np

CASES = [
    [],
    ["phi=power"],
    ["similarity=f32", "window=3"],
    ["similarity=f16", "mixture=0.7"],
    ["mixture=1", "window=0", "sinks=0"],
    ["mixture=0", "window=1"],
    ["cosine=shifted", "mixture=0.9", "window=2"],
    ["cosine=absolute", "similarity=f32", "mixture=0.9", "window=2"],
    ["cosine=shifted", "similarity=f16", "mixture=0.9", "window=2"],
    ["grow=1.5", "window=2"],
]


def keep(
    rows,
    *,
    next,
    pinned,
    budget,
    slack,
    window,
    sinks,
    mixture,
    phi,
    greedy,
    seed,
    similarity,
    cosine,
    grow,
):
    first = max(sinks, pinned)
    n_keep = budget - slack
    if grow:
        n_keep = min(n_keep, first + window + math.ceil(grow * math.log(1 + next)))
    return [_keep(row, next, first, n_keep, window, mixture, phi, similarity, cosine) for row in rows]


def _keep(row, next, first, n_keep, window, mixture, phi, similarity, cosine):
    recent = next - min(window, n_keep - first)
    pairs = similarities([token["key"] for token in row], half=similarity == "f16", cosine=cosine)
    alive = list(range(len(row)))
    while len(alive) > n_keep:
        full = worth(alive, alive, row, pairs, mixture, phi)
        rest = worth_without_one(alive, row, pairs, mixture, phi)
        alive.remove(
            min(
                (token for token in alive if first <= row[token]["pos"] < recent),
                key=lambda token, full=full, rest=rest: (full - rest[token], row[token]["pos"]),
            )
        )
    return [row[token]["pos"] for token in alive]


def summary(row, stays, n_keep, mixture, phi, sample=lambda rest: rest, cosine="relu"):
    """Choose n_keep tokens greedily, and return their positions in the order of choice.

    row: tokens, oldest first. stays: positions of tokens that are chosen first. sample(rest): returns the
    tokens that are compared for the next choice, out of the remaining tokens.
    """
    pairs = similarities([token["key"] for token in row], cosine=cosine)
    indices = range(len(row))
    members = [token for token in indices if row[token]["pos"] in stays]
    rest = [token for token in indices if token not in members]
    while len(members) < n_keep and rest:
        # `sample` may shuffle `rest` in place, so the index of the chosen token is looked up afterwards
        best = max(
            sample(rest),
            key=lambda token: (
                worth([*members, token], indices, row, pairs, mixture, phi),
                row[token]["pos"],
            ),
        )
        members.append(best)
        index = rest.index(best)
        rest[index] = rest[-1]
        rest.pop()
    return [row[token]["pos"] for token in members]


def worth(members, ground, row, pairs, mixture, phi):
    """Return the objective g of Algorithm 1 for the tokens `members` from the set `ground`."""
    members, ground = list(members), list(ground)
    f = float(pairs[np.ix_(ground, members)].max(axis=1).sum()) / len(ground) if members else 0.0
    mass = math.fsum(row[token]["mass"] for token in ground)
    full = PHI[phi](mass)
    c = PHI[phi](math.fsum(row[token]["mass"] for token in members)) / full if full else 0.0
    return mixture * f + (1 - mixture) * c


def worth_without_one(ground, row, pairs, mixture, phi):
    """Return {token: worth of all other tokens of the set `ground`}, faster than by calls of `worth`."""
    n, mass, pairs = len(ground), [row[token]["mass"] for token in ground], pairs[np.ix_(ground, ground)]
    # without token i, the tokens nearest to i have their second nearest member
    best, first = pairs.argmax(axis=1), pairs.max(axis=1)
    pairs[range(n), best] = -1
    f = (np.where(best == np.arange(n)[:, None], pairs.max(axis=1), first).sum(axis=1) / n).tolist()
    full = PHI[phi](math.fsum(mass))
    c = [PHI[phi](math.fsum(mass[:i] + mass[i + 1 :])) / full if full else 0.0 for i in range(n)]
    return {token: mixture * f[i] + (1 - mixture) * c[i] for i, token in enumerate(ground)}


def similarities(keys, half=False, cosine="relu"):
    """Return f64[token, token]: ReLU(c), (1 + c) / 2 or |c|, where c is the cosine of two keys.

    Keys are rounded to 15 bits, and similarities to multiples of 2**-24. With `half`, similarities are then
    rounded to float16.
    """
    unit = np.array([normalized(key) for key in keys], np.int64)
    # products of integers are exact, so they do not depend on the order of summation
    dots = unit @ unit.T
    whole = {
        "relu": (dots + 8) // 16,
        "shifted": (2**28 + dots + 16) // 32,
        "absolute": (np.abs(dots) + 8) // 16,
    }[cosine]
    pairs = np.clip(whole, 0, 2**24) / 2**24
    if half:
        pairs = np.vectorize(lambda x: struct.unpack("e", struct.pack("e", x))[0])(pairs)
    np.fill_diagonal(pairs, 1)
    return pairs


def normalized(key):
    length = math.sqrt(sum(x * x for x in key))
    return [math.floor(x * (2**14 / length) + 0.5) if length else 0 for x in key]


def power(x):
    """Solve 0.04 * y ** 25 + y = x for y, by bisection to float precision."""
    low, high = 0.0, x
    while low < (middle := (low + high) / 2) < high:
        if 0.04 * middle**25 + middle < x:
            low = middle
        else:
            high = middle
    return high


PHI = {"log": math.log1p, "power": power}
