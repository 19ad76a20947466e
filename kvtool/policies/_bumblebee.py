"""BumbleBee's kernels: the objective, the streaming discard, and the greedy summary of a prompt."""

import numpy as np

from kvtool.kernels.draw import hash_rows
from kvtool.kernels.kernel import kernel
from kvtool.kernels.norm import square_norm

_EPSILON = 1e-5
"""To pick k of n tokens, stochastic greedy examines n / k * ln(1 / epsilon) tokens for each pick."""

_ALPHA, _BETA = 1 / 25, 1.0
"""Constants of phi=power, from the paper. phi is then the inverse of alpha * y**(1 / alpha) + beta * y."""

_UNIT = 1 << 14
"""Norm of a key in the state."""

COSINES = ("relu", "shifted", "absolute")
"""Functions from a cosine to a similarity."""

_ONE = 1 << 24
"""Similarities are integer multiples of 1 / _ONE, which float32 holds exactly."""


def seeds(seed: int, step: int, n_row: int) -> np.ndarray:
    """Return a random seed for each row of this step: i64[row], below 2**31."""
    return (hash_rows(seed, step, n_row) >> np.uint64(33)).astype(np.int64)


@kernel("i8(i8, i8, i8)")
def _hash(seed, pick, draw):
    """Hash three integers below 2**31 to an integer below 2**32. No product exceeds 2**63."""
    x = seed
    for part in (pick, draw):
        x = (x + part * 0x3C6EF372 + 0x1E3779B9) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x35A2D97B) & 0xFFFFFFFF
        x = x ^ (x >> 16)
    return x


@kernel("f8(f8, b1)")
def _phi(x, power):
    """Return phi(x) for x >= 0.

    Without `power`, this is log(1 + x). With `power`, it is the y for which alpha * y**(1 / alpha) + beta * y
    equals x.
    """
    if not power:
        return float(np.log1p(x))
    if x <= 0:
        return 0.0
    # Start Newton's method at or above the root, so that it descends to the root: the function is convex.
    # Each term alone reaches x at a y that is not below the root, so take the smaller of these two y
    y: float = min(x / _BETA, (x / _ALPHA) ** _ALPHA)
    for _ in range(50):
        step = (_ALPHA * y**25 + _BETA * y - x) / (y**24 + _BETA)
        y -= step
        if step <= 1e-15 * y:
            break
    return y


@kernel("f8(f8, b1)")
def _slope(x, power):
    """Return the derivative of phi at x."""
    if not power:
        return 1 / (1 + x)
    return 1 / (_phi(x, True) ** 24 + _BETA)


@kernel("void(f4[::1], i2[::1])")
def _normalize(key, unit):
    """Scale the key to norm _UNIT and round to integers; a zero key stays zero."""
    total = square_norm(key)
    scale = _UNIT / np.sqrt(total) if total > 0 else 0.0
    for dim in range(len(key)):
        unit[dim] = np.int16(np.floor(key[dim] * scale + 0.5))


@kernel("i4(i2[::1], i2[::1])")
def _dot(one, other):
    dot = np.int32(0)
    for dim in range(len(one)):
        dot = np.int32(dot + np.int32(one[dim]) * np.int32(other[dim]))
    return dot


@kernel("i4(i4, i8)")
def _similarity(dot, cosine):
    """Return the similarity, in 0.._ONE, of two keys with this dot product.

    cosine: index into COSINES. For a cosine c, the similarity is ReLU(c), (1 + c) / 2 or |c|. The similarity
    of a key to itself may be rounded to less than _ONE, so callers use _ONE instead. This kernel and `_dot`
    are separate kernels, so that LLVM inlines both into the loops of callers. The loops are then three times
    as fast.
    """
    if cosine == 1:
        # shift by one bit more, because 1 + c is up to 2
        return np.int32(min(max(int(dot) + _UNIT * _UNIT + 16, 0) >> 5, _ONE))
    whole = abs(int(dot)) if cosine == 2 else int(dot)
    # divide by _UNIT * _UNIT / _ONE, which is 2**4, so that the dot product of equal keys becomes _ONE
    return np.int32(min(max(whole + 8, 0) >> 4, _ONE))


@kernel("i8(i4[::1], i4)")
def _first(bits, wanted):
    """Return the index of the first element equal to `wanted`."""
    i = 0
    while bits[i] != wanted:
        i += 1
    return i


@kernel("i8(i4[::1], i8)")
def _lowest(bits, n):
    """Return the index of the smallest of the first n elements, the first among equals."""
    lowest = np.int32(0x7FFFFFFF)
    for i in range(n):
        lowest = min(lowest, bits[i])
    return _first(bits, lowest)


@kernel("i8(i4[::1], i8)")
def _highest(bits, n):
    """Return the index of the largest of the first n elements, the first among equals."""
    highest = np.int32(-0x7FFFFFFF)
    for i in range(n):
        highest = max(highest, bits[i])
    return _first(bits, highest)


_MEASURE = "void(i4[:,::1], f4[:,:,::1], i8, i2[:,:,::1], f4[:,::1], i4[:,::1], {}[:,:,::1])"


@kernel([_MEASURE.format("i4"), _MEASURE.format("u2")])
def measure(pos, keys, cosine, unit, near, nearest, pairs):
    """Normalise the new keys f32[row, n_new, n_dim], and compare every pair of keys that has a new key.

    pos: i32[row, n]. Writes these arrays, which `BumbleBee.start` explains. They may have more than n cells.

    unit: i16[row, n, n_dim], the keys. near: f32[row, n]. nearest: i32[row, n]. pairs: i32 or u16[row, n, n],
    the bits of the similarities as f32 or f16. It may have no rows, and is then not written.
    """
    n_row, n = pos.shape
    n_old = n - keys.shape[1]
    value = np.empty(n, np.float32)
    bits = value.view(np.int32)
    half = pairs.itemsize == 2
    for row in range(n_row):
        for i in range(n_old, n):
            _normalize(keys[row, i - n_old], unit[row, i])
            for j in range(i):
                pair = _similarity(_dot(unit[row, i], unit[row, j]), cosine)
                value[j] = np.float32(pair) * np.float32(2**-24)
            if half:
                # a float32 that is divided by 2**112 has the bits of a float16, followed by 13 more bits
                for j in range(i):
                    value[j] *= np.float32(2.0**-112)
                for j in range(i):
                    bits[j] = np.int32(bits[j] + 0xFFF + ((bits[j] >> 13) & 1)) & ~0x1FFF
            if len(pairs):
                for j in range(i):
                    pairs[row, i, j] = bits[j] >> (13 if half else 0)
            if half:
                for j in range(i):
                    value[j] *= np.float32(2.0**112)
            if i:
                j = _highest(bits, i)
                near[row, i] = value[j]
                nearest[row, i] = pos[row, j]
            newest = pos[row, i]
            for j in range(i):
                closer = value[j] >= near[row, j]
                near[row, j] = value[j] if closer else near[row, j]
                nearest[row, j] = newest if closer else nearest[row, j]
        if len(pairs):
            for j in range(n):
                for i in range(max(j + 1, n_old), n):
                    pairs[row, j, i] = pairs[row, i, j]


_NEIGHBOUR = "i8(i2[:,:,::1], {}[:,:,::1], i8, i8, i8, i8, i4[::1], i4[::1])"


@kernel([_NEIGHBOUR.format("i4"), _NEIGHBOUR.format("u2")])
def _neighbour(unit, pairs, cosine, row, cell, n, alive, bits):
    """Return a cell's nearest neighbour among the first n cells, not counting evicted cells.

    alive i32[n]: -1 for live cells, 0 for evicted cells. Writes bits i32[n]: the bits of the cell's
    similarities, as float16 if `pairs` has float16, otherwise as float32.
    """
    if len(pairs):
        for j in range(n):
            bits[j] = np.int32(pairs[row, cell, j]) & alive[j]
    else:
        value = bits.view(np.float32)
        for j in range(n):
            pair = _similarity(_dot(unit[row, cell], unit[row, j]), cosine) & alive[j]
            value[j] = np.float32(pair) * np.float32(2**-24)
        bits[cell] = 0
    return _highest(bits, n)


@kernel("f8(f8, f8, f8, f8, f8, b1)")
def _loss(mixture, far, mass, total, full, power):
    """Return how much the objective g decreases if a token is evicted. bumblebee.py defines g and f.

    far: decrease of f. mass: the token's attention sum. total: attention sum of all tokens that are left.
    full: phi(total).
    """
    rest = (full - _phi(max(total - mass, 0.0), power)) / full if full > 0 else 0.0
    return mixture * far + (1 - mixture) * rest


_DISCARD = (
    "void(i4[:,::1], i2[:,:,::1], f4[:,::1], {}[:,:,::1], "
    "i8, i8, i8, f8, b1, i8, f4[:,::1], i4[:,::1], b1[:,::1])"
)


@kernel([_DISCARD.format("i4"), _DISCARD.format("u2")])
def discard(pos, unit, mass, pairs, first, recent, n_keep, mixture, power, cosine, near, nearest, keep):
    """Evict tokens one by one until n_keep are left, each time the token whose eviction decreases g least.

    Only tokens with first <= pos < recent are evicted. Among equals, the oldest is evicted.

    pos: i32[row, n]. unit, mass, pairs, near, nearest: arrays of the state. Writes keep b1[row, n], and
    updates near and nearest for the kept tokens.

    bumblebee.py defines g, and its terms f and c. Lower bounds of their decreases save time.
    phi is concave, so c decreases by at least mass times the slope of phi, divided by phi of all attention.
    `near` is an upper bound of the similarity to the nearest neighbour, so f decreases by at least
    (1 - near) / (number of tokens). The exact decrease of g is computed only for tokens that these bounds do
    not exclude.
    """
    n_row, n = pos.shape
    alive = np.empty(n, np.int32)
    bits = np.empty(n, np.int32)
    cells = np.empty(n, np.int64)
    light = np.empty(n, np.float32)
    far = np.empty(n, np.float32)
    bound = np.empty(n, np.float32)
    bound_bits = bound.view(np.int32)
    one = np.empty(1, np.int32)
    one_value = one.view(np.float32)
    half = pairs.itemsize == 2
    for row in range(n_row):
        n_open = 0
        total = 0.0
        for cell in range(n):
            keep[row, cell] = True
            alive[cell] = -1
            total += np.float64(mass[row, cell])
            if first <= pos[row, cell] < recent:
                cells[n_open] = cell
                light[n_open] = mass[row, cell]
                far[n_open] = 1 - near[row, cell]
                n_open += 1
        for n_live in range(n, max(n_keep, n - n_open), -1):
            full = _phi(total, power)
            per_far = np.float32(mixture / n_live)
            per_mass = np.float32((1 - mixture) * _slope(total, power) / full if full > 0 else 0.0)
            for i in range(n_open):
                bound[i] = per_far * far[i] + per_mass * light[i]
            lightest = 0
            least = np.inf
            while True:
                i = _lowest(bound_bits, n_open)
                # bounds are rounded, hence the tolerance
                if bound[i] > least * (1 + 1e-6) + 1e-14:
                    break
                cell = cells[i]
                if nearest[row, cell] < 0 and near[row, cell] > 0:
                    j = _neighbour(unit, pairs, cosine, row, cell, n, alive, bits)
                    one[0] = bits[j] << 13 if half else bits[j]
                    near[row, cell] = one_value[0] * (np.float32(2.0**112) if half else np.float32(1))
                    nearest[row, cell] = pos[row, j]
                    far[i] = 1 - near[row, cell]
                    bound[i] = per_far * far[i] + per_mass * light[i]
                    continue
                bound[i] = np.inf
                loss = _loss(mixture, np.float64(far[i]) / n_live, np.float64(light[i]), total, full, power)
                if loss < least or (loss == least and pos[row, cell] < pos[row, cells[lightest]]):
                    least = loss
                    lightest = i
            evicted = cells[lightest]
            keep[row, evicted] = False
            alive[evicted] = 0
            total = max(total - np.float64(mass[row, evicted]), 0.0)
            for cell in range(n):
                if nearest[row, cell] == pos[row, evicted]:
                    nearest[row, cell] = -1
            n_open -= 1
            cells[lightest] = cells[n_open]
            light[lightest] = light[n_open]
            far[lightest] = far[n_open]


_MOVE = "void(i4[:,::1], {}[:,:,::1])"


@kernel([_MOVE.format("i4"), _MOVE.format("u2")])
def move_pairs(source, pairs):
    """Move the pairs after a plan, in place: the pair of cells source[i], source[j] moves to cells i, j.

    source i32[row, n_keep]: for each cell after the plan, the cell that its content comes from.
    """
    n_row, n_keep = source.shape
    moved = np.empty(n_keep, np.int64)
    n_most = 0
    for row in range(n_row):
        n_moved = 0
        for i in range(n_keep):
            n_moved += source[row, i] != i
        n_most = max(n_most, n_moved)
    block = np.empty((n_most, n_keep), pairs.dtype)
    for row in range(n_row):
        n_moved = 0
        for i in range(n_keep):
            if source[row, i] != i:
                moved[n_moved] = i
                n_moved += 1
        for i in range(n_keep):
            whole = source[row, i]
            for m in range(n_moved):
                block[0, m] = pairs[row, whole, source[row, moved[m]]]
            for m in range(n_moved):
                pairs[row, whole, moved[m]] = block[0, m]
        for m in range(n_moved):
            block[m] = pairs[row, source[row, moved[m]], :n_keep]
        for m in range(n_moved):
            pairs[row, moved[m], :n_keep] = block[m]


@kernel("i8(i2[:,::1], i8, i8, i4[::1])")
def _gain(unit, cosine, cell, cover):
    """Return the increase of the sum of `cover` if a cell is added to the summary.

    cover i32[n]: similarity of each cell to the most similar cell of the summary.
    """
    gain = np.int64(max(_ONE - cover[cell], 0))
    for j in range(len(cover)):
        if j != cell:
            gain += max(_similarity(_dot(unit[cell], unit[j]), cosine) - cover[j], 0)
    return gain


@kernel("void(i2[:,::1], i8, i8, i4[::1])")
def _take(unit, cosine, cell, cover):
    """Update `cover` for a cell that is added to the summary."""
    for j in range(len(cover)):
        cover[j] = max(cover[j], _similarity(_dot(unit[cell], unit[j]), cosine))
    cover[cell] = _ONE


@kernel("void(i4[:,::1], i8[:,::1], f4[:,:,::1], f4[:,::1], i8, i8, i8, f8, b1, i8, b1, i8[::1], b1[:,::1])")
def summarize(pos, order, keys, mass, first, recent, n_keep, mixture, power, cosine, stochastic, seeds, keep):
    """Choose n_keep tokens for the summary of each row.

    The summary begins with all tokens before position `first` and from position `recent` on. Then the token
    that raises the objective g most is added, again and again, until there are n_keep tokens. Among equals,
    the newest is added. bumblebee.py defines g, and its terms f and c.

    pos i32[row, n], order i64[row, n] (the cells, oldest token first), keys f32[row, n, n_dim], mass f32[row,
    n], seeds i64[row] -> keep b1[row, n].

    A token's gain in f never rises while the summary grows, so an earlier gain is an upper bound. Rounding
    does not break this bound, because gains in f are integers. An upper bound of a token's gain in c is its
    mass times the slope of phi. A token is examined only if the sum of the two bounds exceeds the best gain
    so far. Pairs are not stored, so memory does not grow with n * n.
    """
    n_row, n = pos.shape
    unit = np.empty((n, keys.shape[2]), np.int16)
    cover = np.empty(n, np.int32)
    gain = np.empty(n, np.int64)
    rest = np.empty(n, np.int64)
    bound = np.empty(n, np.float32)
    bound_bits = bound.view(np.int32)
    for row in range(n_row):
        total = held = 0.0
        n_rest = 0
        cover[:] = 0
        for cell in range(n):
            _normalize(keys[row, cell], unit[cell])
            total += np.float64(mass[row, cell])
        for i in range(n):
            cell = order[row, i]
            keep[row, cell] = not first <= pos[row, cell] < recent
            if keep[row, cell]:
                held += np.float64(mass[row, cell])
                _take(unit, cosine, cell, cover)
            else:
                rest[n_rest] = cell
                n_rest += 1
        n_pick = min(n_keep - (n - n_rest), n_rest)
        if n_pick <= 0:
            continue
        n_look = n_rest
        if stochastic:
            n_look = int(np.ceil(n_rest / n_pick * np.log(1 / _EPSILON)))
        for i in range(n):
            gain[i] = max(_ONE - cover[i], 0)
            for j in range(i):
                pair = _similarity(_dot(unit[i], unit[j]), cosine)
                gain[i] += max(pair - cover[j], 0)
                gain[j] += max(pair - cover[i], 0)
        full = _phi(total, power)
        per_gain = mixture / (np.float64(n) * _ONE)
        for pick in range(n_pick):
            n_seen = min(n_look, n_rest)
            if stochastic:
                for i in range(n_seen):
                    j = i + _hash(seeds[row], pick, i) % (n_rest - i)
                    rest[i], rest[j] = rest[j], rest[i]
            have = _phi(held, power)
            per_mass = (1 - mixture) * _slope(held, power) / full if full > 0 else 0.0
            for i in range(n_seen):
                bound[i] = per_gain * gain[rest[i]] + per_mass * mass[row, rest[i]]
            best = 0
            most = -1.0
            while True:
                i = _highest(bound_bits, n_seen)
                # bounds are rounded, hence the tolerance
                if bound[i] < 0 or bound[i] * (1 + 1e-6) + 1e-14 < most:
                    break
                bound[i] = -1
                cell = rest[i]
                more = 0.0
                if full > 0:
                    more = (1 - mixture) * (_phi(held + np.float64(mass[row, cell]), power) - have) / full
                if per_gain * gain[cell] + more < most:
                    continue
                gain[cell] = _gain(unit, cosine, cell, cover)
                value = per_gain * gain[cell] + more
                if value > most or (value == most and pos[row, cell] > pos[row, rest[best]]):
                    most = value
                    best = i
            cell = rest[best]
            keep[row, cell] = True
            held += np.float64(mass[row, cell])
            _take(unit, cosine, cell, cover)
            n_rest -= 1
            rest[best] = rest[n_rest]
