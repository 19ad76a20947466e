#include "resident-cells.h"

#include "archive/convert.h"
#include "archive/out-of-space.h"
#include "archive/softmax.h"
#include "archive/row-products.h"
#include "devices.h"

#include "llama-context.h"

#include <atomic>
#include <cmath>
#include <stdexcept>

namespace kvtool {

// Keys and values of a cell are sent in F16 if the cache is in F16. For any other format they are sent in F32, and the
// device converts them
static ggml_type sent_type(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F16 ? GGML_TYPE_F16 : GGML_TYPE_F32;
}

static size_t key_bytes  (const layer & l) { return ggml_row_size(sent_type(l.k), l.n_embd_k); }
static size_t value_bytes(const layer & l) { return ggml_row_size(sent_type(l.v), l.n_embd_v); }

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
        const archive & tokens, const std::vector<layer> & layers, std::vector<attn_layer> attn_layers, const resident_sizes & n, int n_query,
        int n_filled, int n_thread)
    : selection(tokens, n), n_query(n_query), n_region(region(n)), layers(layers), attn_layers(std::move(attn_layers))
    , n_filled(n_filled), live_keys(layers.size()), changed_cells(layers.size()), threads(n_thread - 1) {
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto buft = ggml_backend_buffer_get_type(layers[i].k->buffer);

        auto d = std::find_if(devices.begin(), devices.end(), [&](const device & x) { return x.buft == buft; });
        if (d == devices.end()) {
            devices.emplace_back();
            d = devices.end() - 1;
            d->buft = buft;
        }
        locations.push_back({ (size_t) (d - devices.begin()), d->n_row });
        d->layers.push_back(i);
        d->n_row += layers[i].n_head;
    }
    for (const auto & a : this->attn_layers) {
        devices[locations[a.i].i_device].n_embd_all += a.n_embd*a.n_head;
    }
    for (auto & d : devices) {
        make_device(d);
    }
}

void resident_cells::make_device(device & d) {
    // A step changes 100 to 300 cells of a row (Qwen2.5 0.5B, 2,048 resident tokens). `upload` has room for 128 cells
    // of each row in F16; more cells are sent in several copies
    size_t n_upload = 0;
    for (const size_t i : d.layers) {
        n_upload += 128*layers[i].n_head*(sizeof(int64_t) + (layers[i].n_embd_k + layers[i].n_embd_v)*sizeof(ggml_fp16_t));
    }

    d.ctx.reset(ggml_init({ (3 + attn_layers.size())*ggml_tensor_overhead(), nullptr, true }));

    ggml_context * ctx = d.ctx.get();

    d.upload  = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, n_upload);
    d.mask    = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_filled + n_region, 1, 1, d.n_row);
    d.queries = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d.n_embd_all, n_query);

    size_t offset = 0;
    for (auto & a : attn_layers) {
        if (&devices[locations[a.i].i_device] == &d) {
            a.t = ggml_view_2d(ctx, d.queries, a.n_embd*a.n_head, n_query, d.queries->nb[1], offset);
            offset += ggml_row_size(GGML_TYPE_F32, a.n_embd*a.n_head);
        }
    }

    d.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, d.buft));
    if (!d.buffer) {
        throw out_of_space("a device has no memory for residents");
    }
    ggml_backend_buffer_clear(d.buffer.get(), 0);

    d.upload_data = host_buffer(d.buft, n_upload);
    d.query_data  = host_buffer(d.buft, ggml_nbytes(d.queries));
    d.mask_data   = host_buffer(d.buft, ggml_nbytes(d.mask));

    std::fill_n(d.masks_of(0), ggml_nelements(d.mask), ggml_fp32_to_fp16(-INFINITY));
    ggml_backend_tensor_set(d.mask, d.masks_of(0), 0, ggml_nbytes(d.mask));
}

template <typename T>
static T * data_of(const ggml_backend_buffer_ptr & buffer) {
    return (T *) ggml_backend_buffer_get_base(buffer.get());
}

ggml_fp16_t * resident_cells::device::masks_of(int row) const {
    return data_of<ggml_fp16_t>(mask_data) + row*mask->ne[0];
}

ggml_tensor * resident_cells::store(ggml_context * ctx, int il, ggml_tensor * queries, ggml_tensor * slots, float scale) {
    const auto a = std::find_if(attn_layers.begin(), attn_layers.end(), [&](const attn_layer & x) { return x.il == il; });
    GGML_ASSERT(a != attn_layers.end() && queries->ne[0] == a->n_embd && queries->ne[1] == a->n_head);

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

// copy the cells of a part to the host's copy of `upload`
void resident_cells::fill(const device & d, const part & p) const {
    const auto & l     = layers[p.layer];
    const auto & cells = changed_cells[p.layer];

    auto * data = data_of<uint8_t>(d.upload_data);

    auto * idx = (int64_t *) (data + p.idx);
    for (int64_t c = 0; c < p.n; ++c) {
        idx[c] = (int64_t) (l.n_cell - n_region)*l.n_head + cells.dst_rows[p.first + c];
    }
    convert(l.k, cells.keys  .data() + p.first*l.n_embd_k, p.n*l.n_embd_k, data + p.k);
    convert(l.v, cells.values.data() + p.first*l.n_embd_v, p.n*l.n_embd_v, data + p.v);
}

// the graph that writes the cells of all parts
ggml_cgraph * resident_cells::make_graph(device & d, const std::vector<part> & parts) const {
    const size_t n_tensor = 7*parts.size();

    d.graph_memory.resize(std::max(d.graph_memory.size(), n_tensor*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensor, false)));
    d.graph_ctx.reset(ggml_init({ d.graph_memory.size(), d.graph_memory.data(), true }));

    ggml_context * ctx   = d.graph_ctx.get();
    ggml_cgraph  * graph = ggml_new_graph_custom(ctx, n_tensor, false);

    const auto upload_view = [&](ggml_type type, int64_t n_embd, int64_t n, size_t offset) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, type, n_embd, n);
        ggml_backend_tensor_alloc(d.buffer.get(), t, (char *) d.upload->data + offset);
        return t;
    };

    for (const auto & p : parts) {
        const auto & l = layers[p.layer];

        ggml_tensor * idx = upload_view(GGML_TYPE_I64, p.n, 1, p.idx);
        for (const auto & [cache, src] : {
                std::pair { l.k, upload_view(sent_type(l.k), l.n_embd_k, p.n, p.k) },
                std::pair { l.v, upload_view(sent_type(l.v), l.n_embd_v, p.n, p.v) } }) {
            ggml_tensor * rows = ggml_reshape_2d(ctx, cache, src->ne[0], ggml_nelements(cache)/src->ne[0]);
            ggml_tensor * set  = ggml_set_rows(ctx, rows, src, idx);
            for (ggml_tensor * view : { rows, set }) {
                ggml_backend_view_init(view);
            }
            ggml_build_forward_expand(graph, set);
        }
    }
    return graph;
}

// write the changed cells of a device
bool resident_cells::write(ggml_backend_t backend, device & d) {
    const size_t n_align  = ggml_backend_buft_get_alignment(d.buft);
    const size_t n_upload = ggml_nbytes(d.upload);

    // send as many cells as `upload` has room for
    std::vector<part> parts;
    size_t n_used = 0;
    const auto send = [&] {
        // the device may still read the cells that were sent before
        ggml_backend_synchronize(backend);
        parallel_for(parts.size(), [&](int i) { fill(d, parts[i]); });
        ggml_backend_tensor_set_async(backend, d.upload, data_of<uint8_t>(d.upload_data), 0, n_used);
        const bool res = ggml_backend_graph_compute_async(backend, make_graph(d, parts)) == GGML_STATUS_SUCCESS;
        parts.clear();
        n_used = 0;
        return res;
    };

    for (const size_t i : d.layers) {
        const auto & l = layers[i];
        const int64_t n_changed = changed_cells[i].dst_rows.size();
        for (int64_t first = 0, n = 0; first < n_changed; first += n) {
            const size_t n_room = n_upload - std::min(n_used + 3*n_align, n_upload);

            n = std::min<int64_t>(n_changed - first, n_room/(sizeof(int64_t) + key_bytes(l) + value_bytes(l)));
            if (n == 0) {
                if (!send()) {
                    return false;
                }
                continue;
            }
            part p = { i, first, n, n_used, 0, 0 };
            p.k    = GGML_PAD(p.idx + n*sizeof(int64_t), n_align);
            p.v    = GGML_PAD(p.k + n*key_bytes(l), n_align);
            n_used = GGML_PAD(p.v + n*value_bytes(l), n_align);
            parts.push_back(p);
        }
    }
    return parts.empty() || send();
}

// copy the mask of a layer to the host's copy of the device's masks
void resident_cells::copy_mask(size_t layer) {
    const auto & d = devices[locations[layer].i_device];
    for (int head = 0; head < layers[layer].n_head; ++head) {
        const auto & mask = selection.mask(layer, head);
        std::copy(mask.begin(), mask.end(), d.masks_of(locations[layer].row_0 + head) + n_filled);
    }
}

bool resident_cells::update(llama_context & lctx, int64_t rot) {
    selection.begin(rot);
    for (bool is_done = false; !is_done;) {
        std::vector<uint8_t> is_complete(layers.size());
        parallel_for(layers.size(), [&](int i) {
            changed_cells[i].clear();
            is_complete[i] = selection.update(i, changed_cells[i]);
        });
        for (auto & d : devices) {
            if (!write(backend_of(lctx, d.buft), d)) {
                return false;
            }
        }
        is_done = std::find(is_complete.begin(), is_complete.end(), 0) == is_complete.end();
    }
    parallel_for(layers.size(), [&](int i) { copy_mask(i); });

    for (auto & d : devices) {
        ggml_backend_tensor_set_async(backend_of(lctx, d.buft), d.mask, d.masks_of(0), 0, ggml_nbytes(d.mask));
    }
    return true;
}

void resident_cells::parallel_for(int n, const std::function<void (int)> & f) {
    std::atomic<int> next { 0 };

    const auto work = [&](size_t) {
        for (int i; (i = next++) < n;) {
            f(i);
        }
    };
    workers::group group;
    // this thread's error; it is thrown after the wait, because other threads still use `work`
    std::string    thread_error;
    try {
        for (size_t t = 0; t < threads.size(); ++t) {
            threads.add(group, work);
        }
        work(0);
    } catch (const std::exception & e) {
        thread_error = e.what();
    }
    if (const auto why = threads.wait(group); !why.empty() || !thread_error.empty()) {
        throw std::runtime_error(thread_error.empty() ? why : thread_error);
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
        live_keys[i].resize(n_live*layers[i].k->nb[1]);
        ggml_backend_tensor_get(layers[i].k, live_keys[i].data(), 0, live_keys[i].size());
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

        multiply_rows(type, live_keys[layer].data() + head*ggml_row_size(type, l.n_embd_k), l.k->nb[1], n_copied, l.n_embd_k,
                queries + (size_t) first*l.n_embd_k, n, x.data(), n_room);
        for (int q = 0; q < n; ++q) {
            float * query_logits = x.data() + (size_t) q*n_room;
            for (int c = 0; c < n_copied; ++c) {
                query_logits[c] = logits.capped(query_logits[c]*logits.scale);
            }
            const auto softmax = exponentials(query_logits, n_copied, 1.0f, query_logits);
            sums[first + q] = softmax.max + std::log(softmax.sum);
        }
    }
}

std::vector<float> resident_cells::choose_layer(size_t layer, float cap) {
    const auto & l = layers[layer];
    const auto & d = devices[locations[layer].i_device];

    std::vector<float> res(n_stored, 0.0f);

    std::vector<float> queries, sums, missed;
    std::vector<int>   i_token; // index of each query's token in the step
    for (int head = 0; head < l.n_head; ++head) {
        queries.clear();
        i_token.clear();
        logit_params logits = { 0.0f, cap };
        for (const auto & a : attn_layers) {
            if (a.i != layer) {
                continue;
            }
            logits.scale = a.scale;
            const int    n      = a.n_head/l.n_head*a.n_embd; // elements of the queries of the head's group
            const size_t offset = ((const char *) a.t->data - (const char *) d.queries->data)/sizeof(float);
            for (int t = 0; t < n_stored; ++t) {
                const float * query = data_of<float>(d.query_data) + (size_t) t*d.n_embd_all + offset + head*n;
                queries.insert(queries.end(), query, query + n);
                i_token.insert(i_token.end(), n/l.n_embd_k, t);
            }
        }
        const int n = queries.size()/l.n_embd_k;
        sums  .resize(n);
        missed.resize(n);
        sum_live(layer, head, queries.data(), n, logits, sums.data());
        selection.choose(layer, head, queries.data(), n, logits, sums.data(), missed.data());
        for (int i = 0; i < n; ++i) {
            res[i_token[i]] += missed[i];
        }
    }
    return res;
}

float resident_cells::choose(int n_live, float cap) {
    copy_live(n_live);
    for (auto & d : devices) {
        ggml_backend_tensor_get(d.queries, data_of<float>(d.query_data), 0, n_stored*d.queries->nb[1]);
    }

    std::vector<std::vector<float>> missed(layers.size()); // [layer][token]
    parallel_for(layers.size(), [&](int i) { missed[i] = choose_layer(i, cap); });

    int n_head = 0;
    for (const auto & a : attn_layers) {
        n_head += a.n_head;
    }
    float res = 0.0f;
    for (int t = 0; t < n_stored; ++t) {
        float sum = 0.0f;
        for (const auto & layer : missed) {
            sum += layer[t];
        }
        res = std::max(res, sum/n_head);
    }
    n_stored = 0;
    return res;
}

} // namespace kvtool
