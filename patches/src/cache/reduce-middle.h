// Sums and maxima over the middle dimension of a tensor.

#pragma once

#include "ggml.h"

namespace kvtool {

// Reduce [n, r, h] to [n, 1, h]: join the two halves of the middle dimension again and again until one element is left.
// (ggml_sum_rows would need a transpose, which is slow; some devices lack ggml_out_prod)
template <typename F>
ggml_tensor * reduce_middle(ggml_context * ctx, ggml_tensor * t, F && join) {
    ggml_tensor * odd_sum = nullptr;

    const auto part = [ctx](ggml_tensor * a, int64_t i, int64_t r) {
        return ggml_view_3d(ctx, a, a->ne[0], r, a->ne[2], a->nb[1], a->nb[2], i*a->nb[1]);
    };

    int64_t r = t->ne[1];

    if (r == 1) {
        return ggml_cont(ctx, t);
    }

    while (r > 1) {
        const int64_t half = r/2;

        if (r % 2 == 1) {
            ggml_tensor * odd = part(t, r - 1, 1);
            odd_sum = odd_sum ? join(odd_sum, odd) : odd;
        }

        t = join(part(t, 0, half), part(t, half, half));
        r = half;
    }

    return odd_sum ? join(t, odd_sum) : t;
}

inline ggml_tensor * sum_middle(ggml_context * ctx, ggml_tensor * t) {
    return reduce_middle(ctx, t, [ctx](ggml_tensor * a, ggml_tensor * b) { return ggml_add(ctx, a, b); });
}

// Element-wise maximum of two tensors, computed as relu(a - b) + b. The numbers must not be negative. With a very
// negative b, the difference a - b would be so large that it loses digits of a
inline ggml_tensor * max_of(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    return ggml_add(ctx, ggml_relu(ctx, ggml_sub(ctx, a, b)), b);
}

inline ggml_tensor * max_middle(ggml_context * ctx, ggml_tensor * t) {
    return reduce_middle(ctx, t, [ctx](ggml_tensor * a, ggml_tensor * b) { return max_of(ctx, a, b); });
}

} // namespace kvtool
