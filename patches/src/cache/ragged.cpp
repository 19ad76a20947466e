// Rows that hold different numbers of cells: the cells for new keys and values, and the masks.

#include "hooks/hooks.h"
#include "hooks/input.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"

#include <algorithm>

using namespace kvtool;

// inputs of a layer's rows; null if the graph has none yet
static const llama_kvtool_input::rows * find_rows(const llm_graph_context & graph, int i) {
    const auto & all = graph_input(graph).ragged;
    const auto   it  = std::find_if(all.begin(), all.end(), [&](const auto & rows) { return rows.i == i; });
    return it == all.end() ? nullptr : &*it;
}

// store new keys and values at each row's own end
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
        kvtool->see(il, k_cur);
    }
    if (!kvtool->params.ragged || !kvtool->find(il)) {
        return false;
    }

    ggml_context * ctx = graph.ctx0;

    for (ggml_tensor * t : unused) {
        ggml_build_forward_expand(graph.gf, t);
    }

    const auto & l = *kvtool->find(il);

    const bool v_trans = kvtool->v_trans;

    // a layer without keys reads an earlier layer's
    if (k_cur) {
        store_rows(graph, l, &l - kvtool->layers.data(), v_trans, k_cur, v_cur);
    }

    const auto view = [&](ggml_tensor * t, int64_t n_embd) {
        const size_t size = ggml_row_size(t->type, n_embd);
        return ggml_view_4d(ctx, t, n_embd, l.n_head, l.n_cell, 1, size, t->nb[1], t->nb[2], 0);
    };

    k = view(l.k, l.n_embd_k);
    if (l.v && v_trans) {
        const size_t size = ggml_row_size(l.v->type, l.n_cell);
        v = ggml_view_4d(ctx, l.v, l.n_cell, l.n_head, l.n_embd_v, 1, size*l.n_embd_v, size, l.v->nb[2], 0);
    } else if (l.v) {
        v = view(l.v, l.n_embd_v);
    }

    return true;
}

// Mask of ragged rows: 0 if a query sees a cell, otherwise less than any logit. [n_cell, n_tokens, n_head], or one
// mask for all heads if their rows have equal lengths
static ggml_tensor * ragged_mask(const llm_graph_context & graph, const layer & l, int i) {
    ggml_context * ctx = graph.ctx0;

    const auto * rows = find_rows(graph, i);
    GGML_ASSERT(rows);

    // computed on the device, as otherwise the host would fill and send a mask for every head and layer
    ggml_tensor * x = ggml_repeat_4d(ctx, ggml_arange(ctx, 0, l.n_cell, 1), l.n_cell, rows->limit->ne[1], rows->limit->ne[2], 1);
    return ggml_scale(ctx, ggml_step(ctx, ggml_sub(ctx, x, rows->limit)), -1e30f);
}

// the same from llama.cpp's mask [n_kv, n_tokens], without the distances that it contains
static ggml_tensor * plain_mask(ggml_context * ctx, ggml_tensor * kq_mask) {
    ggml_tensor * x = kq_mask->type == GGML_TYPE_F16 ? ggml_cast(ctx, kq_mask, GGML_TYPE_F32) : kq_mask;
    return ggml_scale_bias(ctx, ggml_step(ctx, ggml_scale_bias(ctx, x, 1.0f, 1e9f)), 1e30f, -1e30f);
}

// ALiBi: minus the distance between each cell's key and each query [n_kv, n_tokens, n_head]
static ggml_tensor * distances(const llm_graph_context & graph, const layer & l, int i, int64_t n_kv, int64_t n_tokens) {
    ggml_context * ctx = graph.ctx0;

    auto & input = graph_input(graph);
    if (!input.queries) {
        input.queries = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, 1);
    }

    ggml_tensor * keys = new_input(ctx, GGML_TYPE_F32, n_kv, 1, l.n_head);
    input.biased.push_back({ i, keys });

    ggml_tensor * x = ggml_sub(ctx, ggml_repeat_4d(ctx, keys, n_kv, n_tokens, l.n_head, 1), input.queries);
    return ggml_neg(ctx, ggml_abs(ctx, x));
}

// mask in which each token sees the synthetic cells that were computed for it
static ggml_tensor * made_mask(const llm_graph_context & graph, const llama_kvtool & kvtool, ggml_tensor * kq_mask, int64_t n_gqa) {
    const int64_t n_tokens = kq_mask->ne[1];
    if (n_tokens == 1 && n_gqa == kvtool.params.n_made) {
        return kq_mask;
    }

    ggml_context * ctx = graph.ctx0;

    auto & all = graph_input(graph).made;
    const auto it = std::find_if(all.begin(), all.end(), [&](const auto & m) { return m.n_gqa == n_gqa; });
    if (it != all.end()) {
        return it->mask;
    }

    ggml_tensor * seen = new_input(ctx, GGML_TYPE_F32, kq_mask->ne[0], n_tokens, 1);

    // some devices cannot add in half precision
    const bool is_half = kq_mask->type == GGML_TYPE_F16;
    ggml_tensor * x = ggml_add(ctx, is_half ? ggml_cast(ctx, kq_mask, GGML_TYPE_F32) : kq_mask, seen);

    all.push_back({ n_gqa, seen, is_half ? ggml_cast(ctx, x, GGML_TYPE_F16) : x });
    return all.back().mask;
}

ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (kvtool && kvtool->params.n_made > 0 && kvtool->n_archived() > 0 && !kvtool->is_staging() && kvtool->find(il)) {
        return made_mask(graph, *kvtool, kq_mask, graph.hparams.n_head(il)/kvtool->find(il)->n_head);
    }
    if (!kvtool || (!kvtool->params.ragged && !kvtool->places.is_on()) || !kvtool->find(il)) {
        return kq_mask;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const int i = &l - kvtool->layers.data();

    ggml_tensor * x = kvtool->params.ragged ? ragged_mask(graph, l, i) : plain_mask(ctx, kq_mask);
    if (kvtool->places.is_on()) {
        x = ggml_add(ctx, distances(graph, l, i, x->ne[0], x->ne[1]), x);
    }

    const int64_t n_kv     = x->ne[0];
    const int64_t n_tokens = x->ne[1];
    const int64_t n_gqa    = graph.hparams.n_head(il)/l.n_head;

    if (const int64_t n_head = x->ne[2]; n_gqa > 1 && n_head > 1) {
        x = ggml_reshape_4d(ctx, x, n_kv, n_tokens, 1, n_head);
        x = ggml_repeat_4d(ctx, x, n_kv, n_tokens, n_gqa, n_head);
        x = ggml_reshape_3d(ctx, x, n_kv, n_tokens, n_gqa*n_head);
    }

    return kq_mask->type == GGML_TYPE_F16 ? ggml_cast(ctx, x, GGML_TYPE_F16) : x;
}

bool llama_kvtool_dense(const llm_graph_context & graph) {
    return graph.cparams.kvtool != nullptr;
}

bool llama_kvtool_fits(const llama_context & lctx, uint32_t n_tokens) {
    const auto * kvtool = lctx.kvtool.get();

    if (kvtool && !kvtool->broken.empty()) {
        LLAMA_LOG_ERROR("%s\n", kvtool->broken.c_str());
        return false;
    }
    if (!kvtool) {
        return true;
    }
    if (kvtool->most_cells() > kvtool->n_most) {
        LLAMA_LOG_ERROR("the index of this model chooses %d cells, not %d\n", kvtool->n_most, kvtool->most_cells());
        return false;
    }
    if (kvtool->params.n_recall > 0) {
        const int n_own = kvtool->n_used(lctx);
        const int n     = kvtool->layers[0].n_cell - kvtool->params.n_recall;
        if (n_tokens > (uint32_t) (n - n_own)) {
            LLAMA_LOG_ERROR("%d cells cannot hold %d + %u tokens\n", n, n_own, n_tokens);
            return false;
        }
        if (kvtool->is_staging()) {
            if (const std::string why = kvtool->unstaged(); !why.empty()) {
                LLAMA_LOG_ERROR("%s\n", why.c_str());
                return false;
            }
            kvtool->fill_recalled(lctx, 0);
        } else if (kvtool->params.n_made > 0 && kvtool->n_archived() > 0) {
            if (n_tokens > (uint32_t) (kvtool->params.n_recall/kvtool->params.n_made)) {
                LLAMA_LOG_ERROR("%d cells cannot be made for %u tokens\n", kvtool->params.n_recall, n_tokens);
                return false;
            }
            kvtool->fill_recalled(lctx, n_tokens);
        }
    }
    if (!kvtool->params.ragged) {
        return true;
    }

    for (const auto & l : kvtool->layers) {
        const int n_live = kvtool->most_live(l);
        if (n_tokens > (uint32_t) (l.n_cell - n_live)) {
            LLAMA_LOG_ERROR("layer %d: %d cells cannot hold %d + %u tokens\n", l.il, l.n_cell, n_live, n_tokens);
            return false;
        }
    }

    return true;
}
