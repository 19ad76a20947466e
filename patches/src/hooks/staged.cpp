// Attention of a step's queries to all archived tokens, on the device. A layer's archived keys and values are copied to
// a buffer on the device while the previous layer is computed. The live cells are written to the same buffer, in front
// of the archived tokens. A single attention operation then reads both.

#include "hooks.h"
#include "input.h"
#include "archive/hadamard.h"
#include "archive/staging.h"
#include "cache/probes.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

using namespace kvtool;

// cells that a flash attention kernel reads at once
static constexpr int64_t n_together = 256;

//
// inputs of the decode's graph
//

// Return the input I64 [n_head*n_live] with the indices at which the keys or values of live cells are written to the
// device's buffer. There is one index for each cell and KV head, cell by cell
static ggml_tensor * index_input(const llm_graph_context & graph, llama_kvtool_input::staged_inputs & in, int n_head, int64_t n_token) {
    for (const auto & r : in.indices) {
        if (r.n_head == n_head) {
            return r.idx;
        }
    }
    in.indices.push_back({ n_head, n_token, new_input(graph.ctx0, GGML_TYPE_I64, n_head*in.n_live, 1, 1) });
    return in.indices.back().idx;
}

// multiply x by the Hadamard matrix of size n; if n is 0, return x
static ggml_tensor * mapped(const llm_graph_context & graph, llama_kvtool_input::staged_inputs & in, ggml_tensor * x, int n) {
    if (n == 0) {
        return x;
    }
    auto it = std::find_if(in.maps.begin(), in.maps.end(), [&](const ggml_tensor * t) { return t->ne[0] == n; });
    if (it == in.maps.end()) {
        it = in.maps.insert(it, new_input(graph.ctx0, GGML_TYPE_F32, n, n, 1));
    }
    return llama_mul_mat_hadamard(graph.ctx0, x, *it);
}

static void set_hadamard(ggml_tensor * matrix) {
    const int64_t n = matrix->ne[0];

    std::vector<float> x(n*n, 0.0f);
    for (int64_t i = 0; i < n; ++i) {
        x[i*n + i] = 1.0f;
    }
    hadamard(x.data(), n*n, n);
    ggml_backend_tensor_set(matrix, x.data(), 0, ggml_nbytes(matrix));
}

void llama_kvtool_input::staged_inputs::set_input(staging & staging, int64_t rot) const {
    std::for_each(maps.begin(), maps.end(), set_hadamard);

    std::vector<int64_t> idx;
    for (const auto & r : indices) {
        idx.clear();
        for (int64_t c = 0; c < n_live; ++c) {
            for (int64_t head = 0; head < r.n_head; ++head) {
                idx.push_back(head*r.n_token + c);
            }
        }
        ggml_backend_tensor_set(r.idx, idx.data(), 0, ggml_nbytes(r.idx));
    }
    // all queries see the same archived tokens
    std::vector<float> tail_mask(tail->ne[0], -INFINITY);
    std::fill_n(tail_mask.begin(), n_archived, 0.0f);
    if (tail->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> half(tail_mask.size());
        ggml_fp32_to_fp16_row(tail_mask.data(), half.data(), tail_mask.size());
        ggml_backend_tensor_set(tail, half.data(), 0, ggml_nbytes(tail));
    } else {
        ggml_backend_tensor_set(tail, tail_mask.data(), 0, ggml_nbytes(tail));
    }
    staging.begin(marks, n_live, rot);
}

//
// attention in the decode's graph
//

// keys or values of a layer's first n_live cells, as F32 [n_embd, n_head*n_live], cell by cell
static ggml_tensor * live_rows(ggml_context * ctx, ggml_tensor * cache, int64_t n_embd, int64_t n_head, int64_t n_cell, int64_t n_live, bool is_transposed) {
    if (is_transposed) {
        ggml_tensor * t = ggml_view_2d(ctx, cache, n_live, n_embd*n_head, n_cell*ggml_type_size(cache->type), 0);
        t = ggml_cont(ctx, ggml_transpose(ctx, t->type == GGML_TYPE_F32 ? t : ggml_cast(ctx, t, GGML_TYPE_F32)));
        return ggml_reshape_2d(ctx, t, n_embd, n_head*n_live);
    }
    ggml_tensor * t = ggml_view_2d(ctx, cache, n_embd, n_head*n_live, ggml_row_size(cache->type, n_embd), 0);
    return t->type == GGML_TYPE_F32 ? t : ggml_cast(ctx, t, GGML_TYPE_F32);
}

static ggml_tensor * flash_attention(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks, float scale) {
    ggml_context * ctx = graph.ctx0;

    const auto & hparams = graph.hparams;

    const auto readable = [&](ggml_tensor * t) { return t->type == GGML_TYPE_F32 ? ggml_cast(ctx, t, GGML_TYPE_F16) : t; };

    ggml_tensor * cur = ggml_flash_attn_ext(ctx, q, readable(k), readable(v), mask, scale, 0.0f,
            hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f);
    ggml_flash_attn_ext_add_sinks(cur, sinks);
    ggml_prec_set_acc(cur, GGML_PREC_F32);

    return ggml_reshape_2d(ctx, cur, cur->ne[0]*cur->ne[1], cur->ne[2]);
}

static ggml_tensor * plain_attention(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks, float scale) {
    ggml_context * ctx = graph.ctx0;

    // Vulkan may multiply quantized keys as if there were no other rows between those of two heads
    if (ggml_is_quantized(k->type)) {
        k = ggml_cast(ctx, k, GGML_TYPE_F32);
    }
    ggml_tensor * kq = probabilities(ctx, graph.hparams, graph.arch == LLM_ARCH_GROK, k, q, mask, sinks, scale);

    v = ggml_cont(ctx, ggml_transpose(ctx, v->type == GGML_TYPE_F32 ? v : ggml_cast(ctx, v, GGML_TYPE_F32)));

    ggml_tensor * cur = ggml_permute(ctx, ggml_mul_mat(ctx, v, kq), 0, 2, 1, 3);
    return ggml_cont_2d(ctx, cur, cur->ne[0]*cur->ne[1], cur->ne[2]);
}

ggml_tensor * llama_kvtool_staged(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * v, ggml_tensor * sinks,
        ggml_tensor * v_mla, float scale, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->is_staging() || !kvtool->find(il)) {
        return nullptr;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l       = *kvtool->find(il);
    const auto & staging = *kvtool->staging;
    const size_t i       = &l - kvtool->layers.data();

    auto & in = graph_input(graph).staged;
    if (!in.mask) {
        in.n_live     = live_mask->ne[0];
        in.n_archived = kvtool->n_archived();
        in.tail       = new_input(ctx, live_mask->type, GGML_PAD(in.n_live + in.n_archived, n_together) - in.n_live, 1, 1);
        in.mask       = ggml_concat(ctx, live_mask, ggml_repeat_4d(ctx, in.tail, in.tail->ne[0], live_mask->ne[1], 1, 1), 0);
    }

    // if several layers read the same cells, each of them writes the live cells to the device's buffer again
    ggml_tensor * idx = index_input(graph, in, l.n_head, staging.n_token());

    const auto write = [&](ggml_tensor * dst, ggml_tensor * cache, int64_t n_embd, int n_map, bool is_transposed) {
        ggml_tensor * src = live_rows(ctx, cache, n_embd, l.n_head, l.n_cell, in.n_live, is_transposed);
        src = mapped(graph, in, src, n_map);
        ggml_tensor * res = ggml_set_rows(ctx, dst, src, idx);
        ggml_build_forward_expand(graph.gf, res);
        return res;
    };
    const auto * keys   = write(staging.keys(i), l.k, l.n_embd_k, staging.key_map(i), false);
    const auto * values = l.v ? write(staging.values(i), l.v, l.n_embd_v, staging.value_map(i), kvtool->v_trans) : nullptr;
    in.marks.push_back({ keys, values, i });

    // the first n_embd elements of each row
    const auto rows = [&](ggml_tensor * t, int64_t n_embd) {
        return ggml_view_3d(ctx, t, n_embd, in.mask->ne[0], l.n_head, t->nb[1], t->nb[1]*staging.n_token(), 0);
    };
    // with MLA, a value is the beginning of its key
    ggml_tensor * k_rows = rows(staging.keys(i), l.n_embd_k);
    ggml_tensor * v_rows = l.v ? rows(staging.values(i), l.n_embd_v) : rows(staging.keys(i), v->ne[0]);

    const auto attend = graph.cparams.flash_attn ? flash_attention : plain_attention;

    q = mapped(graph, in, q, staging.key_map(i));

    ggml_tensor * cur = attend(graph, ggml_permute(ctx, q, 0, 2, 1, 3), k_rows, v_rows, in.mask, sinks, scale);
    cur = mapped(graph, in, cur, staging.value_map(i));
    if (v_mla) {
        // each head's matrix decompresses the values
        cur = ggml_reshape_3d(ctx, cur, v->ne[0], q->ne[1], q->ne[2]);
        cur = ggml_mul_mat(ctx, v_mla, ggml_permute(ctx, cur, 0, 2, 1, 3));
        cur = ggml_permute(ctx, cur, 0, 2, 1, 3);
        cur = ggml_cont_2d(ctx, cur, cur->ne[0]*cur->ne[1], cur->ne[2]);
    }
    ggml_build_forward_expand(graph.gf, cur);
    return cur;
}

ggml_status llama_kvtool_computed(const llama_context & lctx, ggml_status status) {
    const bool has_failed = lctx.kvtool && lctx.kvtool->staging && !lctx.kvtool->staging->failure().empty();
    return has_failed ? GGML_STATUS_FAILED : status;
}
