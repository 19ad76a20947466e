// Resizing the layers of a cache. These functions are methods of llama_kvtool because they access private members of
// llama.cpp's context.

#include "hooks/error.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

using namespace kvtool;

int32_t llama_kvtool::resize(llama_context & lctx, const int32_t * n_cell, int n_resident) {
    auto * kv  = memory::cache(lctx);
    auto * idx = memory::index_cache(lctx);

    lctx.synchronize();

    const int n_live   = n_used(lctx);
    const int n_added  = n_resident < 0 ? 0 : n_resident - this->n_resident;
    const int n_recall = params.n_recall + n_added;

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = layers[i];

        const int n_tokens = params.ragged ? most_live(l) : n_live;
        if (n_cell[i] < std::max(n_tokens, 1) + n_recall) {
            return fail(format("layer %d: %d cells cannot hold its %d tokens and %d recalled ones",
                    l.il, n_cell[i], n_tokens, n_recall));
        }
        if (!params.ragged && n_cell[i] != n_cell[0]) {
            return fail(format("layer %d gets %d cells and layer %d gets %d: only ragged rows may differ",
                    l.il, n_cell[i], layers[0].il, n_cell[0]));
        }
    }

    if (!collect(lctx)) {
        return fail("the device failed to compute the signals");
    }

    forget_copies();

    const int64_t old_bytes = n_bytes();

    const auto old_cells = layer_cells();

    // resize one layer at a time, so that at most one layer has two copies in memory
    const auto resize_all = [&](const int * n_cells) {
        bool is_resized = true;
        for (size_t i = 0; is_resized && i < layers.size(); ++i) {
            is_resized = n_cells[i] == layers[i].n_cell || resize(lctx, *kv, layers, i, n_cells[i]);
        }
        // with ragged rows the index's cache keeps its size, because it holds only the tokens since the last edit
        for (size_t i = 0; is_resized && !params.ragged && i < index.size(); ++i) {
            is_resized = n_cells[0] == index[i].n_cell || resize(lctx, *idx, index, i, n_cells[0]);
        }
        return is_resized;
    };

    recent::ring_buffers buffers;

    const bool is_resized = resize_all(n_cell) && recent.make(buffers, n_cell);
    if (!is_resized && !resize_all(old_cells.data())) {
        // the context is unusable if layers have different sizes: attention would read past the end of the short ones
        broken = "there was no memory to resize the cache, nor to undo it; close this context and open a new one";
    }
    signals.resize();
    if (is_resized) {
        recent.replace(std::move(buffers));
        params.n_recall  += n_added;
        this->n_resident += n_added;
    }
    // residents are dropped even if the old sizes are restored: a layer that was shortened has lost its last cells
    drop_residents();

    if (is_resized && !params.ragged && memory::resize_tables(lctx, n_cell[0], n_live)) {
        // recalled tokens lie in the last cells of each layer, and these are now other cells
        fill_recalled(lctx);
    }

#if defined(__GLIBC__)
    // glibc keeps memory that is freed in small pieces, so return it to the system here
    if (old_bytes - n_bytes() > (16 << 20)) {
        malloc_trim(0);
    }
#else
    GGML_UNUSED(old_bytes);
#endif

    // Existing graphs view the old tensors, so new graphs are needed. Their compute buffers are allocated again if the
    // size has changed by much. Without ragged rows, layers seldom change size, so the buffers are always allocated
    // again
    const int  old_most     = *std::max_element(old_cells.begin(), old_cells.end());
    const bool changed_much = !params.ragged || old_most > 2*most_cells() || most_cells() > 2*old_most;
    forget_graphs(lctx, broken.empty() && (lctx.sched_need_reserve || changed_much));

    return is_resized ? 0 : fail(broken.empty() ? "no memory for the cache" : broken);
}

// Resize layer i of `cache_layers` to n cells. `cache_layers` has the layers of the cache kv. If there is no memory or
// a device failed, returns false and leaves this layer unchanged
bool llama_kvtool::resize(llama_context & lctx, llama_kv_cache & kv, std::vector<layer> & cache_layers, size_t i, int n) {
    auto & l = cache_layers[i];

    ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }) };

    const auto create = [&](const ggml_tensor * old) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx.get(), old->type, old->ne[0], n, old->ne[2]);
        ggml_set_name(t, old->name);
        return t;
    };

    ggml_tensor * k = create(l.k);
    ggml_tensor * v = l.v ? create(l.v) : nullptr;

    const auto stream = [&](ggml_tensor * t) {
        return t ? ggml_view_2d(ctx.get(), t, t->ne[0], n, t->nb[1], 0) : nullptr;
    };

    ggml_tensor * k_stream = stream(k);
    ggml_tensor * v_stream = stream(v);

    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(l.k->buffer)) };
    if (!buf) {
        return false;
    }
    ggml_backend_buffer_clear(buf.get(), 0);

    const int64_t n_copy = std::min(n, l.n_cell);

    // View of the cells that exist both before and after the resize. In transposed values, each row of the tensor holds
    // one element of all cells
    const auto common_cells = [&](ggml_context * ctx_copy, ggml_tensor * t, bool trans) {
        const int64_t n_embd = t->ne[0];
        return trans ?
            ggml_view_2d(ctx_copy, t, n_copy, n_embd, ggml_row_size(t->type, t->ne[1]), 0) :
            ggml_view_2d(ctx_copy, t, n_embd, n_copy, t->nb[1], 0);
    };

    const auto build = [&](ggml_context * ctx_copy, ggml_cgraph * gf, size_t, ggml_tensor *) -> ggml_tensor * {
        ggml_build_forward_expand(gf, ggml_cpy(ctx_copy, common_cells(ctx_copy, l.k, false), common_cells(ctx_copy, k, false)));
        if (v) {
            ggml_build_forward_expand(gf, ggml_cpy(ctx_copy, common_cells(ctx_copy, l.v, v_trans), common_cells(ctx_copy, v, v_trans)));
        }
        return nullptr;
    };
    if (!graphs.compute(lctx, kv, cache_layers, { { i }, nullptr }, 64, {}, build)) {
        return false;
    }

    l.k = k;
    l.v = v;
    l.n_cell = n;
    if (&cache_layers == &layers) {
        positions.resize(i, n);
    }

    graphs.clear();

    memory::replace(kv, cache_layers, l, k_stream, v_stream, std::move(ctx), std::move(buf));

    return true;
}
