#include "recent.h"

#include "layer-edit.h"

#include "llama-context.h"

#include <algorithm>

namespace kvtool {

float * recent::ring::data() {
    return copy.empty() ? (float *) t->data : copy.data();
}

bool recent::make(ring_buffers & res, const int * n_cell) const {
    if (!is_on()) {
        return true;
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto buft = ggml_backend_buffer_get_type(layers[i].k->buffer);

        auto it = std::find_if(res.rings.begin(), res.rings.end(), [&](const ring & r) { return r.buft == buft; });
        if (it == res.rings.end()) {
            it = res.rings.emplace(it);
            it->buft = buft;
        }
        res.locations.push_back({ (size_t) (it - res.rings.begin()), it->n, n_cell[i] });
        it->n += (size_t) layers[i].n_head*n_cell[i];
    }

    for (auto & r : res.rings) {
        const size_t n_float = r.n*n_slot();

        // Allocate the ring buffer on the device, or on the host if the device lacks memory. If it is on the host, the
        // scheduler copies the attention there
        for (auto buft : { r.buft, ggml_backend_cpu_buffer_type() }) {
            if (!r.buf) {
                r.ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
                r.t = ggml_new_tensor_1d(r.ctx.get(), GGML_TYPE_F32, n_float);
                ggml_set_name(r.t, "kvtool_recent");
                r.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), buft));
            }
        }
        if (!r.buf) {
            return false;
        }
        ggml_backend_buffer_clear(r.buf.get(), 0);
        if (!ggml_backend_buffer_is_host(r.buf.get())) {
            r.copy.resize(n_float);
        }
    }

    return true;
}

void recent::replace(ring_buffers && new_buffers) {
    for (size_t i = 0; i < buffers.locations.size(); ++i) {
        const int n = std::min(buffers.locations[i].n_cell, new_buffers.locations[i].n_cell);
        for (int s = 0; s < n_slot(); ++s) {
            for (int head = 0; head < layers[i].n_head; ++head) {
                std::copy_n(buffers.at(s, i, head), n, new_buffers.at(s, i, head));
            }
        }
    }
    buffers  = std::move(new_buffers);
    is_stale = false;
}

ggml_tensor * recent::build(ggml_context * ctx, size_t i, ggml_tensor * t, ggml_tensor * slots) const {
    const auto & loc = buffers.locations[i];
    const auto & r   = buffers.rings[loc.i_ring];

    GGML_ASSERT(t->ne[0] <= loc.n_cell);

    ggml_tensor * cells = ggml_view_3d(ctx, r.t, t->ne[0], n_slot(), layers[i].n_head,
            r.n*sizeof(float), loc.n_cell*sizeof(float), loc.offset*sizeof(float));

    return ggml_set_rows(ctx, cells, t, slots);
}

void recent::decoded(int n_tokens) {
    if (!is_on()) {
        return;
    }
    next     = slot(n_tokens);
    n_new    = std::min<int64_t>(n_new + (int64_t) n_tokens, n_slot());
    is_stale = true;
}

void recent::collect(llama_context & lctx) {
    if (n_new == 0) {
        return;
    }

    lctx.synchronize();

    // copy the newest slots, in two pieces if they wrap around the end of the ring buffer
    const int end   = slot(0);
    const int first = end - n_new;

    for (auto & r : buffers.rings) {
        const auto get = [&](int first_slot, int end_slot) {
            ggml_backend_tensor_get(r.t, r.copy.data() + first_slot*r.n, first_slot*r.n*sizeof(float), (end_slot - first_slot)*r.n*sizeof(float));
        };
        if (r.copy.empty()) {
            continue;
        }
        if (first < 0) {
            get(first + n_slot(), n_slot());
        }
        if (end > 0) {
            get(std::max(first, 0), end);
        }
    }

    n_new = 0;
}

void recent::sum(size_t i, int head, float * out, int n_cell) {
    std::fill(out, out + n_cell, 0.0f);

    const int n = std::min(n_cell, buffers.locations[i].n_cell);

    for (int t = 0; t < params.n_query; ++t) {
        const float * attn = buffers.at(past_slot(t), i, head);
        for (int c = 0; c < n; ++c) {
            out[c] += attn[c];
        }
    }
}

void recent::copy(float * out, const float * in, int n_cell) {
    size_t offset = 0; // offset of the row in the buffer

    for (int t = 0; t < params.n_query; ++t) {
        for (size_t i = 0; i < layers.size(); ++i) {
            const int n = std::min(n_cell, buffers.locations[i].n_cell);

            for (int head = 0; head < layers[i].n_head; ++head, offset += n_cell) {
                float * attn = buffers.at(past_slot(t), i, head);
                if (out) {
                    std::fill(std::copy_n(attn, n, out + offset), out + offset + n_cell, 0.0f);
                } else {
                    std::fill(std::copy_n(in + offset, n, attn), attn + buffers.locations[i].n_cell, 0.0f);
                }
            }
        }
    }
}

void recent::move(const llama_kvtool_edit & edit, const std::vector<layer_edit> & edits) {
    if (!is_on()) {
        return;
    }
    clear_devices();

    std::vector<size_t> src;
    std::vector<size_t> dst;
    std::vector<float>  tmp;

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = layers[i];

        const int n_cell = buffers.locations[i].n_cell;

        src.clear();
        dst.clear();
        for (const auto & m : values_moved(edits[i])) {
            const size_t row = (size_t) (m.row - l.row_0)*n_cell;
            src.push_back(row + m.src);
            dst.push_back(row + m.dst);
        }
        tmp.resize(src.size());

        for (int s = 0; s < n_slot(); ++s) {
            float * cells = buffers.at(s, i, 0);

            for (size_t j = 0; j < src.size(); ++j) {
                tmp[j] = cells[src[j]];
            }
            for (size_t j = 0; j < dst.size(); ++j) {
                cells[dst[j]] = tmp[j];
            }
            for (int head = 0; head < l.n_head; ++head) {
                const int n_keep = edit.n_keep_row ? edit.n_keep_row[l.row_0 + head] : edit.n_keep;

                std::fill(cells + (size_t) head*n_cell + n_keep, cells + (size_t) (head + 1)*n_cell, 0.0f);
            }
        }
    }
}

void recent::clear() {
    clear_devices();
    for (auto & r : buffers.rings) {
        std::fill_n(r.data(), r.n*n_slot(), 0.0f);
    }
}

// A slot must be 0 before a query uses it, because the query writes only the cells that llama.cpp's attention covers at
// that time
void recent::clear_devices() {
    for (auto & r : buffers.rings) {
        if (is_stale && !r.copy.empty()) {
            ggml_backend_buffer_clear(r.buf.get(), 0);
        }
    }
    n_new    = 0;
    is_stale = false;
}

} // namespace kvtool
