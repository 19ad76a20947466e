// Rows that hold different numbers of cells: where new keys and values are stored, the masks, and flash attention.

#include "ragged.h"

#include "masks.h"

#include "hooks/hooks.h"
#include "hooks/input.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

using namespace kvtool;

// inputs of a layer's rows; null if the graph has none yet
static const llama_kvtool_input::rows * find_rows(const llm_graph_context & graph, int i) {
    const auto & inputs = graph_input(graph).ragged;
    const auto   it     = std::find_if(inputs.begin(), inputs.end(), [&](const auto & rows) { return rows.i == i; });
    return it == inputs.end() ? nullptr : &*it;
}

// store new keys and values at the end of each row
static void store_rows(const llm_graph_context & graph, const layer & l, int i, bool v_trans, ggml_tensor * k_cur, ggml_tensor * v_cur) {
    ggml_context * ctx = graph.ctx0;

    const int64_t n_tokens = k_cur->ne[2];
    const int64_t n_head   = l.n_head;

    llama_kvtool_input::rows rows;

    rows.i     = i;
    rows.k_idx = new_input(ctx, GGML_TYPE_I64, n_head*n_tokens, 1, 1);
    rows.v_idx = v_trans && l.v ? new_input(ctx, GGML_TYPE_I64, l.n_embd_v*n_head*n_tokens, 1, 1) : nullptr;
    rows.limit = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, graph.cparams.kvtool->is_even(l) ? 1 : n_head);

    graph_input(graph).ragged.push_back(rows);

    const auto write = [&](ggml_tensor * cache, ggml_tensor * cur, int64_t n_embd, ggml_tensor * idx) {
        cache = ggml_reshape_2d(ctx, cache, n_embd, ggml_nelements(cache)/n_embd);
        cur   = ggml_reshape_2d(ctx, ggml_cont(ctx, cur), n_embd, ggml_nelements(cur)/n_embd);
        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, cache, cur, idx));
    };

    write(l.k, k_cur, l.n_embd_k, rows.k_idx);
    if (l.v) {
        write(l.v, v_cur, v_trans ? 1 : l.n_embd_v, v_trans ? rows.v_idx : rows.k_idx);
    }
}

// Set k and v to views of a layer's cells: [n_embd, n_head, n_cell], or [n_cell, n_head, n_embd] for transposed v. v is
// unchanged if values are a part of the keys
static void view_cells(const llm_graph_context & graph, const layer & l, ggml_tensor * & k, ggml_tensor * & v) {
    ggml_context * ctx = graph.ctx0;

    const auto view = [&](ggml_tensor * t, int64_t n_embd) {
        const size_t size = ggml_row_size(t->type, n_embd);
        return ggml_view_4d(ctx, t, n_embd, l.n_head, l.n_cell, 1, size, t->nb[1], t->nb[2], 0);
    };

    k = view(l.k, l.n_embd_k);
    if (l.v && graph.cparams.kvtool->v_trans) {
        const size_t size = ggml_row_size(l.v->type, l.n_cell);
        v = ggml_view_4d(ctx, l.v, l.n_cell, l.n_head, l.n_embd_v, 1, size*l.n_embd_v, size, l.v->nb[2], 0);
    } else if (l.v) {
        v = view(l.v, l.n_embd_v);
    }
}

bool llama_kvtool_store(
        const llm_graph_context & graph,
        ggml_tensor * k_cur,
        ggml_tensor * v_cur,
        ggml_tensor * & k,
        ggml_tensor * & v,
                int   il,
        std::initializer_list<ggml_tensor *> unused) {
    auto * kvtool = graph.cparams.kvtool;

    if (!kvtool) {
        return false;
    }
    if (k_cur) {
        kvtool->read_rope(il, k_cur);
    }
    if (!kvtool->params.ragged || !kvtool->find(il)) {
        return false;
    }

    for (ggml_tensor * t : unused) {
        ggml_build_forward_expand(graph.gf, t);
    }

    const auto & l = *kvtool->find(il);

    // k_cur is null if the layer reads an earlier layer's cells
    if (k_cur) {
        store_rows(graph, l, &l - kvtool->layers.data(), kvtool->v_trans, k_cur, v_cur);
    }

    view_cells(graph, l, k, v);

    return true;
}

// Mask of ragged rows: 0 if a query sees a cell, otherwise a number below any logit. The shape is
// [n_cell, n_tokens, n_head], or [n_cell, n_tokens, 1] if all rows of the layer have equal lengths
static ggml_tensor * ragged_mask(const llm_graph_context & graph, const layer & l, int i) {
    const auto * rows = find_rows(graph, i);
    GGML_ASSERT(rows);

    return mask_below(graph.ctx0, l.n_cell, rows->limit);
}

// Mask [n_kv, n_tokens] of rows with equal lengths: 0 if a query sees a cell, otherwise a number below any logit. It is
// made from llama.cpp's mask, which cannot be used itself: with ALiBi, it has the negative distance of a visible cell
// instead of 0
static ggml_tensor * plain_mask(ggml_context * ctx, ggml_tensor * kq_mask) {
    ggml_tensor * x = kq_mask->type == GGML_TYPE_F16 ? ggml_cast(ctx, kq_mask, GGML_TYPE_F32) : kq_mask;
    return ggml_scale_bias(ctx, ggml_step(ctx, ggml_scale_bias(ctx, x, 1.0f, 1e9f)), 1e30f, -1e30f);
}

// ALiBi: the negative distance between each cell's key and each query, [n_kv, n_tokens, n_head]
static ggml_tensor * distances(const llm_graph_context & graph, const layer & l, int i, int64_t n_kv, int64_t n_tokens) {
    ggml_context * ctx = graph.ctx0;

    auto & input = graph_input(graph);
    if (!input.query_pos) {
        input.query_pos = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, 1);
    }

    ggml_tensor * key_pos = new_input(ctx, GGML_TYPE_F32, n_kv, 1, l.n_head);
    input.alibi_inputs.push_back({ i, key_pos });

    return minus_distances(ctx, key_pos, ggml_reshape_2d(ctx, input.query_pos, 1, n_tokens));
}

// mask that shows each token only the synthetic cells that were computed for it
static ggml_tensor * synthetic_mask(const llm_graph_context & graph, const llama_kvtool & kvtool, ggml_tensor * kq_mask, int64_t n_gqa) {
    const int64_t n_tokens = kq_mask->ne[1];
    if (n_tokens == 1 && n_gqa == kvtool.params.n_synthetic) {
        return kq_mask;
    }

    ggml_context * ctx = graph.ctx0;

    auto & masks = graph_input(graph).synthetic_masks;
    const auto it = std::find_if(masks.begin(), masks.end(), [&](const auto & m) { return m.n_gqa == n_gqa; });
    if (it != masks.end()) {
        return it->mask;
    }

    ggml_tensor * visible = new_input(ctx, GGML_TYPE_F32, kq_mask->ne[0], n_tokens, 1);

    // some devices cannot add in half precision
    const bool is_half = kq_mask->type == GGML_TYPE_F16;
    ggml_tensor * x = ggml_add(ctx, is_half ? ggml_cast(ctx, kq_mask, GGML_TYPE_F32) : kq_mask, visible);

    masks.push_back({ n_gqa, visible, is_half ? ggml_cast(ctx, x, GGML_TYPE_F16) : x });
    return masks.back().mask;
}

ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (kvtool && kvtool->uses_residents(kq_mask->ne[1])) {
        // llama_kvtool_resident makes the mask for this step
        return kq_mask;
    }
    if (kvtool && kvtool->params.n_synthetic > 0 && kvtool->n_archived() > 0 && !kvtool->is_staging() && kvtool->find(il)) {
        return synthetic_mask(graph, *kvtool, kq_mask, graph.hparams.n_head(il)/kvtool->find(il)->n_head);
    }
    if (!kvtool || (!kvtool->params.ragged && !kvtool->positions.is_on()) || !kvtool->find(il)) {
        return kq_mask;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const int i = &l - kvtool->layers.data();

    ggml_tensor * x = kvtool->params.ragged ? ragged_mask(graph, l, i) : plain_mask(ctx, kq_mask);
    if (kvtool->positions.is_on()) {
        x = ggml_add(ctx, distances(graph, l, i, x->ne[0], x->ne[1]), x);
    }

    x = repeat_rows(ctx, x, graph.hparams.n_head(il)/l.n_head);

    return kq_mask->type == GGML_TYPE_F16 ? ggml_cast(ctx, x, GGML_TYPE_F16) : x;
}

// Flash attention with a mask per KV head. KV heads are the fourth dimension, because CUDA's kernels use one mask for
// the whole third dimension. Sinks are indexed by the third dimension, so a model with sinks needs a separate operation
// for each KV head
static ggml_tensor * flash_attention(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * sinks, float scale) {
    ggml_context * ctx = graph.ctx0;

    const float   cap    = graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f;
    const int64_t n_head = k->ne[3];

    const auto flash = [&](int64_t head, int64_t n, ggml_tensor * head_sinks) {
        const auto heads = [&](ggml_tensor * t) {
            return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], t->ne[2], n, t->nb[1], t->nb[2], t->nb[3], head*t->nb[3]);
        };
        ggml_tensor * cur = ggml_flash_attn_ext(ctx, heads(q), heads(k), heads(v), heads(mask), scale, 0.0f, cap);
        ggml_flash_attn_ext_add_sinks(cur, head_sinks);
        ggml_prec_set_acc(cur, GGML_PREC_F32);
        return cur;
    };

    if (!sinks) {
        return flash(0, n_head, nullptr);
    }
    ggml_tensor * res = nullptr;
    for (int64_t head = 0; head < n_head; ++head) {
        // the sinks are copied because Vulkan's kernel reads them only at aligned offsets
        ggml_tensor * head_sinks = ggml_cont(ctx, ggml_view_1d(ctx, sinks, q->ne[2], head*q->ne[2]*sinks->nb[0]));
        ggml_tensor * cur = flash(head, 1, head_sinks);
        res = res ? ggml_concat(ctx, res, cur, 3) : cur;
    }
    return res;
}

ggml_tensor * kvtool::attend_rows(
        const llm_graph_context & graph, const layer & l, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;
    view_cells(graph, l, k, v);

    // view the dimension n_head as two dimensions: [n_head/l.n_head, l.n_head]
    const auto split_heads = [&](ggml_tensor * t) {
        t = ggml_permute(ctx, t, 0, 2, 1, 3);
        const int64_t n_group = t->ne[2]/l.n_head;
        return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n_group, l.n_head, t->nb[1], t->nb[2], n_group*t->nb[2], 0);
    };
    const auto readable = [&](ggml_tensor * t) { return split_heads(t->type == GGML_TYPE_F32 ? ggml_cast(ctx, t, GGML_TYPE_F16) : t); };

    // [n_embd_v, n_gqa, n_tokens, l.n_head]
    ggml_tensor * cur = flash_attention(graph, split_heads(q), readable(k), readable(v), mask, sinks, scale);
    const int64_t n_embd   = cur->ne[0]*cur->ne[1]*cur->ne[3];
    const int64_t n_tokens = cur->ne[2];
    // put all heads of a token next to each other
    cur = n_tokens > 1 ? ggml_cont(ctx, ggml_permute(ctx, cur, 0, 1, 3, 2)) : cur;
    return ggml_reshape_2d(ctx, cur, n_embd, n_tokens);
}

ggml_tensor * llama_kvtool_ragged(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * sinks, float scale, int il) {
    auto * kvtool = graph.cparams.kvtool;

    // This attention cannot be used with ALiBi. ggml chooses a head's slope by the head's index in the third dimension,
    // but here this dimension has only the heads of one group
    if (!kvtool || !kvtool->params.ragged || !graph.cparams.flash_attn || !kvtool->find(il) || kvtool->positions.is_on()) {
        return nullptr;
    }

    const auto & l = *kvtool->find(il);

    // llama.cpp's own attention is used in two cases: the layer needs only one mask, or values are a part of the keys
    // (MLA)
    if (l.n_head == 1 || kvtool->is_even(l) || !l.v) {
        return nullptr;
    }

    ggml_context * ctx = graph.ctx0;

    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;
    view_cells(graph, l, k, v);

    q = llama_kvtool_scale(graph, q, k);

    llama_kvtool_add_signals(graph, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3), nullptr,
            llama_kvtool_mask(graph, live_mask, il), sinks, scale, il);

    ggml_tensor * mask = ragged_mask(graph, l, &l - kvtool->layers.data());
    mask = ggml_reshape_4d(ctx, ggml_cast(ctx, mask, GGML_TYPE_F16), mask->ne[0], mask->ne[1], 1, mask->ne[2]);

    return attend_rows(graph, l, q, mask, sinks, scale);
}

bool llama_kvtool_dense(const llm_graph_context & graph) {
    return graph.cparams.kvtool != nullptr;
}
