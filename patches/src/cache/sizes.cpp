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

    const int n_own    = n_used(lctx);
    const int n_more   = n_resident < 0 ? 0 : n_resident - this->n_resident;
    const int n_recall = params.n_recall + n_more;

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = layers[i];

        const int n_live = params.ragged ? most_live(l) : n_own;
        if (n_cell[i] < std::max(n_live, 1) + n_recall) {
            return fail(format("layer %d: %d cells cannot hold its %d tokens and %d recalled ones",
                    l.il, n_cell[i], n_live, n_recall));
        }
        if (!params.ragged && n_cell[i] != n_cell[0]) {
            return fail(format("layer %d gets %d cells and layer %d gets %d: only ragged rows may differ",
                    l.il, n_cell[i], layers[0].il, n_cell[0]));
        }
    }

    if (!collect(lctx)) {
        return fail("the device failed to compute the signals");
    }

    const int64_t n_before = n_bytes();

    const auto before = layer_cells();

    // resize one layer at a time, so that at most one layer has two copies in memory
    const auto resize_all = [&](const int * wanted) {
        bool ok = true;
        for (size_t i = 0; ok && i < layers.size(); ++i) {
            ok = wanted[i] == layers[i].n_cell || resize(lctx, *kv, layers, i, wanted[i]);
        }
        // with ragged rows the index's cache keeps its size, because it holds only the tokens since the last edit
        for (size_t i = 0; ok && !params.ragged && i < index.size(); ++i) {
            ok = wanted[0] == index[i].n_cell || resize(lctx, *idx, index, i, wanted[0]);
        }
        return ok;
    };

    recent::rings rings;

    const bool ok = resize_all(n_cell) && recent.make(rings, n_cell);
    if (!ok && !resize_all(before.data())) {
        // the context is unusable if layers have different sizes: attention would read past the end of the short ones
        broken = "there was no memory to resize the cache, nor to undo it; close this context and open a new one";
    }
    signals.resize();
    if (ok) {
        recent.take(std::move(rings));
        params.n_recall   += n_more;
        this->n_resident += n_more;
    }
    // residents are dropped even if the old sizes are restored: a layer that was shortened has lost its last cells
    drop_residents();

    if (ok && !params.ragged && memory::resize_tables(lctx, n_cell[0], n_own)) {
        // recalled tokens lie in the last cells of each layer, and these are now other cells
        fill_recalled(lctx);
    }

#if defined(__GLIBC__)
    // glibc keeps memory that is freed in small pieces, so return it to the system here
    if (n_before - n_bytes() > (16 << 20)) {
        malloc_trim(0);
    }
#else
    GGML_UNUSED(n_before);
#endif

    // Existing graphs view the old tensors, so new graphs are needed. Their compute buffers are allocated again if the
    // size has changed by much. Without ragged rows, layers seldom change size, so the buffers are always allocated
    // again
    const int most    = *std::max_element(before.begin(), before.end());
    const bool by_much = !params.ragged || most > 2*most_cells() || most_cells() > 2*most;
    forget_graphs(lctx, broken.empty() && (lctx.sched_need_reserve || by_much));

    return ok ? 0 : fail(broken.empty() ? "no memory for the cache" : broken);
}

// Resize layer i of `some` to n cells. `some` has the layers of the cache kv. If there is no memory or a device failed,
// returns false and leaves this layer unchanged
bool llama_kvtool::resize(llama_context & lctx, llama_kv_cache & kv, std::vector<layer> & some, size_t i, int n) {
    auto & l = some[i];

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
    const auto live = [&](ggml_context * c, ggml_tensor * t, bool trans) {
        const int64_t n_embd = t->ne[0];
        return trans ?
            ggml_view_2d(c, t, n_copy, n_embd, ggml_row_size(t->type, t->ne[1]), 0) :
            ggml_view_2d(c, t, n_embd, n_copy, t->nb[1], 0);
    };

    const auto build = [&](ggml_context * c, ggml_cgraph * gf, size_t, ggml_tensor *) -> ggml_tensor * {
        ggml_build_forward_expand(gf, ggml_cpy(c, live(c, l.k, false),   live(c, k, false)));
        if (v) {
            ggml_build_forward_expand(gf, ggml_cpy(c, live(c, l.v, v_trans), live(c, v, v_trans)));
        }
        return nullptr;
    };
    if (!graphs.compute(lctx, kv, some, { { i }, nullptr }, 64, {}, build)) {
        return false;
    }

    l.k = k;
    l.v = v;
    l.n_cell = n;
    if (&some == &layers) {
        positions.resize(i, n);
    }

    graphs.clear();

    memory::replace(kv, some, l, k_stream, v_stream, std::move(ctx), std::move(buf));

    return true;
}
