#include "resident-cells.h"

#include "archive/convert.h"
#include "archive/no_room.h"
#include "archive/softmax.h"
#include "archive/stored.h"
#include "devices.h"

#include "llama-context.h"

#include <atomic>
#include <cmath>
#include <stdexcept>

namespace kvtool {

// Number of keys and values that a layer gets per copy. A step changes 50 to 100 cells of a row (Qwen2.5 0.5B, 1,024
// resident tokens). Filling all cells takes many copies, but this seldom happens
static int64_t n_sent(const layer & l) { return 64*l.n_head; }

std::string resident_cells::unsupported(const std::vector<layer> & layers, bool v_trans, bool has_flash) {
    if (!has_flash || v_trans) {
        return "residents need flash attention";
    }
    for (const auto & l : layers) {
        if (!l.v) {
            return "values are a part of the keys (MLA)";
        }
        if (lies_on_worker(l)) {
            return "layers lie on a worker";
        }
    }
    return {};
}

int resident_cells::region(const resident_sizes & n) {
    return GGML_PAD(n.n_cell() + 1, 256);
}

resident_cells::resident_cells(
        const archive & tokens, const std::vector<layer> & layers, std::vector<asker> askers, const resident_sizes & n, int n_query,
        int n_filled, int n_thread)
    : chosen(tokens, n), n_query(n_query), n_region(region(n)), layers(layers), askers(std::move(askers))
    , n_filled(n_filled), live(layers.size()), masks(layers.size()), threads(n_thread - 1) {
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto buft = ggml_backend_buffer_get_type(layers[i].k->buffer);

        auto d = std::find_if(devices.begin(), devices.end(), [&](const device & x) { return x.buft == buft; });
        if (d == devices.end()) {
            devices.emplace_back();
            d = devices.end() - 1;
            d->buft = buft;
        }
        homes.push_back({ (size_t) (d - devices.begin()), d->n_row });
        d->layers.push_back(i);
        d->n_row += layers[i].n_head;
    }
    for (const auto & a : this->askers) {
        devices[homes[a.i].device].n_number += a.n_embd*a.n_head;
    }
    for (auto & d : devices) {
        make_device(d);
        for (const size_t i : d.layers) {
            masks[i].assign(layers[i].n_head*d.mask->ne[0], ggml_fp32_to_fp16(-INFINITY));
            ggml_backend_tensor_set(d.mask, masks[i].data(), homes[i].row*d.mask->nb[3], layers[i].n_head*d.mask->nb[3]);
        }
    }
}

void resident_cells::make_device(device & d) {
    d.ctx.reset(ggml_init({ (3 + 3*d.layers.size() + askers.size())*ggml_tensor_overhead(), nullptr, true }));

    ggml_context * ctx = d.ctx.get();

    // Create the uploads before all other tensors. They then lie at the beginning of the buffer, where `all_uploads`
    // covers them
    for (const size_t i : d.layers) {
        const auto & l = layers[i];

        // Keys and values for a cache in F16 are sent in F16. For a cache in any other format they are sent in F32, and
        // the device converts them
        const auto type = [](const ggml_tensor * t) { return t->type == GGML_TYPE_F16 ? GGML_TYPE_F16 : GGML_TYPE_F32; };
        d.uploads.push_back({
            ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_sent(l)),
            ggml_new_tensor_2d(ctx, type(l.k), l.n_embd_k, n_sent(l)),
            ggml_new_tensor_2d(ctx, type(l.v), l.n_embd_v, n_sent(l)),
        });
    }
    d.mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_filled + n_region, 1, 1, d.n_row);
    d.queries = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d.n_number, n_query);

    size_t at = 0;
    for (auto & a : askers) {
        if (&devices[homes[a.i].device] == &d) {
            a.t = ggml_view_2d(ctx, d.queries, a.n_embd*a.n_head, n_query, d.queries->nb[1], at);
            at += ggml_row_size(GGML_TYPE_F32, a.n_embd*a.n_head);
        }
    }

    d.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, d.buft));
    if (!d.buffer) {
        throw no_room("a device has no memory for residents");
    }
    ggml_backend_buffer_clear(d.buffer.get(), 0);

    auto *       base = (char *) ggml_backend_buffer_get_base(d.buffer.get());
    const auto * last = d.uploads.back().v;

    d.upload_data.resize((const char *) last->data - base + ggml_nbytes(last));
    d.query_data  .resize(ggml_nelements(d.queries));

    d.all_uploads = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, d.upload_data.size());
    ggml_backend_tensor_alloc(d.buffer.get(), d.all_uploads, base);
}

ggml_tensor * resident_cells::store(ggml_context * ctx, int il, ggml_tensor * queries, ggml_tensor * slots, float scale) {
    const auto a = std::find_if(askers.begin(), askers.end(), [&](const asker & x) { return x.il == il; });
    GGML_ASSERT(a != askers.end() && queries->ne[0] == a->n_embd && queries->ne[1] == a->n_head);

    a->scale = scale;

    if (!ggml_is_contiguous(queries)) {
        queries = ggml_cont(ctx, queries);
    }
    return ggml_set_rows(ctx, a->t, ggml_reshape_2d(ctx, queries, a->n_embd*a->n_head, queries->ne[2]), slots);
}

int64_t resident_cells::bytes() const {
    int64_t res = 0;
    for (const auto & d : devices) {
        res += ggml_backend_buffer_get_size(d.buffer.get());
        for (const size_t i : d.layers) {
            const auto & l = layers[i];
            res += (ggml_nbytes(l.k) + ggml_nbytes(l.v))/l.n_cell*n_region;
        }
    }
    return res;
}

//
// writing cells
//

bool resident_cells::make_graph(device & d, uint64_t version) {
    const size_t n_node = 6*d.layers.size();

    d.graph_ctx.reset(ggml_init({ 2*n_node*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_node, false), nullptr, true }));
    d.alloc    .reset(ggml_gallocr_new(d.buft));

    ggml_context * ctx = d.graph_ctx.get();
    d.graph = ggml_new_graph_custom(ctx, n_node, false);

    for (size_t j = 0; j < d.layers.size(); ++j) {
        const auto & l  = layers[d.layers[j]];
        const auto & up = d.uploads[j];

        for (const auto & [cache, from] : { std::pair { l.k, up.k }, std::pair { l.v, up.v } }) {
            ggml_tensor * rows = ggml_reshape_2d(ctx, cache, from->ne[0], ggml_nelements(cache)/from->ne[0]);
            ggml_build_forward_expand(d.graph, ggml_set_rows(ctx, rows, from, up.at));
        }
    }
    if (!ggml_gallocr_reserve(d.alloc.get(), d.graph) || !ggml_gallocr_alloc_graph(d.alloc.get(), d.graph)) {
        return false;
    }
    d.version = version;
    return true;
}

static ggml_backend_t backend_of(llama_context & lctx, ggml_backend_buffer_type_t buft) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(lctx.get_sched()); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(lctx.get_sched(), i);
        if (ggml_backend_supports_buft(backend, buft)) {
            return backend;
        }
    }
    return nullptr;
}

static void convert(const ggml_tensor * t, const float * x, int64_t n, uint8_t * out) {
    if (t->type == GGML_TYPE_F16) {
        to_half(x, (ggml_fp16_t *) out, n);
    } else {
        std::copy_n(x, n, (float *) out);
    }
}

bool resident_cells::write(ggml_backend_t backend, device & d, const std::vector<residents::cells> & all) {
    int64_t n_copy = 0;
    for (const size_t i : d.layers) {
        const int64_t n = n_sent(layers[i]);
        n_copy = std::max(n_copy, ((int64_t) all[i].at.size() + n - 1)/n);
    }

    const auto in = [&](const ggml_tensor * t) { return d.upload_data.data() + ((const char *) t->data - (const char *) d.all_uploads->data); };

    for (int64_t copy = 0; copy < n_copy; ++copy) {
        share(d.layers.size(), [&](int j) {
            const auto & l   = layers[d.layers[j]];
            const auto & own = all[d.layers[j]];
            const auto & up  = d.uploads[j];

            const int64_t n_all = own.at.size();
            const int64_t first = std::min(copy*n_sent(l), n_all);
            const int64_t n     = std::min(n_all - first, n_sent(l));
            const int64_t cell  = l.n_cell - n_region;

            auto * at = (int64_t *) in(up.at);
            for (int64_t c = 0; c < n_sent(l); ++c) {
                // write the remaining entries to the last cell, which no query sees
                at[c] = c < n ? cell*l.n_head + own.at[first + c] : (int64_t) (l.n_cell - 1)*l.n_head;
            }
            convert(up.k, own.keys  .data() + first*l.n_embd_k, n*l.n_embd_k, in(up.k));
            convert(up.v, own.values.data() + first*l.n_embd_v, n*l.n_embd_v, in(up.v));
        });
        ggml_backend_tensor_set_async(backend, d.all_uploads, d.upload_data.data(), 0, d.upload_data.size());
        if (ggml_backend_graph_compute(backend, d.graph) != GGML_STATUS_SUCCESS) {
            return false;
        }
    }
    return true;
}

bool resident_cells::copy_mask(size_t layer) {
    auto & all = masks[layer];

    const size_t n = all.size()/layers[layer].n_head;

    bool has_changed = false;
    for (int head = 0; head < layers[layer].n_head; ++head) {
        const auto & from = chosen.mask(layer, head);
        const auto   to   = all.begin() + head*n + n_filled;
        if (!std::equal(from.begin(), from.end(), to)) {
            std::copy(from.begin(), from.end(), to);
            has_changed = true;
        }
    }
    return has_changed;
}

bool resident_cells::place(llama_context & lctx, int64_t rot, uint64_t version) {
    for (auto & d : devices) {
        if (d.version != version && !make_graph(d, version)) {
            return false;
        }
    }

    chosen.begin(rot);
    for (bool is_done = false; !is_done;) {
        std::vector<residents::cells> all(layers.size());
        std::vector<uint8_t>          is_whole(layers.size());
        share(layers.size(), [&](int i) { is_whole[i] = chosen.update(i, all[i]); });

        for (auto & d : devices) {
            if (!write(backend_of(lctx, d.buft), d, all)) {
                return false;
            }
        }
        is_done = std::find(is_whole.begin(), is_whole.end(), 0) == is_whole.end();
    }
    std::vector<uint8_t> has_changed(layers.size());
    share(layers.size(), [&](int i) { has_changed[i] = copy_mask(i); });

    for (auto & d : devices) {
        ggml_backend_t backend = backend_of(lctx, d.buft);
        for (const size_t i : d.layers) {
            if (has_changed[i]) {
                ggml_backend_tensor_set_async(
                        backend, d.mask, masks[i].data(), homes[i].row*d.mask->nb[3], layers[i].n_head*d.mask->nb[3]);
            }
        }
        ggml_backend_synchronize(backend);
    }
    return true;
}

void resident_cells::share(int n, const std::function<void (int)> & f) {
    std::atomic<int> next { 0 };

    const auto work = [&](size_t) {
        for (int i; (i = next++) < n;) {
            f(i);
        }
    };
    workers::group all;
    std::string    own; // why this thread failed; the other threads use `work` until they have been waited for
    try {
        for (size_t t = 0; t < threads.size(); ++t) {
            threads.add(all, work);
        }
        work(0);
    } catch (const std::exception & e) {
        own = e.what();
    }
    if (const auto why = threads.wait(all); !why.empty() || !own.empty()) {
        throw std::runtime_error(own.empty() ? why : own);
    }
}

//
// choosing residents
//

// Copy the keys of the live cells to the host, unless there is a copy already. The copy lacks the keys of tokens that
// are decoded later, so the missed attention becomes too high. The only harm is that a step may be repeated without
// need
void resident_cells::copy_live(int n_live) {
    if (n_copied > 0) {
        return;
    }
    n_copied = n_live;
    for (size_t i = 0; i < layers.size(); ++i) {
        live[i].resize(n_live*layers[i].k->nb[1]);
        ggml_backend_tensor_get(layers[i].k, live[i].data(), 0, live[i].size());
    }
}

// sums[n_query]: logarithm of each query's softmax sum over the copied live cells
void resident_cells::sum_live(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, float * sums) const {
    const auto & l = layers[layer];

    const auto type   = l.k->type;
    const int  n_room = GGML_PAD(n_copied, 16);

    used_again<std::vector<float>> x;
    x.resize((size_t) n_room*n_few_columns);
    for (int first = 0; first < n_query; first += n_few_columns) {
        const int n = std::min(n_query - first, n_few_columns);

        multiply_rows(type, live[layer].data() + head*ggml_row_size(type, l.n_embd_k), l.k->nb[1], n_copied, l.n_embd_k,
                queries + (size_t) first*l.n_embd_k, n, x.data(), n_room);
        for (int q = 0; q < n; ++q) {
            float * own = x.data() + (size_t) q*n_room;
            for (int c = 0; c < n_copied; ++c) {
                own[c] *= logits.scale;
                own[c]  = logits.cap > 0.0f ? logits.cap*std::tanh(own[c]/logits.cap) : own[c];
            }
            const auto part = exponentials(own, n_copied, 1.0f, own);
            sums[first + q] = part.most + std::log(part.sum);
        }
    }
}

std::vector<float> resident_cells::choose_layer(size_t layer, float cap) {
    const auto & l = layers[layer];
    const auto & d = devices[homes[layer].device];

    std::vector<float> res(n_asked, 0.0f);

    std::vector<float> queries, sums, missed;
    std::vector<int>   tokens; // index of each query's token in the step
    for (int head = 0; head < l.n_head; ++head) {
        queries.clear();
        tokens .clear();
        logit_params logits = { 0.0f, cap };
        for (const auto & a : askers) {
            if (a.i != layer) {
                continue;
            }
            logits.scale = a.scale;
            const int    n  = a.n_head/l.n_head*a.n_embd; // elements of the queries of the head's group
            const size_t at = ((const char *) a.t->data - (const char *) d.queries->data)/sizeof(float);
            for (int t = 0; t < n_asked; ++t) {
                const float * from = d.query_data.data() + (size_t) t*d.n_number + at + head*n;
                queries.insert(queries.end(), from, from + n);
                tokens .insert(tokens .end(), n/l.n_embd_k, t);
            }
        }
        const int n = queries.size()/l.n_embd_k;
        sums  .resize(n);
        missed.resize(n);
        sum_live(layer, head, queries.data(), n, logits, sums.data());
        chosen.choose(layer, head, queries.data(), n, logits, sums.data(), missed.data());
        for (int i = 0; i < n; ++i) {
            res[tokens[i]] += missed[i];
        }
    }
    return res;
}

float resident_cells::choose(int n_live, float cap) {
    copy_live(n_live);
    for (auto & d : devices) {
        ggml_backend_tensor_get(d.queries, d.query_data.data(), 0, n_asked*d.queries->nb[1]);
    }

    std::vector<std::vector<float>> missed(layers.size()); // [layer][token]
    share(layers.size(), [&](int i) { missed[i] = choose_layer(i, cap); });

    int n_head = 0;
    for (const auto & a : askers) {
        n_head += a.n_head;
    }
    float res = 0.0f;
    for (int t = 0; t < n_asked; ++t) {
        float sum = 0.0f;
        for (const auto & layer : missed) {
            sum += layer[t];
        }
        res = std::max(res, sum/n_head);
    }
    n_asked = 0;
    return res;
}

} // namespace kvtool
