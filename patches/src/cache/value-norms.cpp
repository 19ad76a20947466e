#include "value-norms.h"

#include "graphs.h"
#include "reduce-middle.h"
#include "hooks/error.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include <algorithm>

namespace kvtool {

int32_t read_value_norms(llama_kvtool & kvtool, llama_context & lctx, float * out, int32_t n_cell) {
    const auto & layers = kvtool.layers;

    const auto n_read = [&](const layer & l) { return std::min<int64_t>(n_cell, l.n_cell); };

    std::fill_n(out, (size_t) kvtool.n_row*n_cell, 0.0f);
    for (const auto & l : layers) {
        for (int row = l.row_0; !l.v && row < l.row_0 + l.n_head; ++row) {
            // With MLA, a value is a part of its key that is normalized and then multiplied by weights. All values have
            // about the same norm, so 1 is given for each of them
            std::fill_n(out + (size_t) row*n_cell, n_read(l), 1.0f);
        }
    }

    input in_idx { GGML_TYPE_I32, {}, nullptr };
    if (!kvtool.v_trans) {
        int64_t n_idx = 0;
        for (const auto & l : layers) {
            n_idx = std::max(n_idx, n_read(l)*l.n_head);
        }
        for (int64_t c = 0; c < n_idx; ++c) {
            in_idx.push<int32_t>(c);
        }
    }

    // norms of a layer's values: [n, n_head] if values are transposed, else [n_head, n]
    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor *) -> ggml_tensor * {
        const auto & l = layers[i];
        if (!l.v) {
            return nullptr;
        }
        const int64_t n = n_read(l);

        ggml_tensor * x;
        if (kvtool.v_trans) {
            const size_t row_size = ggml_row_size(l.v->type, l.n_cell);
            x = ggml_view_3d(ctx, l.v, n, l.n_embd_v, l.n_head, row_size, row_size*l.n_embd_v, 0);
            x = sum_middle(ctx, ggml_sqr(ctx, ggml_cast(ctx, x, GGML_TYPE_F32)));
        } else {
            x = ggml_reshape_2d(ctx, l.v, l.n_embd_v, l.n_head*l.v->ne[1]);
            x = ggml_sum_rows(ctx, ggml_sqr(ctx, ggml_get_rows(ctx, x, in_idx.view(ctx, 0, n*l.n_head))));
        }
        x = ggml_sqrt(ctx, x);
        ggml_set_output(x);
        ggml_build_forward_expand(gf, x);
        return x;
    };

    const auto read = [&](size_t i, const float * norms) {
        const auto & l = layers[i];

        const int64_t n = n_read(l);

        for (int head = 0; head < l.n_head; ++head) {
            for (int64_t c = 0; c < n; ++c) {
                out[(size_t) (l.row_0 + head)*n_cell + c] = norms[kvtool.v_trans ? head*n + c : c*l.n_head + head];
            }
        }
    };

    if (!kvtool.graphs.compute_each(lctx, *memory::cache(lctx), layers, layers.size()*64 + 16, { &in_idx }, build, read)) {
        return fail("the device failed to read values");
    }
    return 0;
}

} // namespace kvtool
