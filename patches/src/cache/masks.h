// Masks that the device computes, so that the host need not fill and send a mask for every head and layer.

#pragma once

#include "ggml.h"

namespace kvtool {

// Mask [n_kv, n_tokens, n_head]: 0 if a query sees a cell, otherwise a number below any logit. limit: F32
// [1, n_tokens, n_head], the last cell that each query sees. n_head is 1 if all rows have equal lengths
inline ggml_tensor * mask_below(ggml_context * ctx, int64_t n_kv, ggml_tensor * limit) {
    ggml_tensor * x = ggml_repeat_4d(ctx, ggml_arange(ctx, 0, n_kv, 1), n_kv, limit->ne[1], limit->ne[2], 1);
    return ggml_scale(ctx, ggml_step(ctx, ggml_sub(ctx, x, limit)), -1e30f);
}

// ALiBi: the negative distance between each key and each query, [n_kv, n_tokens, n_head]. keys: positions [n_kv, 1,
// n_head]; queries: positions [1, n_tokens]
inline ggml_tensor * minus_distances(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * queries) {
    ggml_tensor * x = ggml_repeat_4d(ctx, keys, keys->ne[0], queries->ne[1], keys->ne[2], 1);
    return ggml_neg(ctx, ggml_abs(ctx, ggml_sub(ctx, x, queries)));
}

// repeat each row's mask for its n_gqa query heads: [n_kv, n_tokens, n_head] -> [n_kv, n_tokens, n_gqa*n_head]
inline ggml_tensor * repeat_rows(ggml_context * ctx, ggml_tensor * x, int64_t n_gqa) {
    const int64_t n_head = x->ne[2];
    if (n_gqa == 1 || n_head == 1) {
        return x;
    }
    ggml_tensor * t = ggml_reshape_4d(ctx, x, x->ne[0], x->ne[1], 1, n_head);
    t = ggml_repeat_4d(ctx, t, x->ne[0], x->ne[1], n_gqa, n_head);
    return ggml_reshape_3d(ctx, t, x->ne[0], x->ne[1], n_gqa*n_head);
}

} // namespace kvtool
