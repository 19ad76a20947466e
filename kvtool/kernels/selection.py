"""Kernels that choose which cells to keep."""

import numpy as np

from kvtool.kernels.kernel import kernel


@kernel("i8(i8[::1], i8, i8)")
def nth_lowest(values, n_value, nth):
    """Return the nth lowest of the first n_value values, where nth = 0 is the lowest.

    values: i64[n_value or more]. The function uses quickselect, which reorders the values, and is slow if
    many values are equal. numpy.partition does the same, but numba takes seconds to compile it.
    """
    begin, last = 0, n_value - 1
    while begin < last:
        middle = (begin + last) // 2
        # reorder the first, middle and last value: the lowest comes first, and the median comes last. The
        # median is the pivot
        if values[middle] < values[begin]:
            values[begin], values[middle] = values[middle], values[begin]
        if values[last] < values[begin]:
            values[begin], values[last] = values[last], values[begin]
        if values[middle] < values[last]:
            values[middle], values[last] = values[last], values[middle]
        pivot = values[last]
        middle = begin
        # swap every value, not only those below the pivot: a branch would be mispredicted half of the time
        for i in range(begin, last):
            value = values[i]
            values[i] = values[middle]
            values[middle] = value
            middle += value < pivot
        values[last], values[middle] = values[middle], pivot
        if nth == middle:
            break
        if nth < middle:
            last = middle - 1
        else:
            begin = middle + 1
    return int(values[nth])


@kernel("i8(i4, i4)")
def score_key(bits, pos):
    """Sort key of a token: by score, then by position. bits: the bits of the float32 score, which may be NaN.

    Positions make the sort keys of a row distinct, so a row keeps exactly the requested number of tokens.
    """
    rank = np.int64(bits)
    if rank < 0:
        rank = -(rank & 0x7FFFFFFF)
    return (rank << 32) | pos


@kernel("void(i4[:,::1], f4[:,::1], i8, i8, i8, b1[:,::1])")
def keep_highest(pos, score, first, recent, n_keep, keep):
    """Keep n_keep tokens of each row: the protected tokens, then the tokens with the highest scores.

    Tokens at positions before `first` and from `recent` on are protected. They all stay, even if they are
    more than n_keep. Among equal scores the newer token stays. pos i32[row, n], score f32[row, n or more] ->
    keep b1[row, n].
    """
    n_row, n = pos.shape
    bits = score.view(np.int32)
    never = np.int64(2**63 - 1)
    keys, open_keys = np.empty(n, np.int64), np.empty(n, np.int64)
    for row in range(n_row):
        # the loop has no branches: they would be mispredicted, because cells are in no order
        for cell in range(n):
            is_open = first <= pos[row, cell] < recent
            keys[cell] = score_key(bits[row, cell], pos[row, cell]) if is_open else never
        last_out = never
        if n - n_keep == 1:
            for cell in range(n):
                last_out = min(last_out, keys[cell])
        else:
            n_open = 0
            for cell in range(n):
                open_keys[n_open] = keys[cell]
                n_open += keys[cell] < never
            n_evict = min(n - n_keep, n_open)
            last_out = np.int64(nth_lowest(open_keys, n_open, n_evict - 1)) if n_evict > 0 else -never
        for cell in range(n):
            keep[row, cell] = keys[cell] > last_out or keys[cell] == never


@kernel("void(i4[:,::1], i4[::1], i4[::1], f4[:,::1], i8, i8, i8[::1], i8[::1], i8, b1[:,::1])")
def keep_shared(pos, live, layer, score, first, recent, n_keep, n_floor, n_most, keep):
    """Keep the protected tokens of each layer, then the tokens with the highest scores in all its rows.

    Tokens at positions before `first` and from `recent` on are protected. The rows of a layer together keep
    the sum of their n_keep. Each row keeps at least n_floor and at most n_most tokens, including protected
    tokens. Among equal scores the newer token stays, then the token of the earlier row. pos i32[row, n], live
    i32[row], layer i32[row], score f32[row, n or more], n_keep i64[row], n_floor i64[row] -> keep b1[row, n].
    """
    n_row, n = pos.shape
    bits = score.view(np.int32)
    keys, shared = np.empty(n, np.int64), np.empty(n_row * n, np.int64)
    # In each row, tokens with sort keys above safe[row] stay, and tokens with sort keys up to out[row] are
    # evicted. The highest sort keys of the other tokens in the layer get the remaining cells
    safe, out = np.empty(n_row, np.int64), np.empty(n_row, np.int64)
    never = np.int64(2**63 - 1)
    begin = 0
    while begin < n_row:
        end = begin
        while end < n_row and layer[end] == layer[begin]:
            end += 1
        n_left, n_shared = n_keep[begin:end].sum(), 0
        for row in range(begin, end):
            n_open = 0
            for cell in range(live[row]):
                if first <= pos[row, cell] < recent:
                    keys[n_open] = score_key(bits[row, cell], pos[row, cell])
                    n_open += 1
            n_protected = live[row] - n_open
            n_safe = min(max(n_floor[row] - n_protected, 0), n_open)
            n_may = min(max(n_most - n_protected, 0), n_open)
            safe[row] = nth_lowest(keys, n_open, n_open - n_safe - 1) if n_safe < n_open else -never
            out[row] = nth_lowest(keys, n_open, n_open - n_may - 1) if n_may < n_open else -never
            n_left -= n_protected + n_safe
            for i in range(n_open):
                if out[row] < keys[i] <= safe[row]:
                    shared[n_shared] = keys[i]
                    n_shared += 1
        last_out, n_equal = -never, 0
        if n_shared > n_left:
            last_out = np.int64(nth_lowest(shared, n_shared, n_shared - max(n_left, 0) - 1))
            n_equal = n_left
            for i in range(n_shared):
                n_equal -= shared[i] > last_out
        for row in range(begin, end):
            for cell in range(n):
                stays = cell < live[row]
                if stays and first <= pos[row, cell] < recent:
                    key = score_key(bits[row, cell], pos[row, cell])
                    stays = key > safe[row] or key > max(last_out, out[row])
                    if key == last_out and out[row] < key <= safe[row] and n_equal > 0:
                        stays = True
                        n_equal -= 1
                keep[row, cell] = stays
        begin = end


@kernel("void(i4[:,::1], i4[::1], i4[::1], f4[:,::1], i8, i8, f8[::1])")
def layer_entropy(pos, live, layer, score, first, recent, entropy):
    """Compute the entropy of each layer's scores over the tokens at positions first .. recent - 1.

    pos i32[row, n], live i32[row], layer i32[row], score f32[row, n or more] -> entropy f64[row], equal for
    all rows of a layer. Scores are 0 or more. They are divided by their sum, to get probabilities. The
    entropy of the probabilities is divided by the maximum possible entropy, so it is from 0 to 1. It is 1 if
    all scores are 0, or if there is at most one score.
    """
    n_row = len(pos)
    begin = 0
    while begin < n_row:
        end = begin
        total, weighted, n_open = 0.0, 0.0, 0
        while end < n_row and layer[end] == layer[begin]:
            for cell in range(live[end]):
                if first <= pos[end, cell] < recent:
                    value = np.float64(score[end, cell])
                    n_open += 1
                    if value > 0:
                        total += value
                        weighted += value * np.log(value)
            end += 1
        entropy[begin:end] = 1
        if total > 0 and n_open > 1:
            # rounding can make the difference negative if one score is nearly all of the sum
            entropy[begin:end] = max((np.log(total) - weighted / total) / np.log(n_open), 0.0)
        begin = end
