#include "future.h"

#include "edit-graph.h"
#include "hooks/error.h"
#include "reduce-middle.h"
#include "hooks/memory.h"
#include "hooks/state.h"
#include "archive/rotations.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cstring>

namespace kvtool {

// number of cells whose logits are computed at once
static constexpr int64_t n_together = 1024;

// mean of the matrices that rotate a query by 0 .. n - 1 positions: [n_embd, n_embd]
static std::vector<float> mean_rotation(const layer & l, int n) {
    const rotations rots(rotation(l, 0), l.n_embd_k, n);

    std::vector<float>  unit(l.n_embd_k);
    std::vector<double> sum;

    std::vector<float> res((size_t) l.n_embd_k*l.n_embd_k);
    for (int64_t j = 0; j < l.n_embd_k; ++j) {
        sum.assign(l.n_embd_k, 0.0);
        for (int u = 0; u < n; ++u) {
            std::fill(unit.begin(), unit.end(), 0.0f);
            unit[j] = 1.0f;
            rots.rotate_query(unit.data(), u);
            for (int64_t d = 0; d < l.n_embd_k; ++d) {
                sum[d] += unit[d];
            }
        }
        for (int64_t d = 0; d < l.n_embd_k; ++d) {
            res[d*l.n_embd_k + j] = sum[d]/n;
        }
    }
    return res;
}

// offsets of one layer's inputs
struct attn_layer_offsets {
    size_t delta = 0;
    size_t mean  = 0;
};

// Rotated queries [n_embd, n, n_head]. Each query is first rotated by `delta` to the next token's position. Then it is
// multiplied by the matrix `mean`, the mean of the rotations by 0 .. n_future - 1 positions
static ggml_tensor * build_queries(
        ggml_context * ctx, const layer & l, const queries::attn_layer & a, ggml_tensor * idx, ggml_tensor * delta, ggml_tensor * mean,
        ggml_tensor * k_rot) {
    const int64_t n = idx->ne[0];

    ggml_tensor * q = ggml_reshape_2d(ctx, ggml_get_rows(ctx, a.t, idx), a.n_embd, a.n_head*n);

    if (l.rope.is_rotary()) {
        rope unscaled = l.rope;
        unscaled.scale = nullptr;

        q = mapped(ctx, l, q, k_rot);
        // The scale has the weights of a norm that the model applies to rotated keys. To rotate a key again, divide it
        // by the scale, rotate it, and multiply it by the scale. A query is multiplied, rotated and divided: its
        // product with a key is then the same as if the key were rotated in the opposite direction
        if (l.rope.scale) {
            q = ggml_mul(ctx, q, l.rope.scale);
        }
        q = unscaled.build(ctx, q, delta, a.n_head);
        if (l.rope.scale) {
            q = ggml_div(ctx, q, l.rope.scale);
        }
        q = ggml_mul_mat(ctx, ggml_reshape_2d(ctx, mean, a.n_embd, a.n_embd), q);
        q = mapped(ctx, l, q, k_rot);
    }

    q = ggml_reshape_3d(ctx, ggml_scale(ctx, q, a.scale), a.n_embd, a.n_head, n);

    return ggml_cont(ctx, ggml_permute(ctx, q, 0, 2, 1, 3));
}

int32_t read_future(
        llama_kvtool & kvtool, llama_context & lctx, int32_t n_last, int64_t pos, float * mean, float * variance, int32_t n_head,
        int32_t n_cell) {
    const auto & layers  = kvtool.layers;
    const auto & queries = kvtool.queries;

    std::fill_n(mean,     (size_t) kvtool.n_row*n_head*n_cell, 0.0f);
    std::fill_n(variance, (size_t) kvtool.n_row*n_head*n_cell, 0.0f);

    input in_idx      { GGML_TYPE_I32, {}, nullptr };
    input in_delta    { GGML_TYPE_I32, {}, nullptr };
    input in_rotation { GGML_TYPE_F32, {}, nullptr };

    const size_t align = part {}.align();

    std::vector<int32_t> deltas;
    for (int32_t t = kvtool.params.n_query - n_last; t < kvtool.params.n_query; ++t) {
        const int64_t slot = queries.past_slot(t);
        if (queries.pos[slot] < 0) {
            return fail(format("there have been fewer than %d queries", n_last));
        }
        in_idx.push<int32_t>(slot);
        deltas.push_back(pos - queries.pos[slot]);
    }

    std::vector<attn_layer_offsets> offsets;
    // For each layer of the cache: number of query heads per row that the loop has counted so far. Several layers of
    // the model may use the same cells
    std::vector<int> n_head_layer(layers.size());
    std::vector<int> first_head;

    // The mean rotation that in_rotation has last. If the next layer's rotation is equal, it uses the same entries
    const std::vector<float> * prev_matrix = nullptr;
    size_t prev_offset = 0;
    for (const auto & a : queries.attn_layers) {
        const auto & l = layers[a.i];

        first_head.push_back(n_head_layer[a.i]);
        n_head_layer[a.i] += a.n_head/l.n_head;
        if (n_head_layer[a.i] > n_head) {
            return fail(format("n_head must be %d or more, got %d", n_head_layer[a.i], n_head));
        }

        offsets.push_back({});
        if (!l.rope.is_rotary()) {
            continue;
        }
        offsets.back().delta = in_delta.start(align);
        push_deltas(l, deltas, in_delta);

        auto & matrix = kvtool.mean_rotations[a.i];
        if (matrix.empty()) {
            matrix = mean_rotation(l, kvtool.params.n_future);
        }
        if (prev_matrix && *prev_matrix == matrix) {
            offsets.back().mean = prev_offset;
            continue;
        }
        offsets.back().mean = prev_offset = in_rotation.start(align);
        for (const float x : matrix) {
            in_rotation.push(x);
        }
        prev_matrix = &matrix;
    }

    // number of cells to read in a layer
    const auto n_read = [&](const layer & l) { return std::min<int64_t>(n_cell, l.n_cell); };

    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * k_rot) {
        const auto & l = layers[i];

        const int64_t n_all    = n_read(l);
        const size_t  row_size = n_all*sizeof(float);

        // [n_all, 2, heads]: mean and variance
        ggml_tensor * out = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_all, 2, (int64_t) n_head_layer[i]*l.n_head);
        ggml_set_output(out);

        size_t out_offset = 0;
        for (size_t j = 0; j < queries.attn_layers.size(); ++j) {
            const auto & a = queries.attn_layers[j];
            if (a.i != i) {
                continue;
            }
            ggml_tensor * q = build_queries(ctx, l, a, in_idx.t,
                    l.rope.is_rotary() ? in_delta.view(ctx, offsets[j].delta, n_deltas(l, n_last)) : nullptr,
                    l.rope.is_rotary() ? in_rotation.view(ctx, offsets[j].mean, (int64_t) a.n_embd*a.n_embd) : nullptr, k_rot);

            ggml_tensor * mu        = ggml_scale(ctx, sum_middle(ctx, q), 1.0f/n_last);
            ggml_tensor * deviation = ggml_sub(ctx, q, mu);

            const size_t size = ggml_row_size(l.k->type, a.n_embd);

            for (int64_t c = 0; c < n_all; c += n_together) {
                const int64_t n = std::min(n_together, n_all - c);

                ggml_tensor * k = ggml_view_3d(ctx, l.k, a.n_embd, n, l.n_head, l.k->nb[1], size, c*l.k->nb[1]);

                const auto put = [&](ggml_tensor * x, int i_stat) {
                    ggml_tensor * dst = ggml_view_3d(ctx, out, n, 1, a.n_head, row_size, 2*row_size, out_offset + i_stat*row_size + c*sizeof(float));
                    ggml_build_forward_expand(gf, ggml_cpy(ctx, x, dst));
                };
                const auto product = [&](ggml_tensor * x) {
                    x = ggml_mul_mat(ctx, k, x);
                    ggml_prec_set_acc(x, GGML_PREC_F32);
                    return x;
                };
                put(product(mu), 0);
                put(ggml_scale(ctx, sum_middle(ctx, ggml_sqr(ctx, product(deviation))), 1.0f/n_last), 1);
            }
            out_offset += 2*row_size*a.n_head;
        }
        return out;
    };

    const auto read = [&](size_t i, const float * stats) {
        const auto & l = layers[i];

        const int64_t n = n_read(l);

        for (size_t j = 0; j < queries.attn_layers.size(); ++j) {
            const auto & a = queries.attn_layers[j];
            for (int head = 0; a.i == i && head < a.n_head; ++head, stats += 2*n) {
                const int n_group = a.n_head/l.n_head;

                const size_t dst = ((size_t) (l.row_0 + head/n_group)*n_head + first_head[j] + head % n_group)*n_cell;
                std::copy_n(stats,     n, mean     + dst);
                std::copy_n(stats + n, n, variance + dst);
            }
        }
    };

    size_t max_nodes = 16;
    for (const auto & a : queries.attn_layers) {
        max_nodes += 96 + (n_read(layers[a.i])/n_together + 1)*64;
    }

    if (!kvtool.graphs.compute_each(lctx, *memory::cache(lctx), layers, max_nodes, { &in_idx, &in_delta, &in_rotation }, build, read)) {
        return fail("the device failed to read logits");
    }
    return 0;
}

} // namespace kvtool
