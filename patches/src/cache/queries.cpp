#include "queries.h"

#include "llama-batch.h"

#include <algorithm>

namespace kvtool {

bool stored_queries::make(std::vector<asker> all, const std::vector<layer> & layers, int n_slot) {
    askers = std::move(all);
    memories.clear();

    std::vector<ggml_backend_buffer_type_t> bufts;
    for (const auto & a : askers) {
        const auto buft = ggml_backend_buffer_get_type(layers[a.i].k->buffer);
        if (std::find(bufts.begin(), bufts.end(), buft) == bufts.end()) {
            bufts.push_back(buft);
        }
    }

    for (auto buft : bufts) {
        memory own;
        // allocate the slots on the device, or on the host if the device lacks memory
        for (auto type : { buft, ggml_backend_cpu_buffer_type() }) {
            if (own.buf) {
                continue;
            }
            own.ctx.reset(ggml_init({ askers.size()*ggml_tensor_overhead(), nullptr, true }));
            for (auto & a : askers) {
                if (ggml_backend_buffer_get_type(layers[a.i].k->buffer) == buft) {
                    a.t = ggml_new_tensor_2d(own.ctx.get(), GGML_TYPE_F32, (int64_t) a.n_embd*a.n_head, n_slot);
                    ggml_format_name(a.t, "kvtool_queries_%d", a.il);
                }
            }
            own.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(own.ctx.get(), type));
        }
        if (!own.buf) {
            return false;
        }
        ggml_backend_buffer_clear(own.buf.get(), 0);
        memories.push_back(std::move(own));
    }

    return true;
}

ggml_tensor * stored_queries::build(
        ggml_context * ctx, int il, ggml_tensor * q, ggml_tensor * slots, float scale, ggml_tensor * sinks) {
    const auto a = std::find_if(askers.begin(), askers.end(), [&](const asker & x) { return x.il == il; });
    GGML_ASSERT(a != askers.end() && q->ne[0] == a->n_embd && q->ne[2] == a->n_head);

    a->scale = scale;
    a->sinks = sinks;

    const int64_t n = slots->ne[0];

    // in a slot, the heads of a token are consecutive
    q = ggml_permute(ctx, q, 0, 2, 1, 3);
    q = ggml_view_3d(ctx, q, q->ne[0], q->ne[1], n, q->nb[1], q->nb[2], (q->ne[2] - n)*q->nb[2]);
    if (!ggml_is_contiguous(q)) {
        q = ggml_cont(ctx, q);
    }

    return ggml_set_rows(ctx, a->t, ggml_reshape_2d(ctx, q, q->ne[0]*q->ne[1], n), slots);
}

bool queries::make(std::vector<asker> all, const std::vector<layer> & layers) {
    pos.assign(is_on() ? n_slot() : 0, -1);
    next = 0;
    return stored_queries::make(std::move(all), layers, n_slot());
}

void queries::note(const llama_ubatch & ubatch, int64_t n) {
    for (int64_t t = ubatch.n_tokens - n; t < ubatch.n_tokens; ++t) {
        pos[slot(t)] = ubatch.pos[t];
    }
}

int64_t stored_queries::n_number() const {
    int64_t res = 0;
    for (const auto & a : askers) {
        res += (int64_t) a.n_embd*a.n_head;
    }
    return res;
}

int64_t stored_queries::n_bytes() const {
    int64_t res = 0;
    for (const auto & a : askers) {
        res += ggml_nbytes(a.t);
    }
    return res;
}

void queries::copy(float * out, const float * in, int32_t * at) {
    const int64_t n_all = n_number();

    for (int t = 0; t < params.n_query; ++t) {
        (in ? pos[past(t)] : at[t]) = in ? at[t] : pos[past(t)];
    }

    std::vector<float> all;
    int64_t first = 0;
    for (const auto & a : askers) {
        const int64_t n = a.t->ne[0];

        all.resize(ggml_nelements(a.t));
        ggml_backend_tensor_get(a.t, all.data(), 0, ggml_nbytes(a.t));
        for (int t = 0; t < params.n_query; ++t) {
            float * own = all.data() + past(t)*n;
            if (in) {
                std::copy_n(in + t*n_all + first, n, own);
            } else if (at[t] < 0) {
                std::fill_n(out + t*n_all + first, n, 0.0f);
            } else {
                std::copy_n(own, n, out + t*n_all + first);
            }
        }
        if (in) {
            ggml_backend_tensor_set(a.t, all.data(), 0, ggml_nbytes(a.t));
        }
        first += n;
    }
}

void queries::clear() {
    std::fill(pos.begin(), pos.end(), -1);
}

} // namespace kvtool
