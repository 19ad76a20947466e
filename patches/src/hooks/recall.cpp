// Recall in the decode's graph. Each layer attends to its archive and writes the result to the last cells of its rows:
// synthetic cells, or the tokens with the most attention. Attention over the cache then includes these cells.

#include "hooks.h"
#include "input.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace kvtool {

// For each query, find the live cell with the highest probability. Returns two tensors [1, 1, n_tokens*n_head]. The
// first has the logit of this cell if the model has a soft cap, otherwise the product of query and key before it is
// scaled. The second has the cell's probability in a softmax over the live cells and the attention sink
static std::pair<ggml_tensor *, ggml_tensor *> live_logits(
        const llm_graph_context & graph, const llama_kvtool & kvtool, const layer & l, ggml_tensor * q, ggml_tensor * mask,
        ggml_tensor * sinks, const logit_params & logits) {
    ggml_context * ctx = graph.ctx0;

    auto & input = graph_input(graph);

    const int64_t n_live = std::min<int64_t>(mask->ne[0], l.n_cell - kvtool.params.n_recall);
    if (!input.live_mask) {
        input.live_mask = ggml_cont(ctx, ggml_view_2d(ctx, mask, n_live, mask->ne[1], mask->nb[1], 0));
    }

    const int64_t n_embd = q->ne[0];
    const int64_t n_row  = q->ne[1]*q->ne[2];

    ggml_tensor * k = ggml_view_3d(ctx, l.k, n_embd, n_live, l.n_head, l.k->nb[1], ggml_row_size(l.k->type, n_embd), 0);

    ggml_tensor * kq = ggml_mul_mat(ctx, k, ggml_permute(ctx, q, 0, 2, 1, 3));
    if (logits.cap > 0.0f) {
        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, logits.scale/logits.cap)), logits.cap);
    }
    ggml_tensor * p = ggml_soft_max_ext(ctx, kq, input.live_mask, logits.cap > 0.0f ? 1.0f : logits.scale, 0.0f);
    ggml_soft_max_add_sinks(p, sinks);

    ggml_tensor * i_best = ggml_reshape_2d(ctx, ggml_argmax(ctx, ggml_reshape_2d(ctx, p, n_live, n_row)), 1, n_row);

    const auto highest = [&](ggml_tensor * t) { return ggml_get_rows(ctx, ggml_reshape_3d(ctx, t, 1, n_live, n_row), i_best); };

    return { highest(kq), highest(p) };
}

// how the model's attention converts products to logits
static logit_params logits_of(const llm_graph_context & graph, float scale) {
    const auto & hparams = graph.hparams;
    const bool is_grok = graph.arch == LLM_ARCH_GROK;
    if (!is_grok && !hparams.attn_soft_cap) {
        return { scale, 0.0f };
    }
    // llama.cpp scales before the cap by f_attn_out_scale (Grok) or in the model's graph, and after the cap by `scale`
    GGML_ASSERT(scale == 1.0f);
    return { is_grok ? hparams.f_attn_out_scale : 1.0f, hparams.f_attn_logit_softcapping };
}

// input I64 [n]: the cells first, first + 1, ...
static ggml_tensor * cells_from(const llm_graph_context & graph, int64_t first, int64_t n) {
    auto & inputs = graph_input(graph).filled_cells;

    for (const auto & input : inputs) {
        if (input.first == first && input.idx->ne[0] == n) {
            return input.idx;
        }
    }
    inputs.push_back({ first, new_input(graph.ctx0, GGML_TYPE_I64, n, 1, 1) });
    return inputs.back().idx;
}

} // namespace kvtool

using namespace kvtool;

void llama_kvtool_recall(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || kvtool->n_archived() == 0 || kvtool->is_staging() || kvtool->uses_residents(q->ne[2]) || !kvtool->find(il)) {
        return;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const size_t  i = &l - kvtool->layers.data();
    const int64_t n_synthetic = kvtool->params.n_synthetic;

    const int64_t first = l.n_cell - kvtool->params.n_recall;

    // A graph that is built only to reserve memory may have more tokens than there are synthetic cells for
    const int64_t k = n_synthetic > 0 ? n_synthetic*std::min<int64_t>(q->ne[2], kvtool->n_filled()/n_synthetic) : kvtool->params.n_recall;

    const int64_t n_embd_k = l.k->ne[0];
    const int64_t n_embd_v = l.v ? l.v->ne[0] : 0;

    auto & input = graph_input(graph);
    if (!input.rot) {
        input.rot = new_input(ctx, GGML_TYPE_I32, 1, 1, 1);
    }

    // devices can copy F16 to a cache in F16, and F32 to a cache of any other type
    const bool is_half = l.k->type == GGML_TYPE_F16 && (!l.v || l.v->type == GGML_TYPE_F16);
    const auto type    = is_half ? GGML_TYPE_F16 : GGML_TYPE_F32;

    const auto logits = logits_of(graph, scale);

    ggml_tensor * args[] = { q, input.rot, nullptr, nullptr };
    if (kvtool->archive->n_traced > 0) {
        std::tie(args[2], args[3]) = live_logits(graph, *kvtool, l, q, mask, sinks, logits);
    }
    ggml_tensor * t = input.kvtool.archive->build(ctx, i, l.k, args, type, k*(n_embd_k + n_embd_v), logits);
    // run this operation on the host: a device of another machine may wrongly claim that it supports custom operations
    ggml_backend_sched_set_tensor_backend(graph.sched, t, graph.backend_cpu);
    ggml_build_forward_expand(graph.gf, t);

    // copy the k keys or values that begin at element `offset` of t to the cells first .. first + k - 1
    const auto write = [&](ggml_tensor * cache, int64_t n_embd, int64_t offset) {
        ggml_tensor * src = ggml_view_2d(ctx, t, n_embd, k, ggml_row_size(type, n_embd), offset*ggml_type_size(type));
        if (ggml_is_quantized(cache->type)) {
            // Vulkan cannot copy to quantized blocks at arbitrary offsets, but it can set rows, which is
            // also how llama.cpp writes its caches
            ggml_tensor * rows = ggml_reshape_2d(ctx, cache, n_embd, ggml_nelements(cache)/n_embd);
            ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, rows, src, cells_from(graph, first, k)));
            return;
        }
        ggml_tensor * dst = ggml_view_2d(ctx, cache, n_embd, k, cache->nb[1], first*cache->nb[1]);
        ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, src, dst));
    };

    write(l.k, n_embd_k, 0);
    if (!l.v) {
        return;
    }
    if (!kvtool->v_trans) {
        write(l.v, n_embd_v, k*n_embd_k);
        return;
    }

    const size_t elem_size = ggml_type_size(l.v->type);

    ggml_tensor * src = ggml_view_2d(ctx, t,   k, n_embd_v, ggml_row_size(type, k), k*n_embd_k*ggml_type_size(type));
    ggml_tensor * dst = ggml_view_2d(ctx, l.v, k, n_embd_v, l.n_cell*elem_size, first*elem_size);
    ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, src, dst));
}
