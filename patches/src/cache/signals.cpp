#include "signals.h"

#include "reduce-middle.h"

#include "llama-context.h"

#include <algorithm>

namespace kvtool {

// A device's sums of LLAMA_KVTOOL_SIGNAL_IMPORTANT are cleared to this byte. It marks cells that were never important:
// four such bytes are the float -1.3e20, and subtracting a batch's n_tokens does not change this float
static constexpr uint8_t never_byte = 0xE0;

void signals::device_sums::clear() const {
    for (int s = 0; s < n_signal; ++s) {
        if (buf[s]) {
            ggml_backend_buffer_clear(buf[s].get(), 1u << s == LLAMA_KVTOOL_SIGNAL_IMPORTANT ? never_byte : 0);
        }
    }
}

void signals::resize() {
    for (int s = 0; s < n_signal; ++s) {
        pending[s].resize(layers.size());
        if (has(s)) {
            sums[s].resize(layers.back().row_0 + layers.back().n_head);
            for (const auto & l : layers) {
                for (int row = l.row_0; row < l.row_0 + l.n_head; ++row) {
                    sums[s][row].resize(l.n_cell);
                }
            }
        }
    }

    locations.assign(layers.size(), {});
    devices.clear();
    if (!make_device_sums()) {
        // if a device lacks memory for the sums, the host adds up all signals
        locations.assign(layers.size(), {});
        devices.clear();
    }
}

bool signals::make_device_sums() {
    int n_sum = 0;
    for (int s = 0; s < n_signal; ++s) {
        n_sum += has(s);
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = layers[i];

        if (n_sum == 0 || ggml_backend_buffer_is_host(l.k->buffer)) {
            continue;
        }
        const auto buft = ggml_backend_buffer_get_type(l.k->buffer);

        auto it = std::find_if(devices.begin(), devices.end(), [&](const device_sums & d) { return d.buft == buft; });
        if (it == devices.end()) {
            it = devices.emplace(it);
            it->buft = buft;
        }
        locations[i] = { (int) (it - devices.begin()), it->n };
        it->n += (size_t) l.n_head*l.n_cell;
    }

    for (auto & d : devices) {
        d.ctx.reset(ggml_init({ n_signal*ggml_tensor_overhead(), nullptr, true }));
        for (int s = 0; s < n_signal; ++s) {
            if (!has(s)) {
                continue;
            }
            d.t[s] = ggml_new_tensor_1d(d.ctx.get(), GGML_TYPE_F32, d.n);
            ggml_format_name(d.t[s], "kvtool_sums_%d", s);
            d.buf[s].reset(ggml_backend_alloc_ctx_tensors_from_buft(d.ctx.get(), d.buft));
            if (!d.buf[s]) {
                return false;
            }
        }
        d.clear();
    }

    return true;
}

ggml_tensor * signals::build_sum(ggml_context * ctx, size_t i, int s, ggml_tensor * t, int64_t n_tokens) const {
    const auto & l   = layers[i];
    const auto & loc = locations[i];

    if (loc.i_device < 0) {
        return nullptr;
    }
    GGML_ASSERT(t->ne[0] <= l.n_cell);

    const size_t stride = l.n_cell*sizeof(float);

    ggml_tensor * sum = ggml_view_3d(ctx, devices[loc.i_device].t[s], t->ne[0], 1, l.n_head, stride, stride, loc.offset*sizeof(float));

    switch (1u << s) {
        case LLAMA_KVTOOL_SIGNAL_LAST:
            return ggml_cpy(ctx, t, sum);
        case LLAMA_KVTOOL_SIGNAL_IMPORTANT: {
            // The sum says which query the cell was last important to: 0 is the batch's last query, -1 is the query
            // before it, and so on. Queries are counted from the end of the batch, so the graph is the same for every
            // batch
            ggml_tensor * prev = ggml_mul(ctx, sum, ggml_scale_bias(ctx, ggml_step(ctx, t), -1.0f, 1.0f));
            return ggml_cpy(ctx, ggml_scale_bias(ctx, ggml_add(ctx, prev, t), 1.0f, -n_tokens), sum);
        }
        case LLAMA_KVTOOL_SIGNAL_HIGHEST:
            return ggml_cpy(ctx, max_of(ctx, sum, t), sum);
        default:
            return ggml_add_inplace(ctx, sum, t);
    }
}

void signals::extract(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens) {
    fold(lctx);

    bool has_pending = false;

    for (const auto & probe : graph.probes) {
        for (int s = 0; s < n_signal; ++s) {
            if (ggml_tensor * t = probe.t[s]) {
                auto & dst = pending[s][probe.i];
                dst.resize(ggml_nelements(t));
                has_pending = true;

                ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(lctx.get_sched(), t);
                ggml_backend_tensor_get_async(backend, t, dst.data(), 0, ggml_nbytes(t));
            }
        }
    }

    // if the graph has no signals for the host, nothing is copied
    n_query_pending = has_pending ? n_tokens : 0;

    if (!graph.probes.empty() && !devices.empty()) {
        n_query_device += n_tokens;
    }
}

// wait for the copies of the last batch's signals, and add these signals to the host's sums
void signals::fold(llama_context & lctx) {
    if (n_query_pending == 0) {
        return;
    }

    lctx.synchronize();

    for (int s = 0; s < n_signal; ++s) {
        for (size_t i = 0; has(s) && i < layers.size(); ++i) {
            const auto & l = layers[i];

            if (locations[i].i_device >= 0) {
                continue;
            }

            const size_t n_kv = pending[s][i].size()/l.n_head;

            for (int head = 0; head < l.n_head; ++head) {
                add(s, l.row_0 + head, pending[s][i].data() + head*n_kv, std::min<size_t>(n_kv, l.n_cell), n_query_pending);
            }
        }
    }

    n_query_pending = 0;
}

void signals::fold(int s, const float * src, float * dst, size_t n, int n_query) const {
    const uint32_t signal = 1u << s;

    if (signal == LLAMA_KVTOOL_SIGNAL_LAST) {
        std::copy(src, src + n, dst);
    } else if (signal == LLAMA_KVTOOL_SIGNAL_IMPORTANT) {
        // src: number of the last query that the cell was important to. The first query of the batch has number 1; src
        // is 0 if there is no such query. The loop has no branches, because they would double its time
        const float n_batch = n_query;
        for (size_t i = 0; i < n; ++i) {
            const float is_hit  = src[i] > 0.0f;
            const float was_hit = dst[i] > 0.0f;
            dst[i] = is_hit*(n_batch + 1) - src[i] + (1 - is_hit)*(dst[i] + was_hit*n_batch);
        }
    } else if (signal == LLAMA_KVTOOL_SIGNAL_HIGHEST) {
        for (size_t i = 0; i < n; ++i) {
            dst[i] = src[i] <= dst[i] ? dst[i] : src[i]; // NaN is kept
        }
    } else {
        for (size_t i = 0; i < n; ++i) {
            dst[i] += src[i];
        }
    }
}

void signals::collect(llama_context & lctx) {
    fold(lctx);

    if (n_query_device == 0) {
        return;
    }

    lctx.synchronize();

    std::vector<float> tmp;

    for (size_t d = 0; d < devices.size(); ++d) {
        for (int s = 0; s < n_signal; ++s) {
            if (!has(s)) {
                continue;
            }
            tmp.resize(devices[d].n);
            ggml_backend_tensor_get(devices[d].t[s], tmp.data(), 0, tmp.size()*sizeof(float));

            for (size_t i = 0; i < layers.size(); ++i) {
                const auto & l = layers[i];
                for (int head = 0; head < l.n_head && locations[i].i_device == (int) d; ++head) {
                    collect(s, tmp.data() + locations[i].offset + (size_t) head*l.n_cell, sums[s][l.row_0 + head]);
                }
            }
        }
    }

    clear_devices();
}

void signals::collect(int s, const float * src, std::vector<float> & dst) const {
    const uint32_t signal = 1u << s;

    for (size_t i = 0; i < dst.size(); ++i) {
        if (signal == LLAMA_KVTOOL_SIGNAL_LAST) {
            dst[i] = src[i];
        } else if (signal == LLAMA_KVTOOL_SIGNAL_IMPORTANT) {
            // src says which query the cell was last important to: 0 is the last query, -1 is the query before it, and
            // so on
            const float prev = dst[i] > 0.0f ? dst[i] + n_query_device : 0.0f;
            dst[i] = src[i] + n_query_device > 0.0f ? 1 - src[i] : prev;
        } else if (signal == LLAMA_KVTOOL_SIGNAL_HIGHEST) {
            dst[i] = src[i] <= dst[i] ? dst[i] : src[i];
        } else {
            dst[i] += src[i];
        }
    }
}

void signals::clear_devices() {
    if (n_query_device > 0) {
        for (const auto & d : devices) {
            d.clear();
        }
    }
    n_query_device = 0;
}

void signals::clear(llama_context & lctx) {
    if (n_query_pending > 0 || n_query_device > 0) {
        lctx.synchronize();
        n_query_pending = 0;
    }
    clear_devices();
    for (auto & rows : sums) {
        for (auto & row : rows) {
            std::fill(row.begin(), row.end(), 0.0f);
        }
    }
}

} // namespace kvtool
