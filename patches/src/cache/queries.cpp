#include "queries.h"

#include "llama-batch.h"

#include <algorithm>

namespace kvtool {

bool stored_queries::make(std::vector<attn_layer> new_layers, const std::vector<layer> & layers, int n_slot) {
    attn_layers = std::move(new_layers);
    memories.clear();

    std::vector<ggml_backend_buffer_type_t> bufts;
    for (const auto & a : attn_layers) {
        const auto buft = ggml_backend_buffer_get_type(layers[a.i].k->buffer);
        if (std::find(bufts.begin(), bufts.end(), buft) == bufts.end()) {
            bufts.push_back(buft);
        }
    }

    for (auto buft : bufts) {
        memory mem;
        // allocate the slots on the device, or on the host if the device lacks memory
        for (auto mem_buft : { buft, ggml_backend_cpu_buffer_type() }) {
            if (mem.buf) {
                continue;
            }
            mem.ctx.reset(ggml_init({ attn_layers.size()*ggml_tensor_overhead(), nullptr, true }));
            for (auto & a : attn_layers) {
                if (ggml_backend_buffer_get_type(layers[a.i].k->buffer) == buft) {
                    a.t = ggml_new_tensor_2d(mem.ctx.get(), GGML_TYPE_F32, (int64_t) a.n_embd*a.n_head, n_slot);
                    ggml_format_name(a.t, "kvtool_queries_%d", a.il);
                }
            }
            mem.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(mem.ctx.get(), mem_buft));
        }
        if (!mem.buf) {
            return false;
        }
        ggml_backend_buffer_clear(mem.buf.get(), 0);
        memories.push_back(std::move(mem));
    }

    return true;
}

ggml_tensor * stored_queries::build(
        ggml_context * ctx, int il, ggml_tensor * q, ggml_tensor * slots, float scale, ggml_tensor * sinks) {
    const auto a = std::find_if(attn_layers.begin(), attn_layers.end(), [&](const attn_layer & x) { return x.il == il; });
    GGML_ASSERT(a != attn_layers.end() && q->ne[0] == a->n_embd && q->ne[2] == a->n_head);

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

bool queries::make(std::vector<attn_layer> new_layers, const std::vector<layer> & layers) {
    pos.assign(is_on() ? n_slot() : 0, -1);
    next = 0;
    return stored_queries::make(std::move(new_layers), layers, n_slot());
}

void queries::set_positions(const llama_ubatch & ubatch, int64_t n) {
    for (int64_t t = ubatch.n_tokens - n; t < ubatch.n_tokens; ++t) {
        pos[slot(t)] = ubatch.pos[t];
    }
}

int64_t stored_queries::n_embd_all() const {
    int64_t res = 0;
    for (const auto & a : attn_layers) {
        res += (int64_t) a.n_embd*a.n_head;
    }
    return res;
}

int64_t stored_queries::n_bytes() const {
    int64_t res = 0;
    for (const auto & a : attn_layers) {
        res += ggml_nbytes(a.t);
    }
    return res;
}

void queries::copy(float * out, const float * in, int32_t * query_pos) {
    const int64_t n_embd = n_embd_all();

    for (int t = 0; t < params.n_query; ++t) {
        (in ? pos[past_slot(t)] : query_pos[t]) = in ? query_pos[t] : pos[past_slot(t)];
    }

    std::vector<float> slots;
    int64_t offset = 0;
    for (const auto & a : attn_layers) {
        const int64_t n = a.t->ne[0];

        slots.resize(ggml_nelements(a.t));
        ggml_backend_tensor_get(a.t, slots.data(), 0, ggml_nbytes(a.t));
        for (int t = 0; t < params.n_query; ++t) {
            float * query = slots.data() + past_slot(t)*n;
            if (in) {
                std::copy_n(in + t*n_embd + offset, n, query);
            } else if (query_pos[t] < 0) {
                std::fill_n(out + t*n_embd + offset, n, 0.0f);
            } else {
                std::copy_n(query, n, out + t*n_embd + offset);
            }
        }
        if (in) {
            ggml_backend_tensor_set(a.t, slots.data(), 0, ggml_nbytes(a.t));
        }
        offset += n;
    }
}

void queries::clear() {
    std::fill(pos.begin(), pos.end(), -1);
}

} // namespace kvtool
