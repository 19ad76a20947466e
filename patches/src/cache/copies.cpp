// Copies of cells, and of the state of sliding and recurrent layers, out of a context and back.

#include "archive/convert.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <cstring>

using namespace kvtool;

void llama_kvtool::forget_copies() const {
    if (staging) {
        staging->forget_cells();
    }
    if (resident) {
        resident->forget_live();
    }
}

int64_t llama_kvtool::copy_cells(llama_context & lctx, const layer & l, uint8_t * out, const uint8_t * in, int n) const {
    const size_t size_k = l.k->nb[1]*n;
    const size_t size_v = l.v ? l.v->nb[1]*n : 0;

    if ((!out && !in) || n == 0) {
        return size_k + size_v;
    }
    lctx.synchronize();
    if (in) {
        forget_copies();
    }

    if (out) {
        ggml_backend_tensor_get(l.k, out, 0, size_k);
    } else {
        ggml_backend_tensor_set(l.k, in, 0, size_k);
    }

    if (!l.v) {
        return size_k;
    }
    if (!v_trans) {
        if (out) {
            ggml_backend_tensor_get(l.v, out + size_k, 0, size_v);
        } else {
            ggml_backend_tensor_set(l.v, in + size_k, 0, size_v);
        }
        return size_k + size_v;
    }

    // V is transposed on the device. Its copy lists values cell by cell, so that it can be restored in a context
    // without transposed V
    const size_t  elem_size = ggml_type_size(l.v->type);
    const int64_t n_embd    = l.v->ne[0];

    std::vector<uint8_t> tmp(size_v);

    if (out) {
        ggml_backend_tensor_get_2d(l.v, tmp.data(), 0, elem_size*n, n_embd, elem_size*l.n_cell, elem_size*n);
        transpose(tmp.data(), out + size_k, n_embd, n, elem_size);
    } else {
        transpose(in + size_k, tmp.data(), n, n_embd, elem_size);
        ggml_backend_tensor_set_2d(l.v, tmp.data(), 0, elem_size*n, n_embd, elem_size*l.n_cell, elem_size*n);
    }

    return size_k + size_v;
}

// Copy the state that a recurrent layer has after the newest token: from row i of the tensor t to `out`, or from `in`
// to row 0. If both pointers are null, copy nothing. Returns the size of the state in bytes
static int64_t copy_state(ggml_tensor * t, int i, uint8_t * out, const uint8_t * in) {
    const size_t size = t->nb[1];
    if (out) {
        ggml_backend_tensor_get(t, out, i*size, size);
    }
    if (in) {
        ggml_backend_tensor_set(t, in, 0, size);
    }
    return size;
}

int64_t llama_kvtool::copy_fixed_state(
        llama_context & lctx, int32_t * table_out, uint8_t * out, const int32_t * table_in, const uint8_t * in) const {
    lctx.synchronize();

    int64_t res = 0;
    for (const auto & l : sliding) {
        res += copy_cells(lctx, l, out ? out + res : nullptr, in ? in + res : nullptr, l.n_cell);
    }
    auto * mem = memory::recurrent(lctx);
    for (auto * t : states) {
        res += copy_state(t, memory::n_dropped(*mem), out ? out + res : nullptr, in ? in + res : nullptr);
    }

    int n_table = 0;
    if (auto * kv = memory::sliding_cache(lctx)) {
        n_table = memory::copy_table(*kv, table_out, table_in);
    }
    if (mem) {
        if (table_out) {
            table_out[n_table] = mem->seq_pos_max(0);
        }
        if (table_in) {
            memory::set_newest(*mem, table_in[n_table]);
            memory::restored(*mem);
        }
    }

    return res;
}
