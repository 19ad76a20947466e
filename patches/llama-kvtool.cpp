#include "llama-kvtool.h"
#include "llama-kvtool-digest.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif

#if defined(__GLIBC__)
#include <malloc.h>
#endif

static thread_local std::string g_error;

static int32_t fail(const std::string & why) {
    g_error = why;
    return -1;
}

// of a worker's device those that are it once more: where an edit's graph is kept, and where that of reading keys is
using spare_devices = std::array<ggml_backend_dev_t, 2>;

static std::mutex                                  g_spares_mutex;
static std::map<ggml_backend_dev_t, spare_devices> g_spares;

// [n, r, h] -> [n, 1, h]: the middle dimension reduced by halving views
// (a transpose for ggml_sum_rows would walk the tensor element by element; ggml_out_prod is not on every device)
template <typename F>
static ggml_tensor * reduce_middle(ggml_context * ctx, ggml_tensor * t, F && join) {
    ggml_tensor * rest = nullptr;

    const auto part = [ctx](ggml_tensor * a, int64_t i, int64_t r) {
        return ggml_view_3d(ctx, a, a->ne[0], r, a->ne[2], a->nb[1], a->nb[2], i*a->nb[1]);
    };

    int64_t r = t->ne[1];

    if (r == 1) {
        return ggml_cont(ctx, t);
    }

    while (r > 1) {
        const int64_t half = r/2;

        if (r % 2 == 1) {
            ggml_tensor * odd = part(t, r - 1, 1);
            rest = rest ? join(rest, odd) : odd;
        }

        t = join(part(t, 0, half), part(t, half, half));
        r = half;
    }

    return rest ? join(t, rest) : t;
}

static ggml_tensor * sum_middle(ggml_context * ctx, ggml_tensor * t) {
    return reduce_middle(ctx, t, [ctx](ggml_tensor * a, ggml_tensor * b) { return ggml_add(ctx, a, b); });
}

// for values that are not negative
static ggml_tensor * max_middle(ggml_context * ctx, ggml_tensor * t) {
    return reduce_middle(ctx, t, [ctx](ggml_tensor * a, ggml_tensor * b) {
        return ggml_add(ctx, ggml_relu(ctx, ggml_sub(ctx, a, b)), b);
    });
}

struct llama_kvtool {
    struct layer {
        int il;
        int n_head;
        int row_0;
        int n_cell;

        ggml_tensor * k;
        ggml_tensor * v;

        int    device = -1; // where its signals add up, -1: on the host
        size_t first  = 0;  // and of its sums there the first, [n_head][n_cell]
    };

    std::vector<layer> layers;
    std::vector<int>   layer_of_row;

    // layers that attend through a sliding window: llama.cpp keeps their cache, and they have no rows
    std::vector<layer> sliding;

    static constexpr int n_signal = llama_kvtool_graph::n_signal;

    llama_kvtool_params params = {};

    bool v_trans = false;

    int     n_row  = 0;
    int64_t n_seen = 0; // tokens before the next query

    int n_done = 0; // queries since the signals were cleared

    // ragged: cells of each row in use
    std::vector<int32_t> live;

    // what the signals are since the last edit [n_signal][n_row][n_cell of the layer], empty where not enabled
    std::vector<std::vector<float>> signals[n_signal];

    // copies under way from the device, of the last ubatch [n_signal][n_layer][n_head*n_kv]
    std::vector<std::vector<float>> staging[n_signal];

    int n_query_staged = 0;

    // signals of layers whose cache is not in host memory add up beside it, and are copied when they are read:
    // to copy them after every ubatch would be most of what goes to another machine
    struct device_sums {
        ggml_backend_buffer_type_t buft;

        size_t n = 0; // of all its layers

        ggml_context_ptr ctx;

        ggml_tensor *           t  [n_signal] = {};
        ggml_backend_buffer_ptr buf[n_signal];

        void clear() const {
            for (int s = 0; s < n_signal; ++s) {
                if (buf[s]) {
                    ggml_backend_buffer_clear(buf[s].get(), 1u << s == LLAMA_KVTOOL_SIGNAL_IMPORTANT ? never_byte : 0);
                }
            }
        }
    };

    // four of these bytes are a float of -1.3e20, which stays the same when a ubatch is taken off
    static constexpr uint8_t never_byte = 0xE0;

    std::vector<device_sums> devices;

    int  n_query_device = 0;     // queries since the devices' sums were cleared
    bool recent_anew    = false; // whether one of these ubatches had n_query queries or more

    std::vector<uint8_t> buf_graph;

    // terms of a merge are added up in levels: its first two, two more, then four, eight, ...
    static constexpr int n_level = 30;

    static constexpr int64_t level_first(int level) { return level == 0 ? 0 : int64_t(1) << level; }
    static constexpr int64_t level_width(int level) { return level == 0 ? 2 : int64_t(1) << level; }

    // how much there is in a layer's part of an edit's graph: where that is the same the graph is
    struct layer_shape {
        int64_t n_moves = 0; // keys that move
        int64_t n_turns = 0; // keys that turn, and perhaps move
        int64_t n_moved = 0; // values that move

        std::array<int64_t, n_level> n_merged = {}; // values that are merged, of terms on each level

        bool shared = false; // values move by the keys' list
    };

    // a graph that a worker keeps as well, to be sent by its number: its server has one for each device, and that of the
    // device where the layers lie is the decode's
    struct kept_graph {
        ggml_backend_buffer_type_t buft; // of the device where the layers lie

        ggml_backend_ptr backend; // of the spare
        ggml_gallocr_ptr alloc;
        ggml_context_ptr ctx;

        ggml_cgraph * gf = nullptr;

        std::vector<ggml_tensor *> inputs;
        std::vector<ggml_tensor *> outputs;

        std::vector<layer_shape> shapes;

        bool unfit = false; // a part of it lies elsewhere

        void clear() {
            gf = nullptr;
            inputs.clear();
            outputs.clear();
            shapes.clear();
        }
    };

    enum kept_use { KEPT_EDITS, KEPT_KEYS, n_kept };

    std::map<ggml_backend_buffer_type_t, std::array<kept_graph, n_kept>> kept;

    static constexpr int64_t n_vain_node = 128; // bytes for each of a kept graph's nodes that may be sent in vain

    // layers that one graph is for; kept: null for the scheduler's
    struct part {
        std::vector<size_t> layers;

        kept_graph * kept;

        // of a layer's part of a list: 256 is enough for every device
        size_t align() const {
            return kept ? ggml_backend_buft_get_alignment(kept->buft) : 256;
        }
    };

    // null where the layer's device has no spares
    kept_graph * kept_of(const layer & l, kept_use use) {
        const auto buft = ggml_backend_buffer_get_type(l.k->buffer);

        spare_devices spares;
        {
            std::lock_guard<std::mutex> lock(g_spares_mutex);
            const auto it = g_spares.find(ggml_backend_buft_get_device(buft));
            if (it == g_spares.end()) {
                return nullptr;
            }
            spares = it->second;
        }

        auto & res = kept[buft][use];
        if (!res.backend) {
            res.buft = buft;
            res.backend.reset(ggml_backend_dev_init(spares[use], nullptr));
            res.alloc  .reset(ggml_gallocr_new(buft));
        }

        return res.backend && !res.unfit ? &res : nullptr;
    }

    std::vector<part> parts(kept_use use) {
        std::vector<part> res;
        for (size_t i = 0; i < layers.size(); ++i) {
            auto * graph = kept_of(layers[i], use);

            auto it = std::find_if(res.begin(), res.end(), [&](const part & p) { return p.kept == graph; });
            if (it == res.end()) {
                it = res.insert(it, { {}, graph });
            }
            it->layers.push_back(i);
        }
        return res;
    }

    static part all_of(const std::vector<layer> & layers) {
        part res = { std::vector<size_t>(layers.size()), nullptr };
        std::iota(res.layers.begin(), res.layers.end(), 0);
        return res;
    }

    // the cache of the layers that attend to everything
    static llama_kv_cache * cache(const llama_context & lctx) {
        if (auto * both = dynamic_cast<llama_kv_cache_iswa *>(lctx.memory.get())) {
            return both->get_base();
        }
        return dynamic_cast<llama_kv_cache *>(lctx.memory.get());
    }

    // that of the sliding layers, null if there are none
    static llama_kv_cache * sliding_cache(const llama_context & lctx) {
        auto * both = dynamic_cast<llama_kv_cache_iswa *>(lctx.memory.get());
        return both ? both->get_swa() : nullptr;
    }

    const layer * find(int il) const {
        const auto it = std::find_if(layers.begin(), layers.end(), [&](const layer & l) { return l.il == il; });
        return it == layers.end() ? nullptr : &*it;
    }

    // keys that do not come from the cache belong to an encoder or to cross-attention
    bool has_keys(const ggml_tensor * k) const {
        return std::any_of(layers.begin(), layers.end(), [&](const layer & l) { return l.k == k->view_src; });
    }

    // empty if the context can be used
    static std::string unsupported(const llama_context & lctx) {
        const auto & hparams = lctx.model.hparams;

        const llama_kv_cache * kv = cache(lctx);

        if (!kv) {
            return "this model has no plain KV cache (recurrent or hybrid memory)";
        }
        if (kv->layers.empty()) {
            return "all layers of this model attend through a sliding window";
        }
        for (const llama_kv_cache * one : { kv, (const llama_kv_cache *) sliding_cache(lctx) }) {
            if (one && one->other) {
                return "this model shares the KV cache of another context";
            }
            if (one && one->map_layer_ids.size() != one->layers.size()) {
                return "layers of this model share keys and values";
            }
        }
        if (kv->n_stream != 1) {
            return "the context must have one sequence (n_seq_max = 1)";
        }
        if (hparams.is_mla()) {
            return "this model compresses its KV cache (MLA)";
        }
        if (hparams.use_alibi) {
            return "this model biases attention by position (ALiBi)";
        }
        if (hparams.n_pos_per_embd() > 1) {
            return "this model has several positions a token (M-RoPE)";
        }
        for (const auto & layer : kv->layers) {
            if (!layer.k || !layer.v) {
                return "a layer of this model has no keys or no values in its KV cache";
            }
        }

        return {};
    }

    static llama_kvtool * get(const llama_context * ctx) {
        if (!ctx || !ctx->kvtool) {
            g_error = "call llama_kvtool_enable on this context first";
            return nullptr;
        }
        return ctx->kvtool.get();
    }

    bool has(int signal) const {
        return params.signals >> signal & 1;
    }

    static std::string invalid(const llama_kvtool_params & params) {
        if (params.signals >> n_signal) {
            return format("unknown signals %u", params.signals);
        }
        if (params.group > LLAMA_KVTOOL_GROUP_FIRST) {
            return format("unknown group %u", params.group);
        }
        if (params.n_query < 1) {
            return format("n_query = %d must be at least 1", params.n_query);
        }

        return {};
    }

    static int32_t enable(llama_context & lctx, const llama_kvtool_params & params) {
        auto why = invalid(params);
        if (why.empty()) {
            why = unsupported(lctx);
        }
        if (!why.empty()) {
            return fail(why);
        }

        const auto & hparams = lctx.model.hparams;

        auto * kv = cache(lctx);

        const uint32_t n_cell = kv->layers[0].k->ne[1];
        for (const auto & layer : kv->layers) {
            if (!params.ragged && (uint32_t) layer.k->ne[1] != n_cell) {
                return fail("the layers have different numbers of cells, and rows are not ragged");
            }
        }

        lctx.synchronize();

        lctx.memory->clear(false);
        if (!params.ragged && kv->v_cells[0].size() != n_cell) {
            // rows that were ragged have sizes of their own, which the table does not know
            kv->v_cells[0].resize(n_cell);
        }

        auto res = std::make_shared<llama_kvtool>();

        res->params  = params;
        res->v_trans = kv->v_trans;

        for (const auto & layer : kv->layers) {
            const int n_head = hparams.n_head_kv(layer.il);

            res->layers.push_back({ (int) layer.il, n_head, res->n_row, (int) layer.k->ne[1], layer.k, layer.v });
            res->layer_of_row.insert(res->layer_of_row.end(), n_head, layer.il);
            res->n_row += n_head;
        }
        if (const auto * window = sliding_cache(lctx)) {
            for (const auto & layer : window->layers) {
                res->sliding.push_back({ (int) layer.il, (int) hparams.n_head_kv(layer.il), 0, (int) layer.k->ne[1], layer.k, layer.v });
            }
        }

        res->live.resize(res->n_row);
        for (int s = 0; s < n_signal; ++s) {
            res->staging[s].resize(res->layers.size());
        }
        res->size_signals();

        lctx.kvtool         = std::move(res);
        lctx.cparams.kvtool = lctx.kvtool.get();

        lctx.sched_need_reserve = true;

        return lctx.kvtool->n_row;
    }

    void size_signals() {
        for (int s = 0; s < n_signal; ++s) {
            if (has(s)) {
                signals[s].resize(n_row);
                for (const auto & l : layers) {
                    for (int row = l.row_0; row < l.row_0 + l.n_head; ++row) {
                        signals[s][row].resize(l.n_cell);
                    }
                }
            }
        }
        devices.clear();
        if (params.signals && !size_device_sums()) {
            // no memory there: the host adds up
            devices.clear();
            for (auto & l : layers) {
                l.device = -1;
            }
        }
    }

    bool size_device_sums() {
        for (auto & l : layers) {
            l.device = -1;
            if (ggml_backend_buffer_is_host(l.k->buffer)) {
                continue;
            }
            const auto buft = ggml_backend_buffer_get_type(l.k->buffer);

            auto it = std::find_if(devices.begin(), devices.end(), [&](const device_sums & d) { return d.buft == buft; });
            if (it == devices.end()) {
                it = devices.emplace(it);
                it->buft = buft;
            }
            l.device = it - devices.begin();
            l.first  = it->n;
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

    // add a ubatch's signal [n_kv, 1, n_head] to the sums on the device; null if the host adds up
    ggml_tensor * build_sum(ggml_context * ctx, int il, int s, ggml_tensor * t, int64_t n_tokens) const {
        const auto & l = *find(il);

        if (l.device < 0) {
            return nullptr;
        }
        GGML_ASSERT(t->ne[0] <= l.n_cell);

        const size_t stride = l.n_cell*sizeof(float);

        ggml_tensor * sum = ggml_view_3d(ctx, devices[l.device].t[s], t->ne[0], 1, l.n_head, stride, stride, l.first*sizeof(float));

        switch (1u << s) {
            case LLAMA_KVTOOL_SIGNAL_LAST:
                return ggml_cpy(ctx, t, sum);
            case LLAMA_KVTOOL_SIGNAL_RECENT:
                return n_tokens >= params.n_query ? ggml_cpy(ctx, t, sum) : ggml_add_inplace(ctx, sum, t);
            case LLAMA_KVTOOL_SIGNAL_IMPORTANT: {
                // counted back from the ubatch's end, so that nothing changes from step to step
                ggml_tensor * before = ggml_mul(ctx, sum, ggml_scale_bias(ctx, ggml_step(ctx, t), -1.0f, 1.0f));
                return ggml_cpy(ctx, ggml_scale_bias(ctx, ggml_add(ctx, before, t), 1.0f, -n_tokens), sum);
            }
            default:
                return ggml_add_inplace(ctx, sum, t);
        }
    }

    int64_t n_bytes() const {
        int64_t res = 0;
        for (const auto * some : { &layers, &sliding }) {
            for (const auto & l : *some) {
                res += ggml_nbytes(l.k) + ggml_nbytes(l.v);
            }
        }
        return res;
    }

    int32_t n_dim() const {
        int32_t res = 0;
        for (const auto & l : layers) {
            res = std::max<int32_t>(res, l.k->ne[0]/l.n_head);
        }
        return res;
    }

    void extract(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens) {
        fold(lctx);

        bool staged = false;

        for (const auto & probe : graph.probes) {
            const auto * l = find(probe.il);
            GGML_ASSERT(l);

            for (int s = 0; s < n_signal; ++s) {
                if (ggml_tensor * t = probe.t[s]) {
                    auto & dst = staging[s][l - layers.data()];
                    dst.resize(ggml_nelements(t));
                    staged = true;

                    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(lctx.sched.get(), t);
                    ggml_backend_tensor_get_async(backend, t, dst.data(), 0, ggml_nbytes(t));
                }
            }
        }

        // nothing to wait for where no signal is on its way
        (staged ? n_query_staged : n_done) += n_tokens;

        if (!graph.probes.empty() && !devices.empty()) {
            n_query_device += n_tokens;
            recent_anew = recent_anew || n_tokens >= params.n_query;
        }

        if (params.ragged) {
            for (int32_t & n : live) {
                n += n_tokens;
            }
        }
        n_seen += n_tokens;
    }

    // add what the last ubatch has left
    void fold(llama_context & lctx) {
        if (n_query_staged == 0) {
            return;
        }

        lctx.synchronize();

        for (int s = 0; s < n_signal; ++s) {
            for (size_t i = 0; has(s) && i < layers.size(); ++i) {
                const auto & l = layers[i];

                if (l.device >= 0) {
                    continue;
                }

                const size_t n = std::min<size_t>(staging[s][i].size()/l.n_head, l.n_cell);

                for (int head = 0; head < l.n_head; ++head) {
                    fold(s, staging[s][i].data() + head*(staging[s][i].size()/l.n_head), signals[s][l.row_0 + head].data(), n);
                }
            }
        }

        n_done += n_query_staged;
        n_query_staged = 0;
    }

    void fold(int s, const float * src, float * dst, size_t n) const {
        const uint32_t signal = 1u << s;

        const bool newest =
            signal == LLAMA_KVTOOL_SIGNAL_LAST || (signal == LLAMA_KVTOOL_SIGNAL_RECENT && n_query_staged >= params.n_query);

        if (newest) {
            std::copy(src, src + n, dst);
        } else if (signal == LLAMA_KVTOOL_SIGNAL_IMPORTANT) {
            for (size_t i = 0; i < n; ++i) {
                dst[i] = src[i] > 0.0f ? n_done + src[i] : dst[i];
            }
        } else {
            for (size_t i = 0; i < n; ++i) {
                dst[i] += src[i];
            }
        }
    }

    // the same, and what has added up on devices
    void collect(llama_context & lctx) {
        fold(lctx);

        if (n_query_device == 0) {
            return;
        }

        lctx.synchronize();

        const int n_before = n_done - n_query_device;

        std::vector<float> tmp;

        for (size_t i = 0; i < devices.size(); ++i) {
            for (int s = 0; s < n_signal; ++s) {
                if (!has(s)) {
                    continue;
                }
                tmp.resize(devices[i].n);
                ggml_backend_tensor_get(devices[i].t[s], tmp.data(), 0, tmp.size()*sizeof(float));

                for (const auto & l : layers) {
                    for (int head = 0; head < l.n_head && l.device == (int) i; ++head) {
                        collect(s, tmp.data() + l.first + (size_t) head*l.n_cell, signals[s][l.row_0 + head], n_before);
                    }
                }
            }
        }

        clear_devices();
    }

    void collect(int s, const float * src, std::vector<float> & dst, int n_before) const {
        const uint32_t signal = 1u << s;

        for (size_t i = 0; i < dst.size(); ++i) {
            if (signal == LLAMA_KVTOOL_SIGNAL_LAST || (signal == LLAMA_KVTOOL_SIGNAL_RECENT && recent_anew)) {
                dst[i] = src[i];
            } else if (signal == LLAMA_KVTOOL_SIGNAL_IMPORTANT) {
                const float at = src[i] + n_query_device;
                dst[i] = at > 0.0f ? n_before + at : dst[i];
            } else {
                dst[i] += src[i];
            }
        }
    }

    void clear_devices() {
        if (n_query_device > 0) {
            for (const auto & d : devices) {
                d.clear();
            }
        }
        n_query_device = 0;
        recent_anew    = false;
    }

    void clear_signals(llama_context & lctx) {
        if (n_query_staged > 0 || n_query_device > 0) {
            lctx.synchronize();
            n_query_staged = 0;
        }
        clear_devices();
        n_done = 0;
        for (auto & rows : signals) {
            for (auto & row : rows) {
                std::fill(row.begin(), row.end(), 0.0f);
            }
        }
    }

    // which cells of each row an edit writes to
    struct writes {
        writes(int n_row, int n_cell) : n_cell(n_cell), seen((size_t) n_row*n_cell) {}

        bool first(int row, int cell) {
            auto ref = seen[(size_t) row*n_cell + cell];
            if (ref) {
                return false;
            }
            ref = true;
            return true;
        }

        int n_cell;
        std::vector<bool> seen;
    };

    int most_cells() const {
        int res = 0;
        for (const auto & l : layers) {
            res = std::max(res, l.n_cell);
        }
        return res;
    }

    int most_live(const layer & l) const {
        return *std::max_element(live.begin() + l.row_0, live.begin() + l.row_0 + l.n_head);
    }

    std::vector<int> row_cells() const {
        std::vector<int> res;
        for (const auto & l : layers) {
            res.insert(res.end(), l.n_head, l.n_cell);
        }
        return res;
    }

    std::string invalid(const llama_kvtool_edit & edit) const {
        if (edit.n_move < 0 || (edit.n_move > 0 && !edit.moves) || edit.n_term < 0 || (edit.n_term > 0 && !edit.terms)) {
            return "missing moves or terms";
        }
        const int n_most = most_cells();

        if (edit.n_keep < 0 || edit.n_keep > n_most) {
            return format("n_keep = %d is not in 0..%d", edit.n_keep, n_most);
        }
        if (edit.pos_0 < 0 || edit.pos_0 > INT32_MAX - n_most) {
            return format("pos_0 = %d is not in 0..%d", edit.pos_0, INT32_MAX - n_most);
        }
        if (params.ragged != (edit.n_keep_row != nullptr)) {
            return params.ragged ? "ragged rows need n_keep_row" : "n_keep_row is for ragged rows only";
        }
        if (edit.n_hidden < 0 || edit.n_hidden > (params.ragged ? 0 : edit.n_keep)) {
            return format("n_hidden = %d is not in 0..%d", edit.n_hidden, params.ragged ? 0 : edit.n_keep);
        }

        const auto n_cell = row_cells();

        for (int row = 0; params.ragged && row < n_row; ++row) {
            const int n = std::min(edit.n_keep, n_cell[row]);
            if (edit.n_keep_row[row] < 0 || edit.n_keep_row[row] > n) {
                return format("row %d: n_keep = %d is not in 0..%d", row, edit.n_keep_row[row], n);
            }
        }

        const auto inside = [&](int row, int dst, int src) {
            return row >= 0 && row < n_row && dst >= 0 && dst < n_cell[row] && src >= 0 && src < n_cell[row];
        };

        writes moved(n_row, n_most);

        for (int i = 0; i < edit.n_move; ++i) {
            const auto & m = edit.moves[i];
            if (!inside(m.row, m.dst, m.src)) {
                return format("move %d: row %d of %d, cells %d <- %d of %d", i, m.row, n_row, m.dst, m.src, n_most);
            }
            if (!moved.first(m.row, m.dst)) {
                return format("move %d: cell %d of row %d is written twice", i, m.dst, m.row);
            }
        }

        writes merged(n_row, n_most);

        for (int i = 0; i < edit.n_term; ++i) {
            const auto & t = edit.terms[i];
            if (!inside(t.row, t.dst, t.src) || !std::isfinite(t.weight)) {
                return format("term %d: row %d of %d, cells %d <- %d of %d, weight %f", i, t.row, n_row, t.dst, t.src, n_most, t.weight);
            }
            const bool goes_on = i > 0 && edit.terms[i - 1].row == t.row && edit.terms[i - 1].dst == t.dst;
            if (!goes_on && !merged.first(t.row, t.dst)) {
                return format("term %d: the terms of row %d, cell %d are not neighbours", i, t.row, t.dst);
            }
        }

        return {};
    }

    // an edit sorted by layer
    struct layer_edit {
        std::vector<llama_kvtool_move> moves; // delta == 0, src != dst
        std::vector<llama_kvtool_move> turns; // delta != 0

        std::vector<llama_kvtool_term> terms;
    };

    static bool is_rotary(const llama_hparams & hparams, const layer & l) {
        return hparams.rope_type != LLAMA_ROPE_TYPE_NONE && hparams.has_rope(l.il);
    }

    std::vector<layer_edit> by_layer(const llama_hparams & hparams, const llama_kvtool_edit & edit) const {
        std::vector<layer_edit> res(layers.size());
        std::vector<int>        index(n_row);

        for (size_t i = 0; i < layers.size(); ++i) {
            std::fill_n(index.begin() + layers[i].row_0, layers[i].n_head, (int) i);
        }

        for (int i = 0; i < edit.n_move; ++i) {
            const auto & m = edit.moves[i];

            const int at = index[m.row];

            if (m.delta != 0 && is_rotary(hparams, layers[at])) {
                res[at].turns.push_back(m);
            } else if (m.src != m.dst) {
                res[at].moves.push_back(m);
            }
        }
        for (int i = 0; i < edit.n_term; ++i) {
            res[index[edit.terms[i].row]].terms.push_back(edit.terms[i]);
        }

        return res;
    }

    // a tensor in host memory: each value of a row is n pieces of n_one elements
    struct host_view {
        ggml_tensor * t;

        int     row_0;
        int     n;
        int64_t n_one;

        size_t stride_cell;
        size_t stride_head;
        size_t stride_piece;

        size_t size() const {
            return ggml_row_size(t->type, n_one);
        }

        uint8_t * at(int row, int cell, int i) const {
            return (uint8_t *) t->data + cell*stride_cell + (row - row_0)*stride_head + i*stride_piece;
        }
    };

    // f(first, last) for each row's part of the list
    template <typename T, typename F>
    static void by_row(const std::vector<T> & list, F && f) {
        const auto before = [](const T & a, const T & b) { return a.row < b.row; };

        if (!std::is_sorted(list.begin(), list.end(), before)) {
            auto sorted = list;
            std::stable_sort(sorted.begin(), sorted.end(), before);
            return by_row(sorted, f);
        }
        for (auto first = list.begin(); first != list.end(); ) {
            const auto last = std::find_if(first, list.end(), [&](const T & x) { return x.row != first->row; });
            f(first, last);
            first = last;
        }
    }

    // a row's cells piece by piece, so that what is written lies near what is read
    // SIZE: of a piece, 0: known only now. A copy of 2 bytes, as transposed values need, takes less than a call
    template <size_t SIZE>
    struct pieces {
        const host_view & view;

        size_t size()   const { return SIZE ? SIZE : view.size(); }
        size_t stride() const { return SIZE ? SIZE : view.stride_cell; }

        // piece i of these cells, one every step bytes of a list
        void get(int row, const std::vector<int32_t> & cells, int i, uint8_t * list, size_t step) const {
            const uint8_t * from = view.at(row, 0, i);
            for (const int32_t cell : cells) {
                memcpy(list, from + cell*stride(), size());
                list += step;
            }
        }

        void set(int row, const std::vector<int32_t> & cells, int i, const uint8_t * list, size_t step) const {
            uint8_t * to = view.at(row, 0, i);
            for (const int32_t cell : cells) {
                memcpy(to + cell*stride(), list, size());
                list += step;
            }
        }
    };

    template <typename F>
    static void with_pieces(const host_view & view, F && f) {
        if (view.stride_cell == 2 && view.size() == 2) {
            f(pieces<2> { view });
        } else {
            f(pieces<0> { view });
        }
    }

    template <typename P>
    static void move_host(const std::vector<llama_kvtool_move> & moves, const P & pieces) {
        std::vector<int32_t> src;
        std::vector<int32_t> dst;
        std::vector<uint8_t> raw;

        const size_t size = pieces.size();

        by_row(moves, [&](auto first, auto last) {
            src.clear();
            dst.clear();
            for (auto m = first; m != last; ++m) {
                src.push_back(m->src);
                dst.push_back(m->dst);
            }
            raw.resize(src.size()*size);

            for (int i = 0; i < pieces.view.n; ++i) {
                pieces.get(first->row, src, i, raw.data(), size);
                pieces.set(first->row, dst, i, raw.data(), size);
            }
        });
    }

    template <typename P>
    static void merge_host(const std::vector<llama_kvtool_term> & terms, const P & pieces) {
        const auto & view   = pieces.view;
        const auto & traits = *ggml_get_type_traits(view.t->type);

        const size_t  size   = pieces.size();
        const size_t  n_byte = size*view.n;
        const int64_t n_embd = view.n_one*view.n;

        std::vector<int32_t> src;
        std::vector<int32_t> dst;
        std::vector<uint8_t> raw;
        std::vector<float>   x;
        std::vector<float>   sum;

        by_row(terms, [&](auto first, auto last) {
            src.clear();
            dst.clear();
            for (auto t = first; t != last; ++t) {
                src.push_back(t->src);
                if (t == first || t->dst != dst.back()) {
                    dst.push_back(t->dst);
                }
            }

            raw.resize(src.size()*n_byte);
            x  .resize(src.size()*n_embd);

            // value after value, whatever they are in the cache
            for (int i = 0; i < view.n; ++i) {
                pieces.get(first->row, src, i, raw.data() + i*size, n_byte);
            }
            if (traits.to_float) {
                traits.to_float(raw.data(), x.data(), x.size());
            } else {
                memcpy(x.data(), raw.data(), raw.size());
            }

            sum.assign(dst.size()*n_embd, 0.0f);

            float * to = sum.data();
            for (size_t j = 0; j < src.size(); ++j) {
                to += j > 0 && first[j].dst != first[j - 1].dst ? n_embd : 0;

                const float   weight = first[j].weight;
                const float * from   = x.data() + j*n_embd;
                for (int64_t k = 0; k < n_embd; ++k) {
                    to[k] += weight*from[k];
                }
            }

            if (traits.from_float_ref) {
                traits.from_float_ref(sum.data(), raw.data(), sum.size());
            } else {
                memcpy(raw.data(), sum.data(), sum.size()*sizeof(float));
            }
            for (int i = 0; i < view.n; ++i) {
                pieces.set(first->row, dst, i, raw.data() + i*size, n_byte);
            }
        });
    }

    // inputs of an edit's graph: filled on the host first, one tensor a kind for all layers
    struct input {
        ggml_type type;

        std::vector<uint8_t> data;

        ggml_tensor * t = nullptr;

        // each layer's part starts at a multiple of what devices want views to be aligned to
        size_t start(size_t align) {
            data.resize(GGML_PAD(data.size(), align));
            return data.size();
        }

        template <typename T> void push(T value) {
            const auto * bytes = (const uint8_t *) &value;
            data.insert(data.end(), bytes, bytes + sizeof(T));
        }

        void create(ggml_context * ctx) {
            if (!data.empty()) {
                t = ggml_new_tensor_1d(ctx, type, data.size()/ggml_type_size(type));
                ggml_set_input(t);
            }
        }

        void upload() const {
            if (t && t->buffer) {
                ggml_backend_tensor_set(t, data.data(), 0, data.size());
            }
        }

        ggml_tensor * view(ggml_context * ctx, size_t start, int64_t n) const {
            return ggml_view_1d(ctx, t, n, start);
        }
    };

    // graph inputs and where each layer's part of them starts
    struct graph_inputs {
        input idx_src { GGML_TYPE_I32, {}, nullptr }; // rows to gather
        input idx_dst { GGML_TYPE_I32, {}, nullptr }; // rows to write
        input delta   { GGML_TYPE_I32, {}, nullptr };
        input weight  { GGML_TYPE_F32, {}, nullptr };
        input rot     { GGML_TYPE_F32, {}, nullptr };
    };

    struct layer_inputs {
        size_t k_src = 0, k_dst_moves = 0, k_dst_turns = 0, k_delta = 0;
        size_t v_src = 0, v_dst = 0;
        size_t m_dst = 0, m_src[n_level] = {}, m_weight[n_level] = {};
    };

    int32_t apply(llama_context & lctx, const llama_kvtool_edit & edit) {
        const auto why = invalid(edit);
        if (!why.empty()) {
            return fail(why);
        }

        auto * kv = cache(lctx);

        lctx.synchronize();

        const auto edits = by_layer(lctx.model.hparams, edit);

        bool host  = !edit.force_graph;
        bool turns = false;

        for (size_t i = 0; i < layers.size(); ++i) {
            host  = host && ggml_backend_buffer_is_host(layers[i].k->buffer) && ggml_backend_buffer_is_host(layers[i].v->buffer);
            turns = turns || !edits[i].turns.empty();
        }

        const bool k_host = host && !turns;

        for (const auto & p : k_host ? std::vector<part>() : parts(KEPT_EDITS)) {
            if (!edit_graph(lctx, *kv, layers, p, edits, true, !host)) {
                return fail("the device failed to edit the cache");
            }
        }
        if (!slide(lctx, edit)) {
            return fail("the device failed to turn the keys of sliding layers");
        }

        edit_host(lctx, edits, k_host, host);

        if (params.ragged) {
            std::copy(edit.n_keep_row, edit.n_keep_row + n_row, live.begin());
            // llama.cpp's table has one token, the newest: rows have their own masks
            fill_table(*kv, edit.n_keep > 0, edit.pos_0 + edit.n_keep - 1);
        } else {
            fill_table(*kv, edit.n_keep, edit.pos_0, edit.n_hidden);
        }

        clear_signals(lctx);

        return 0;
    }

    // all layers have one position a token: where it jumps, the tokens of sliding layers go along
    bool slide(llama_context & lctx, const llama_kvtool_edit & edit) {
        auto * kv = sliding_cache(lctx);

        if (!kv) {
            return true;
        }
        if (edit.n_keep == edit.n_hidden) {
            kv->clear(false);
            return true;
        }

        auto & cells = kv->v_cells[0];

        const int delta = edit.pos_0 + edit.n_keep - 1 - cells.seq_pos_max(0);

        if (delta == 0 || cells.get_used() == 0) {
            return true;
        }

        std::vector<layer_edit> edits(sliding.size());

        for (uint32_t c = 0; c < cells.size(); ++c) {
            // what would come before position 0 is lost
            if (cells.is_empty(c) || cells.pos_add(c, delta)) {
                continue;
            }
            for (size_t i = 0; i < sliding.size(); ++i) {
                for (int head = 0; head < sliding[i].n_head && is_rotary(lctx.model.hparams, sliding[i]); ++head) {
                    edits[i].turns.push_back({ head, (int) c, (int) c, delta });
                }
            }
        }
        cells.reset_shift();

        return edit_graph(lctx, *kv, sliding, all_of(sliding), edits, true, false);
    }

    // hidden cells are in use by a sequence that has no queries
    static void fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden = 0) {
        auto & cells = kv.v_cells[0];

        const llama_pos last = pos_0 + n - 1;

        // all but the last stay as they are where that puts them before it, as evictions do: made anew, the
        // table's sets and maps cost as much as the moves of a few cells
        bool stay = n > 0;
        for (int i = 0; stay && i < n - 1; ++i) {
            stay = !cells.is_empty(i) && cells.seq_has(i, i < n_hidden) && cells.pos_get(i) < last;
        }
        if (stay) {
            for (int i = cells.used_max_p1() - 1; i >= n - 1; --i) {
                if (!cells.is_empty(i)) {
                    cells.rm(i);
                }
            }
        } else {
            cells.reset();
        }
        for (int i = stay ? n - 1 : 0; i < n; ++i) {
            cells.pos_set(i, pos_0 + i);
            cells.seq_add(i, i < n_hidden);
        }
        kv.v_heads[0] = n;
    }

    void edit_host(
            const llama_context & lctx, const std::vector<layer_edit> & edits, bool with_k, bool with_v) const {
        const auto & hparams = lctx.model.hparams;

        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = layers[i];

            if (with_k) {
                const int64_t n_embd = hparams.n_embd_head_k(l.il);
                const size_t  size   = ggml_row_size(l.k->type, n_embd);

                with_pieces({ l.k, l.row_0, 1, n_embd, l.k->nb[1], size, 0 }, [&](const auto & pieces) {
                    move_host(edits[i].moves, pieces);
                });
            }
            if (with_v) {
                const int64_t n_embd = hparams.n_embd_head_v(l.il);
                const size_t  size   = ggml_row_size(l.v->type, n_embd);
                const size_t  one    = ggml_type_size(l.v->type);

                const host_view view = v_trans
                    ? host_view { l.v, l.row_0, (int) n_embd, 1, one, n_embd*l.n_cell*one, l.n_cell*one }
                    : host_view { l.v, l.row_0, 1, n_embd, l.v->nb[1], size, 0 };

                with_pieces(view, [&](const auto & pieces) {
                    merge_host(edits[i].terms, pieces);
                    move_host(values_moved(edits[i]), pieces);
                });
            }
        }
    }

    // a key that turns in its place moves no value
    static std::vector<llama_kvtool_move> values_moved(const layer_edit & edit) {
        auto res = edit.moves;
        std::copy_if(edit.turns.begin(), edit.turns.end(), std::back_inserter(res),
                [](const llama_kvtool_move & m) { return m.src != m.dst; });
        return res;
    }

    // where the terms of each value that is merged begin, and how many these are
    struct merge {
        size_t  first;
        int64_t n_term;
    };

    // those with the most terms come first
    static std::vector<merge> merges_of(const std::vector<llama_kvtool_term> & terms) {
        std::vector<merge> res;
        for (size_t t = 0; t < terms.size(); ++t) {
            if (t > 0 && terms[t - 1].row == terms[t].row && terms[t - 1].dst == terms[t].dst) {
                ++res.back().n_term;
            } else {
                res.push_back({ t, 1 });
            }
        }
        std::stable_sort(res.begin(), res.end(), [](const merge & a, const merge & b) { return a.n_term > b.n_term; });
        return res;
    }

    layer_shape shape_of(const layer_edit & e, bool with_k, bool with_v) const {
        layer_shape res;

        if (with_k) {
            res.n_moves = e.moves.size();
            res.n_turns = e.turns.size();
        }
        if (with_v) {
            res.n_moved = values_moved(e).size();
            for (const auto & m : merges_of(e.terms)) {
                for (int i = 0; i < n_level && m.n_term > level_first(i); ++i) {
                    ++res.n_merged[i];
                }
            }
        }
        // where they lie as keys do, which they do not transposed
        res.shared = with_k && with_v && !v_trans && res.n_turns == 0;

        return res;
    }

    // lists that are one longer the next time shall not need another graph for that
    static int64_t rounded_up(int64_t n) {
        int64_t step = 16;
        while (step*16 <= n) {
            step *= 2;
        }
        return GGML_PAD(n, step);
    }

    // bytes of a layer's lists
    int64_t list_bytes(const layer & l, const layer_shape & s) const {
        const int64_t n_part = v_trans ? l.v->ne[0]/l.n_head : 1;

        int64_t res = 8*s.n_moves + 12*s.n_turns + (s.shared ? 0 : 8*n_part*s.n_moved) + 4*n_part*s.n_merged[0];
        for (int i = 0; i < n_level; ++i) {
            res += (4*n_part + 4)*level_width(i)*s.n_merged[i];
        }
        return res;
    }

    static constexpr int64_t layer_shape::* list_lengths[] = { &layer_shape::n_moves, &layer_shape::n_turns, &layer_shape::n_moved };

    // how long a list must be to hold n where the last entry is repeated: an empty one has none
    static bool holds(int64_t room, int64_t n) {
        return n == 0 ? room == 0 : n <= room;
    }

    // on a level where all have terms, those that are repeated have them too
    static int64_t merged_on(const layer_shape & s, int level, int64_t n_all) {
        return s.n_merged[level] == s.n_merged[0] ? n_all : s.n_merged[level];
    }

    static bool holds(const layer_shape & room, const layer_shape & s) {
        bool res = holds(room.n_merged[0], s.n_merged[0]);
        for (const auto n : list_lengths) {
            res = res && holds(room.*n, s.*n);
        }
        for (int i = 1; i < n_level; ++i) {
            res = res && merged_on(s, i, room.n_merged[0]) <= room.n_merged[i];
        }
        return res;
    }

    // what a new graph shall have room for, that of the one before it included; null: there is none before
    static std::vector<layer_shape> rooms(std::vector<layer_shape> shapes, const std::vector<layer_shape> * before) {
        std::array<int64_t, n_level> n_merged = {};

        for (size_t i = 0; i < shapes.size(); ++i) {
            auto & s = shapes[i];

            const layer_shape old = before ? (*before)[i] : layer_shape();

            for (const auto n : list_lengths) {
                s.*n = s.*n == 0 ? 0 : std::max(rounded_up(s.*n), old.*n);
            }
            if (s.shared) {
                s.n_moved = s.n_moves;
            }

            const int64_t n_all = s.n_merged[0] == 0 ? 0 : std::max(rounded_up(s.n_merged[0]), old.n_merged[0]);
            for (int j = n_level - 1; j >= 0; --j) {
                s.n_merged[j] = merged_on(s, j, n_all);
                n_merged[j] = std::max({ n_merged[j], s.n_merged[j], old.n_merged[j] });
            }
        }
        // what one layer has of long merges the others have another time
        for (auto & s : shapes) {
            for (int j = 1; j < n_level; ++j) {
                s.n_merged[j] = std::min(s.n_merged[0], room_for_merges(n_merged[j]));
            }
        }

        return shapes;
    }

    // gives lists the lengths that the kept graph has, or forgets it and gives them those that a new one shall have
    void fit(const std::vector<layer> & layers, const part & p, std::vector<layer_shape> & shapes) const {
        auto & kept = *p.kept;

        auto fresh = rooms(shapes, nullptr);

        bool    fits   = kept.gf;
        int64_t n_vain = 0;

        for (size_t i = 0; kept.gf && i < shapes.size(); ++i) {
            const auto & l = layers[p.layers[i]];

            fits = fits && holds(kept.shapes[i], shapes[i]);
            n_vain += list_bytes(l, kept.shapes[i]) - list_bytes(l, fresh[i]);
        }

        // to send more than this in vain, again and again, is not worth what a new graph takes
        const bool large = kept.gf && n_vain > ggml_graph_n_nodes(kept.gf)*n_vain_node;

        if (fits && !large) {
            shapes = kept.shapes;
            return;
        }
        shapes = kept.gf && !large ? rooms(shapes, &kept.shapes) : std::move(fresh);
        kept.clear();
    }

    // long merges are few, now two and then five
    static int64_t room_for_merges(int64_t n) {
        int64_t res = n > 0 ? 4 : 0;
        while (res < n) {
            res *= 2;
        }
        return res;
    }

    // f(entry) n times, with the last entry again and again where there are fewer: to do the same twice changes nothing
    template <typename T, typename F>
    static void repeated(const std::vector<T> & list, int64_t n, F && f) {
        for (int64_t i = 0; i < n; ++i) {
            f(list[std::min<size_t>(i, list.size() - 1)]);
        }
    }

    graph_inputs fill_inputs(
            const llama_context & lctx, const std::vector<layer> & layers, const part & p, const std::vector<layer_edit> & edits,
            const std::vector<layer_shape> & shapes, std::vector<layer_inputs> & at) const {
        const auto & hparams = lctx.model.hparams;

        const size_t align = p.align();

        graph_inputs in;

        for (size_t i = 0; i < shapes.size(); ++i) {
            const auto & l = layers[p.layers[i]];
            const auto & e = edits [p.layers[i]];
            const auto & s = shapes[i];

            auto & a = at[i];

            const auto index = [&](int row, int cell) { return cell*l.n_head + row - l.row_0; };

            a.k_src       = in.idx_src.start(align);
            a.k_dst_moves = in.idx_dst.start(align);
            repeated(e.moves, s.n_moves, [&](const llama_kvtool_move & m) {
                in.idx_src.push<int32_t>(index(m.row, m.src));
                in.idx_dst.push<int32_t>(index(m.row, m.dst));
            });

            a.k_dst_turns = in.idx_dst.start(align);
            a.k_delta     = in.delta.start(align);
            repeated(e.turns, s.n_turns, [&](const llama_kvtool_move & m) {
                in.idx_src.push<int32_t>(index(m.row, m.src));
                in.idx_dst.push<int32_t>(index(m.row, m.dst));
                in.delta.push<int32_t>(m.delta);
            });

            // transposed, a value is n_embd elements that lie n_cell apart
            const int64_t n_embd = hparams.n_embd_head_v(l.il);

            const auto push = [&](input & list, int row, int cell) {
                if (!v_trans) {
                    list.push<int32_t>(index(row, cell));
                    return;
                }
                for (int64_t j = 0; j < n_embd; ++j) {
                    list.push<int32_t>(((row - l.row_0)*n_embd + j)*l.n_cell + cell);
                }
            };

            const auto merges = merges_of(e.terms);

            a.m_dst = in.idx_dst.start(align);
            repeated(merges, s.n_merged[0], [&](const merge & m) { push(in.idx_dst, e.terms[m.first].row, e.terms[m.first].dst); });

            for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
                a.m_src   [level] = in.idx_src.start(align);
                a.m_weight[level] = in.weight.start(align);
                repeated(merges, s.n_merged[level], [&](const merge & m) {
                    const auto & first = e.terms[m.first];
                    for (int64_t j = level_first(level); j < level_first(level) + level_width(level); ++j) {
                        const bool has = j < m.n_term;
                        push(in.idx_src, first.row, has ? e.terms[m.first + j].src : first.dst);
                        in.weight.push<float>(has ? e.terms[m.first + j].weight : 0.0f);
                    }
                });
            }

            if (s.shared) {
                a.v_src = a.k_src;
                a.v_dst = a.k_dst_moves;
                continue;
            }
            a.v_src = in.idx_src.start(align);
            a.v_dst = in.idx_dst.start(align);
            repeated(values_moved(e), s.n_moved, [&](const llama_kvtool_move & m) {
                push(in.idx_src, m.row, m.src);
                push(in.idx_dst, m.row, m.dst);
            });
        }

        return in;
    }

    // rotate keys [n_embd, n] by delta positions
    static ggml_tensor * build_turn(
            const llama_context & lctx, ggml_context * ctx, ggml_tensor * x, ggml_tensor * delta, ggml_tensor * rot, int il) {
        const auto & hparams = lctx.model.hparams;
        const auto & cparams = lctx.cparams;

        const float freq_base  = lctx.model.get_rope_freq_base (cparams, il);
        const float freq_scale = lctx.model.get_rope_freq_scale(cparams, il);

        // the key has its YaRN magnitude from its first rotation: this one must have none
        const float attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;

        x = ggml_reshape_3d(ctx, x, x->ne[0], 1, x->ne[1]);

        if (rot) {
            x = llama_mul_mat_hadamard(ctx, x, rot);
        }

        x = ggml_rope_ext(ctx, x, delta, lctx.model.get_rope_factors(cparams, il), hparams.n_rot(il), hparams.rope_type,
                cparams.n_ctx_orig_yarn, freq_base, freq_scale,
                cparams.yarn_ext_factor, attn_factor, cparams.yarn_beta_fast, cparams.yarn_beta_slow);

        if (rot) {
            x = llama_mul_mat_hadamard(ctx, x, rot);
        }

        return ggml_reshape_2d(ctx, x, x->ne[0], x->ne[2]);
    }

    static ggml_tensor * build_keys(
            const llama_context & lctx, ggml_context * ctx, const layer & l, const layer_shape & s,
            const graph_inputs & in, const layer_inputs & a, ggml_tensor * rot) {
        const int64_t n_moves = s.n_moves;
        const int64_t n_turns = s.n_turns;
        const int64_t n_embd  = l.k->ne[0]/l.n_head;

        ggml_tensor * k = ggml_reshape_2d(ctx, l.k, n_embd, l.n_head*l.k->ne[1]);

        // one gather for all, so that every key is read before one is written
        ggml_tensor * x = ggml_get_rows(ctx, k, in.idx_src.view(ctx, a.k_src, n_moves + n_turns));

        if (n_moves > 0) {
            ggml_tensor * moved = ggml_view_2d(ctx, x, n_embd, n_moves, x->nb[1], 0);
            k = ggml_set_rows(ctx, k, moved, in.idx_dst.view(ctx, a.k_dst_moves, n_moves));
        }
        if (n_turns > 0) {
            ggml_tensor * turned = ggml_view_2d(ctx, x, n_embd, n_turns, x->nb[1], n_moves*x->nb[1]);
            turned = build_turn(lctx, ctx, turned, in.delta.view(ctx, a.k_delta, n_turns), rot, l.il);
            k = ggml_set_rows(ctx, k, turned, in.idx_dst.view(ctx, a.k_dst_turns, n_turns));
        }

        return k;
    }

    ggml_tensor * build_values(
            ggml_context * ctx, const layer & l, int64_t n_embd, const layer_shape & s, const graph_inputs & in, const layer_inputs & a) const {
        const int64_t n_part = v_trans ? n_embd : 1;

        ggml_tensor * v = ggml_reshape_2d(ctx, l.v, n_embd/n_part, ggml_nelements(l.v)/(n_embd/n_part));

        ggml_tensor * sum = nullptr;

        for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
            const int64_t n_term = level_width(level);
            const int64_t n      = s.n_merged[level];

            // transposed they are gathered element by element, value by value
            ggml_tensor * x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, a.m_src[level], n*n_term*n_part));
            ggml_tensor * w = ggml_reshape_3d(ctx, in.weight.view(ctx, a.m_weight[level], n*n_term), 1, n_term, n);

            x = sum_middle(ctx, ggml_mul(ctx, ggml_reshape_3d(ctx, x, n_embd, n_term, n), w));
            x = ggml_reshape_2d(ctx, x, n_embd, n);
            // the first of them have more terms
            sum = sum ? ggml_acc(ctx, sum, x, sum->nb[1], sum->nb[2], sum->nb[3], 0) : x;
        }
        if (sum) {
            const int64_t n = s.n_merged[0]*n_part;
            v = ggml_set_rows(ctx, v, ggml_reshape_2d(ctx, sum, n_embd/n_part, n), in.idx_dst.view(ctx, a.m_dst, n));
        }
        if (s.n_moved > 0) {
            ggml_tensor * x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, a.v_src, s.n_moved*n_part));
            v = ggml_set_rows(ctx, v, x, in.idx_dst.view(ctx, a.v_dst, s.n_moved*n_part));
        }

        return v;
    }

    bool edit_graph(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p,
            const std::vector<layer_edit> & edits, bool with_k, bool with_v) {
        std::vector<layer_shape> shapes;
        bool none = true;
        for (const size_t i : p.layers) {
            const auto s = shape_of(edits[i], with_k, with_v);
            none = none && s.n_moves + s.n_turns + s.n_moved + s.n_merged[0] == 0;
            shapes.push_back(s);
        }
        if (none) {
            // the graph of the last edit stays
            return true;
        }

        if (p.kept) {
            fit(layers, p, shapes);
        }

        std::vector<layer_inputs> at(shapes.size());

        graph_inputs in = fill_inputs(lctx, layers, p, edits, shapes, at);

        size_t max_nodes = 64;
        for (const auto & s : shapes) {
            max_nodes += 64;
            for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
                max_nodes += 16 + 4*level;
            }
        }

        const std::vector<input *> inputs = { &in.idx_src, &in.idx_dst, &in.delta, &in.weight };

        const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * rot) -> ggml_tensor * {
            const auto & l = layers[p.layers[i]];
            const auto & s = shapes[i];

            if (s.n_moves + s.n_turns > 0) {
                ggml_build_forward_expand(gf, build_keys(lctx, ctx, l, s, in, at[i], rot));
            }
            if (s.n_moved + s.n_merged[0] > 0) {
                ggml_build_forward_expand(gf, build_values(ctx, l, lctx.model.hparams.n_embd_head_v(l.il), s, in, at[i]));
            }
            return nullptr;
        };

        if (!compute(lctx, kv, layers, p, max_nodes, inputs, build, [](const std::vector<ggml_tensor *> &) {})) {
            return false;
        }
        if (p.kept && p.kept->gf) {
            p.kept->shapes = std::move(shapes);
        }

        return true;
    }

    // a graph of our own: build(ctx, gf, i, rot) adds the part's layer i and returns its result, null if it has none;
    // done(results) reads them before their memory goes
    template <typename Build, typename Done>
    bool compute(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p, size_t max_nodes,
            const std::vector<input *> & inputs, Build && build, Done && done) {
        if (p.kept) {
            if (!p.kept->gf && !keep_graph(kv, p, max_nodes, inputs, build)) {
                return false;
            }
            if (!p.kept->unfit) {
                return compute_kept(*p.kept, inputs, done);
            }
        }

        buf_graph.resize(ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false));

        ggml_context_ptr ctx_ptr { ggml_init({ buf_graph.size(), buf_graph.data(), true }) };

        ggml_context * ctx = ctx_ptr.get();
        ggml_cgraph  * gf  = ggml_new_graph_custom(ctx, max_nodes, false);

        auto & backends = lctx.backend_ptrs;

        // one of our own: with the decode's, every edit would cost a rebuild of the decode graph
        // it goes at once: a worker forgets its graph when a buffer is freed, and must not forget the decode's
        ggml_backend_sched_ptr sched { ggml_backend_sched_new(
                backends.data(), lctx.backend_buft.data(), backends.size(), max_nodes, false, false) };

        for (input * i : inputs) {
            i->create(ctx);
        }

        ggml_tensor * rot = kv.build_input_k_rot(ctx);

        std::vector<ggml_backend_t> homes;
        std::vector<ggml_tensor *>  results;

        for (size_t i = 0; i < p.layers.size(); ++i) {
            const int first = ggml_graph_n_nodes(gf);

            results.push_back(build(ctx, gf, i, rot));

            // the work is done where the cache lies; views stay with what they view, which may be an input on the host
            const auto buft = ggml_backend_buffer_get_type(layers[p.layers[i]].k->buffer);
            const auto home = std::find_if(backends.begin(), backends.end(), [&](ggml_backend_t b) { return ggml_backend_supports_buft(b, buft); });
            homes.push_back(home == backends.end() ? nullptr : *home);
            for (int j = first; home != backends.end() && j < ggml_graph_n_nodes(gf); ++j) {
                ggml_tensor * node = ggml_graph_node(gf, j);
                if (!node->view_src && ggml_backend_supports_op(*home, node)) {
                    ggml_backend_sched_set_tensor_backend(sched.get(), node, *home);
                }
            }
        }

        if (ggml_graph_n_nodes(gf) == 0) {
            return true;
        }

        // a list that lies with the cache goes there at once: from the host each layer's part would be copied by itself
        const bool one_home = homes[0] && std::count(homes.begin(), homes.end(), homes[0]) == (ptrdiff_t) homes.size();
        for (const input * i : inputs) {
            if (one_home && i->t) {
                ggml_backend_sched_set_tensor_backend(sched.get(), i->t, homes[0]);
            }
        }

        if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {
            return false;
        }

        for (const input * i : inputs) {
            i->upload();
        }
        if (rot && rot->buffer) {
            kv.set_input_k_rot(rot);
        }
        if (ggml_backend_sched_graph_compute(sched.get(), gf) != GGML_STATUS_SUCCESS) {
            return false;
        }
        done(results);

        return true;
    }

    // makes the graph that a spare device computes from now on; false: there is no memory
    template <typename Build>
    bool keep_graph(
            const llama_kv_cache & kv, const part & p, size_t max_nodes, const std::vector<input *> & inputs, Build && build) {
        static std::atomic<uint64_t> n_made;

        auto & kept = *p.kept;

        kept.clear();
        kept.ctx.reset(ggml_init({ ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false), nullptr, true }));

        ggml_context * ctx = kept.ctx.get();
        ggml_cgraph  * gf  = ggml_new_graph_custom(ctx, max_nodes, false);

        for (input * i : inputs) {
            i->create(ctx);
            kept.inputs.push_back(i->t);
        }

        ggml_tensor * rot = kv.build_input_k_rot(ctx);
        if (rot) {
            // the same each time: its memory is no other's
            ggml_set_output(rot);
        }

        for (size_t i = 0; i < p.layers.size(); ++i) {
            kept.outputs.push_back(build(ctx, gf, i, rot));
        }

        // there is no scheduler to bring what lies elsewhere
        for (int i = 0; i < gf->n_leafs; ++i) {
            const auto * buf = gf->leafs[i]->buffer;
            kept.unfit = kept.unfit || (buf && buf->buft != kept.buft);
        }
        if (kept.unfit) {
            kept.clear();
            return true;
        }

        // without the first, a graph of as many nodes would be taken for the last one
        if (!ggml_gallocr_reserve(kept.alloc.get(), gf) || !ggml_gallocr_alloc_graph(kept.alloc.get(), gf)) {
            kept.clear();
            return false;
        }
        if (rot && rot->buffer) {
            ggml_backend_tensor_set(rot, kv.attn_rot_hadamard.at(rot->ne[0]).data(), 0, ggml_nbytes(rot));
        }
        // by this ggml's RPC knows it again
        gf->uid = ++n_made;
        kept.gf = gf;

        return true;
    }

    template <typename Done>
    static bool compute_kept(kept_graph & kept, const std::vector<input *> & inputs, Done && done) {
        if (ggml_graph_n_nodes(kept.gf) == 0) {
            return true;
        }
        for (size_t i = 0; i < inputs.size(); ++i) {
            inputs[i]->t = kept.inputs[i];
            inputs[i]->upload();
        }
        // a worker does one thing after the other, whichever of its devices it is for
        if (ggml_backend_graph_compute(kept.backend.get(), kept.gf) != GGML_STATUS_SUCCESS) {
            return false;
        }
        done(kept.outputs);

        return true;
    }

    int32_t read_keys(
            llama_context & lctx, const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim) {
        const auto & kv = *cache(lctx);

        const auto n_cell = row_cells();
        for (int row = 0; row < n_row; ++row) {
            if (first[row] < 0 || first[row] > n_cell[row] - n) {
                return fail(format("row %d: cells %d .. %lld of %d", row, first[row], (long long) first[row] + n - 1, n_cell[row]));
            }
        }

        std::fill(out, out + (size_t) n_row*n*n_dim, 0.0f);
        if (n == 0) {
            return 0;
        }

        for (const auto & p : parts(KEPT_KEYS)) {
            if (!read_keys(lctx, kv, p, first, delta, out, n, n_dim)) {
                return fail("the device failed to read keys");
            }
        }

        return 0;
    }

    bool read_keys(
            llama_context & lctx, const llama_kv_cache & kv, const part & p,
            const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim) {
        input in_src   { GGML_TYPE_I32, {}, nullptr };
        input in_delta { GGML_TYPE_I32, {}, nullptr };

        std::vector<size_t> at;
        for (const size_t i : p.layers) {
            const auto & l = layers[i];

            at.push_back(in_src.start(p.align()));
            in_delta.start(p.align());
            for (int head = 0; head < l.n_head; ++head) {
                for (int j = 0; j < n; ++j) {
                    const int row = l.row_0 + head;
                    in_src  .push<int32_t>((first[row] + j)*l.n_head + head);
                    in_delta.push<int32_t>(delta[(size_t) row*n + j]);
                }
            }
        }

        if (p.kept && (p.kept->shapes.empty() || p.kept->shapes[0].n_moves != n)) {
            p.kept->clear();
        }

        const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * rot) {
            const auto & l = layers[p.layers[i]];

            const int64_t n_embd = l.k->ne[0]/l.n_head;

            ggml_tensor * k = ggml_reshape_2d(ctx, l.k, n_embd, l.n_head*l.k->ne[1]);

            k = ggml_get_rows(ctx, k, in_src.view(ctx, at[i], (int64_t) l.n_head*n));
            if (is_rotary(lctx.model.hparams, l)) {
                k = build_turn(lctx, ctx, k, in_delta.view(ctx, at[i], (int64_t) l.n_head*n), rot, l.il);
            } else if (rot) {
                k = llama_mul_mat_hadamard(ctx, k, rot);
            }

            ggml_set_output(k);
            ggml_build_forward_expand(gf, k);

            return k;
        };

        const auto done = [&](const std::vector<ggml_tensor *> & keys) {
            std::vector<float> tmp;
            for (size_t i = 0; i < keys.size(); ++i) {
                tmp.resize(ggml_nelements(keys[i]));
                ggml_backend_tensor_get(keys[i], tmp.data(), 0, tmp.size()*sizeof(float));

                const int64_t n_embd = keys[i]->ne[0];
                for (int64_t j = 0; j < keys[i]->ne[1]; ++j) {
                    std::copy(&tmp[j*n_embd], &tmp[j*n_embd] + n_embd, out + ((size_t) layers[p.layers[i]].row_0*n + j)*n_dim);
                }
            }
        };

        if (!compute(lctx, kv, layers, p, p.layers.size()*32 + 16, { &in_src, &in_delta }, build, done)) {
            return false;
        }
        if (p.kept && p.kept->gf) {
            p.kept->shapes = { { n } };
        }

        return true;
    }

    int32_t resize(llama_context & lctx, const int32_t * n_cell) {
        auto * kv = cache(lctx);

        lctx.synchronize();

        const int n_used = kv->v_cells[0].used_max_p1();

        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = layers[i];

            const int n_live = params.ragged ? most_live(l) : n_used;
            if (n_cell[i] < std::max(n_live, 1)) {
                return fail(format("layer %d: %d cells hold no %d tokens", l.il, n_cell[i], n_live));
            }
            if (!params.ragged && n_cell[i] != n_cell[0]) {
                return fail(format("layer %d: %d cells, layer %d: %d, and rows are not ragged", l.il, n_cell[i], layers[0].il, n_cell[0]));
            }
        }

        collect(lctx);

        const int64_t n_before = n_bytes();

        std::vector<int> before;
        for (const auto & l : layers) {
            before.push_back(l.n_cell);
        }

        // one layer after the other, so that only one is there twice
        bool ok = true;
        for (size_t i = 0; ok && i < layers.size(); ++i) {
            ok = n_cell[i] == layers[i].n_cell || resize(lctx, *kv, i, n_cell[i]);
        }
        for (size_t i = 0; !ok && i < layers.size(); ++i) {
            if (before[i] != layers[i].n_cell) {
                resize(lctx, *kv, i, before[i]);
            }
        }
        size_signals();

        if (ok && !params.ragged && n_cell[0] != (int) kv->v_cells[0].size()) {
            auto & cells = kv->v_cells[0];

            const auto old = cells;
            cells.resize(n_cell[0]);
            for (int i = 0; i < n_used; ++i) {
                cells.pos_set(i, old.pos_get(i));
                cells.seq_add(i, !old.seq_has(i, 0));
            }
            kv->v_heads[0] = n_used;
        }

#if defined(__GLIBC__)
        // what is freed in pieces stays with the process otherwise
        if (n_before - n_bytes() > (16 << 20)) {
            malloc_trim(0);
        }
#else
        GGML_UNUSED(n_before);
#endif

        // graphs that were made have views of what is gone
        for (auto & res : lctx.gf_res_prev) {
            res.reset();
        }
        lctx.gf_res_prev_active = nullptr;

        // the compute buffers follow the cache; ragged layers change too often for that, and by little
        lctx.sched_need_reserve = lctx.sched_need_reserve || !params.ragged;

        return ok ? 0 : fail("no memory for the cache");
    }

    // the first n cells of a layer as bytes, keys and then values, each cell by cell; returns how many bytes
    int64_t copy_cells(llama_context & lctx, const layer & l, uint8_t * out, const uint8_t * in, int n) const {
        const size_t size_k = l.k->nb[1]*n;
        const size_t size_v = l.v->nb[1]*n;

        if ((!out && !in) || n == 0) {
            return size_k + size_v;
        }
        lctx.synchronize();

        if (out) {
            ggml_backend_tensor_get(l.k, out, 0, size_k);
        } else {
            ggml_backend_tensor_set(l.k, in, 0, size_k);
        }

        if (!v_trans) {
            if (out) {
                ggml_backend_tensor_get(l.v, out + size_k, 0, size_v);
            } else {
                ggml_backend_tensor_set(l.v, in + size_k, 0, size_v);
            }
            return size_k + size_v;
        }

        // whether values lie transposed is the device's choice and not the file's
        const size_t  one    = ggml_type_size(l.v->type);
        const int64_t n_embd = l.v->ne[0];

        std::vector<uint8_t> tmp(size_v);

        const auto transpose = [one](const uint8_t * src, uint8_t * dst, int64_t n_src, int64_t n_dst) {
            for (int64_t a = 0; a < n_src; ++a) {
                for (int64_t b = 0; b < n_dst; ++b) {
                    memcpy(dst + (b*n_src + a)*one, src + (a*n_dst + b)*one, one);
                }
            }
        };

        if (out) {
            ggml_backend_tensor_get_2d(l.v, tmp.data(), 0, one*n, n_embd, one*l.n_cell, one*n);
            transpose(tmp.data(), out + size_k, n_embd, n);
        } else {
            transpose(in + size_k, tmp.data(), n, n_embd);
            ggml_backend_tensor_set_2d(l.v, tmp.data(), 0, one*n, n_embd, one*l.n_cell, one*n);
        }

        return size_k + size_v;
    }

    // the cache of the sliding layers: [where the next token goes, each cell's position or -1], and all of its cells
    int64_t copy_window(
            llama_context & lctx, int32_t * table_out, uint8_t * out, const int32_t * table_in, const uint8_t * in) const {
        int64_t res = 0;
        for (const auto & l : sliding) {
            res += copy_cells(lctx, l, out ? out + res : nullptr, in ? in + res : nullptr, l.n_cell);
        }

        auto * kv = sliding_cache(lctx);

        if (!kv) {
            return res;
        }

        auto & cells = kv->v_cells[0];

        if (table_out) {
            *table_out++ = kv->v_heads[0];
            for (uint32_t c = 0; c < cells.size(); ++c) {
                *table_out++ = cells.is_empty(c) ? -1 : cells.pos_get(c);
            }
        }
        if (table_in) {
            cells.reset();
            kv->v_heads[0] = *table_in++;
            for (uint32_t c = 0; c < cells.size(); ++c, ++table_in) {
                if (*table_in >= 0) {
                    cells.pos_set(c, *table_in);
                    cells.seq_add(c, 0);
                }
            }
        }

        return res;
    }

    int32_t n_window() const {
        return sliding.empty() ? 0 : sliding[0].n_cell;
    }

    bool resize(llama_context & lctx, llama_kv_cache & kv, size_t i, int n) {
        auto & l = layers[i];

        ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }) };

        const auto create = [&](const ggml_tensor * old) {
            ggml_tensor * t = ggml_new_tensor_3d(ctx.get(), old->type, old->ne[0], n, old->ne[2]);
            ggml_set_name(t, old->name);
            return t;
        };

        ggml_tensor * k = create(l.k);
        ggml_tensor * v = create(l.v);

        ggml_tensor * k_stream = ggml_view_2d(ctx.get(), k, k->ne[0], n, k->nb[1], 0);
        ggml_tensor * v_stream = ggml_view_2d(ctx.get(), v, v->ne[0], n, v->nb[1], 0);

        ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_buffer_get_type(l.k->buffer)) };
        if (!buf) {
            return false;
        }
        ggml_backend_buffer_clear(buf.get(), 0);

        const int64_t n_copy = std::min(n, l.n_cell);

        // [rows, cells of a row] in elements: transposed, a row is an element of all values
        const auto live = [&](ggml_context * c, ggml_tensor * t, bool trans) {
            const int64_t n_embd = t->ne[0];
            return trans ?
                ggml_view_2d(c, t, n_copy, n_embd, ggml_row_size(t->type, t->ne[1]), 0) :
                ggml_view_2d(c, t, n_embd, n_copy, t->nb[1], 0);
        };

        const auto build = [&](ggml_context * c, ggml_cgraph * gf, size_t, ggml_tensor *) -> ggml_tensor * {
            ggml_build_forward_expand(gf, ggml_cpy(c, live(c, l.k, false),   live(c, k, false)));
            ggml_build_forward_expand(gf, ggml_cpy(c, live(c, l.v, v_trans), live(c, v, v_trans)));
            return nullptr;
        };
        if (!compute(lctx, kv, layers, { { i }, nullptr }, 64, {}, build, [](const std::vector<ggml_tensor *> &) {})) {
            return false;
        }

        l.k = k;
        l.v = v;
        l.n_cell = n;

        // these have the tensors that are gone
        for (auto & graphs : kept) {
            for (auto & graph : graphs.second) {
                graph.clear();
            }
        }

        auto & theirs = kv.layers[i];

        theirs.k = k;
        theirs.v = v;
        theirs.k_stream = { k_stream };
        theirs.v_stream = { v_stream };

        auto & bufs = kv.ctxs_bufs;

        bufs.emplace_back(std::move(ctx), std::move(buf));
        bufs.erase(std::remove_if(bufs.begin(), bufs.end(), [&](const auto & b) {
            return std::none_of(layers.begin(), layers.end(), [&](const layer & l) {
                return l.k->buffer == b.second.get() || l.v->buffer == b.second.get();
            });
        }), bufs.end());

        return true;
    }
};

//
// hooks
//

// what changes from step to step, so that the graph need not
class llama_kvtool_input : public llm_graph_input_i {
public:
    llama_kvtool_input(const llama_kvtool & kvtool) : kvtool(kvtool) {}

    // each layer's own part where rows are ragged
    struct rows {
        int i; // of the layer in the cache

        ggml_tensor * k_idx; // I64 [n_head*n_tokens]
        ggml_tensor * v_idx; // I64 [n_embd*n_tokens], null if V is not transposed
        ggml_tensor * limit; // F32 [1, n_tokens, n_head]: the last cell that a query sees
    };

    void set_input(const llama_ubatch * ubatch) override {
        const int64_t n_tokens = ubatch->n_tokens;

        std::vector<float> f(n_tokens);

        if (seen && seen->buffer) {
            for (int64_t t = 0; t < n_tokens; ++t) {
                f[t] = kvtool.n_seen + t + 1;
            }
            ggml_backend_tensor_set(seen, f.data(), 0, ggml_nbytes(seen));
        }
        if (scale && scale->buffer) {
            for (int64_t t = 0; t < n_tokens; ++t) {
                f[t] = logf(kvtool.n_seen + t + 1)/logf(512.0f);
            }
            ggml_backend_tensor_set(scale, f.data(), 0, ggml_nbytes(scale));
        }

        std::vector<int64_t> idx;

        for (const auto & r : ragged) {
            const auto & l = kvtool.layers[r.i];

            const auto cell = [&](int64_t t, int head) { return kvtool.live[l.row_0 + head] + t; };

            idx.clear();
            for (int64_t t = 0; t < n_tokens; ++t) {
                for (int head = 0; head < l.n_head; ++head) {
                    idx.push_back(cell(t, head)*l.n_head + head);
                }
            }
            ggml_backend_tensor_set(r.k_idx, idx.data(), 0, ggml_nbytes(r.k_idx));

            if (r.v_idx) {
                const int64_t n_embd = r.v_idx->ne[0]/(n_tokens*l.n_head);

                idx.clear();
                for (int64_t t = 0; t < n_tokens; ++t) {
                    for (int head = 0; head < l.n_head; ++head) {
                        for (int64_t j = 0; j < n_embd; ++j) {
                            idx.push_back((head*n_embd + j)*l.n_cell + cell(t, head));
                        }
                    }
                }
                ggml_backend_tensor_set(r.v_idx, idx.data(), 0, ggml_nbytes(r.v_idx));
            }

            f.clear();
            for (int head = 0; head < l.n_head; ++head) {
                for (int64_t t = 0; t < n_tokens; ++t) {
                    f.push_back(cell(t, head));
                }
            }
            ggml_backend_tensor_set(r.limit, f.data(), 0, ggml_nbytes(r.limit));
        }
    }

    // batches of another size and caches of other sizes are seen elsewhere
    bool can_reuse(const llm_graph_params &) override {
        return true;
    }

    const llama_kvtool & kvtool;

    ggml_tensor * seen  = nullptr; // F32 [1, n_tokens]: tokens that each query has seen, itself included
    ggml_tensor * scale = nullptr; // F32 [1, 1, n_tokens]

    std::vector<rows> ragged;
};

static llama_kvtool_input & graph_input(const llm_graph_context & graph) {
    auto & input = graph.res->kvtool.input;

    if (!input) {
        auto mine = std::make_unique<llama_kvtool_input>(*graph.cparams.kvtool);
        input = mine.get();
        graph.res->add_input(std::move(mine));
    }

    return *input;
}

static ggml_tensor * new_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
    ggml_set_input(t);
    return t;
}

bool llama_kvtool_store(
        const llm_graph_context & graph,
        ggml_tensor * k_cur,
        ggml_tensor * v_cur,
        ggml_tensor * & k,
        ggml_tensor * & v,
                int   il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->params.ragged || !kvtool->find(il)) {
        return false;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const bool v_trans = kvtool->v_trans;

    const int64_t n_tokens = k_cur->ne[2];
    const int64_t n_head   = l.n_head;
    const int64_t n_embd_k = k_cur->ne[0];
    const int64_t n_embd_v = v_cur->ne[0];

    llama_kvtool_input::rows rows;

    rows.i     = &l - kvtool->layers.data();
    rows.k_idx = new_input(ctx, GGML_TYPE_I64, n_head*n_tokens, 1, 1);
    rows.v_idx = v_trans ? new_input(ctx, GGML_TYPE_I64, n_embd_v*n_head*n_tokens, 1, 1) : nullptr;
    rows.limit = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, n_head);

    graph_input(graph).ragged.push_back(rows);

    const auto write = [&](ggml_tensor * cache, ggml_tensor * cur, int64_t n_embd, ggml_tensor * idx) {
        cache = ggml_reshape_2d(ctx, cache, n_embd, ggml_nelements(cache)/n_embd);
        cur   = ggml_reshape_2d(ctx, ggml_cont(ctx, cur), n_embd, ggml_nelements(cur)/n_embd);
        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, cache, cur, idx));
    };

    write(l.k, k_cur, n_embd_k, rows.k_idx);
    write(l.v, v_cur, v_trans ? 1 : n_embd_v, v_trans ? rows.v_idx : rows.k_idx);

    const auto view = [&](ggml_tensor * t, int64_t n_embd) {
        const size_t size = ggml_row_size(t->type, n_embd);
        return ggml_view_4d(ctx, t, n_embd, n_head, l.n_cell, 1, size, t->nb[1], t->nb[2], 0);
    };

    k = view(l.k, n_embd_k);
    if (v_trans) {
        const size_t size = ggml_row_size(l.v->type, l.n_cell);
        v = ggml_view_4d(ctx, l.v, l.n_cell, n_head, n_embd_v, 1, size*n_embd_v, size, l.v->nb[2], 0);
    } else {
        v = view(l.v, n_embd_v);
    }

    return true;
}

ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->params.ragged || !kvtool->find(il)) {
        return kq_mask;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & rows = graph_input(graph).ragged.back();
    const auto & l    = kvtool->layers[rows.i];
    GGML_ASSERT(l.il == il);

    const int64_t n_tokens = rows.limit->ne[1];
    const int64_t n_gqa    = graph.hparams.n_head(il)/l.n_head;

    // made where it is used: on the host it would be a mask for every head and layer to fill and to send
    ggml_tensor * x = ggml_repeat_4d(ctx, ggml_arange(ctx, 0, l.n_cell, 1), l.n_cell, n_tokens, l.n_head, 1);
    x = ggml_scale(ctx, ggml_step(ctx, ggml_sub(ctx, x, rows.limit)), -1e30f);
    if (n_gqa > 1) {
        x = ggml_reshape_4d(ctx, x, l.n_cell, n_tokens, 1, l.n_head);
        x = ggml_repeat_4d(ctx, x, l.n_cell, n_tokens, n_gqa, l.n_head);
        x = ggml_reshape_3d(ctx, x, l.n_cell, n_tokens, n_gqa*l.n_head);
    }

    return kq_mask->type == GGML_TYPE_F16 ? ggml_cast(ctx, x, GGML_TYPE_F16) : x;
}

ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->params.log_n || !kvtool->has_keys(k)) {
        return q;
    }

    auto & scale = graph_input(graph).scale;
    if (!scale) {
        scale = new_input(graph.ctx0, GGML_TYPE_F32, 1, 1, q->ne[2]);
    }

    return ggml_mul(graph.ctx0, q, scale);
}

void llama_kvtool_build(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || kvtool->params.signals == 0 || !kvtool->has_keys(k)) {
        return;
    }

    const auto & params = kvtool->params;

    ggml_context * ctx = graph.ctx0;

    if (!p) {
        p = ggml_mul_mat(ctx, k, q);
        ggml_prec_set_acc(p, GGML_PREC_F32);

        if (graph.hparams.attn_soft_cap) {
            const float cap = graph.hparams.f_attn_logit_softcapping;
            p = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, p, 1.0f/cap)), cap);
        }

        p = ggml_soft_max_ext(ctx, p, kq_mask, kq_scale, graph.hparams.f_max_alibi_bias);
        ggml_soft_max_add_sinks(p, sinks);
    }

    const int64_t n_kv      = p->ne[0];
    const int64_t n_tokens  = p->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t n_gqa     = p->ne[2]/n_head_kv;

    const auto has = [&](uint32_t signal) { return (params.signals & signal) != 0; };

    // [n, r, h] of the last r queries, the group's heads among them or reduced to one
    const auto queries = [&](ggml_tensor * t, int64_t r) {
        const int64_t h = t->ne[2]/n_head_kv;
        if (r == n_tokens) {
            return ggml_reshape_3d(ctx, t, n_kv, n_tokens*h, n_head_kv);
        }
        t = ggml_cont(ctx, ggml_view_3d(ctx, t, n_kv, r, t->ne[2], t->nb[1], t->nb[2], (n_tokens - r)*t->nb[1]));
        return ggml_reshape_3d(ctx, t, n_kv, r*h, n_head_kv);
    };

    // [n_kv*n_tokens, n_gqa, n_head_kv] -> [n_kv, n_tokens, n_head_kv]
    const auto reduce_group = [&](uint32_t group) {
        ggml_tensor * t = ggml_reshape_3d(ctx, p, n_kv*n_tokens, n_gqa, n_head_kv);
        switch (group) {
            case LLAMA_KVTOOL_GROUP_MAX:   t = max_middle(ctx, t); break;
            case LLAMA_KVTOOL_GROUP_FIRST: t = ggml_cont(ctx, ggml_view_3d(ctx, t, t->ne[0], 1, n_head_kv, t->nb[1], t->nb[2], 0)); break;
            default:                       t = sum_middle(ctx, t); break;
        }
        return ggml_reshape_3d(ctx, t, n_kv, n_tokens, n_head_kv);
    };

    llama_kvtool_graph::probe probe = { il, {} };

    const auto put = [&](uint32_t signal, ggml_tensor * t) {
        int s = 0;
        while (signal >> (s + 1)) {
            ++s;
        }
        // at once, so that the probabilities of one layer are freed before those of the next are made
        if (ggml_tensor * sum = kvtool->build_sum(ctx, il, s, t, n_tokens)) {
            ggml_build_forward_expand(graph.gf, sum);
            return;
        }
        ggml_set_output(t);
        ggml_build_forward_expand(graph.gf, t);
        probe.t[s] = t;
    };

    const bool summed = params.group == LLAMA_KVTOOL_GROUP_SUM || n_gqa == 1;

    // sums over the group and over queries go together
    ggml_tensor * a = summed ? p : reduce_group(params.group);

    if (has(LLAMA_KVTOOL_SIGNAL_ATTENTION)) {
        put(LLAMA_KVTOOL_SIGNAL_ATTENTION, sum_middle(ctx, queries(a, n_tokens)));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_LAST)) {
        put(LLAMA_KVTOOL_SIGNAL_LAST, sum_middle(ctx, queries(a, 1)));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_RECENT)) {
        put(LLAMA_KVTOOL_SIGNAL_RECENT, sum_middle(ctx, queries(a, std::min<int64_t>(params.n_query, n_tokens))));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_SQUARES)) {
        ggml_tensor * one = summed && n_gqa > 1 ? reduce_group(LLAMA_KVTOOL_GROUP_SUM) : a;
        put(LLAMA_KVTOOL_SIGNAL_SQUARES, sum_middle(ctx, ggml_sqr(ctx, one)));
    }

    if (has(LLAMA_KVTOOL_SIGNAL_HITS) || has(LLAMA_KVTOOL_SIGNAL_IMPORTANT)) {
        auto & seen = graph_input(graph).seen;
        if (!seen) {
            seen = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, 1);
        }

        // 1 where p*t >= 1
        ggml_tensor * hit = ggml_scale_bias(ctx, ggml_step(ctx, ggml_scale_bias(ctx, ggml_mul(ctx, p, seen), -1.0f, 1.0f)), -1.0f, 1.0f);

        if (has(LLAMA_KVTOOL_SIGNAL_HITS)) {
            put(LLAMA_KVTOOL_SIGNAL_HITS, sum_middle(ctx, queries(hit, n_tokens)));
        }
        if (has(LLAMA_KVTOOL_SIGNAL_IMPORTANT)) {
            ggml_tensor * order = ggml_reshape_2d(ctx, ggml_arange(ctx, 1, n_tokens + 1, 1), 1, n_tokens);
            put(LLAMA_KVTOOL_SIGNAL_IMPORTANT, max_middle(ctx, queries(ggml_mul(ctx, hit, order), n_tokens)));
        }
    }

    graph.res->kvtool.probes.push_back(probe);
}

bool llama_kvtool_fits(const llama_context & lctx, uint32_t n_tokens) {
    const auto * kvtool = lctx.kvtool.get();

    if (!kvtool || !kvtool->params.ragged) {
        return true;
    }

    for (const auto & l : kvtool->layers) {
        const int n_live = kvtool->most_live(l);
        if (n_tokens > (uint32_t) (l.n_cell - n_live)) {
            LLAMA_LOG_ERROR("layer %d: %d cells hold no %d + %u tokens\n", l.il, l.n_cell, n_live, n_tokens);
            return false;
        }
    }

    return true;
}

void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens) {
    if (lctx.kvtool) {
        lctx.kvtool->extract(lctx, res.kvtool, n_tokens);
    }
}

uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens) {
    if (!kvtool) {
        return 0;
    }

    const auto & params = kvtool->params;

    const bool hits = (params.signals & (LLAMA_KVTOOL_SIGNAL_HITS | LLAMA_KVTOOL_SIGNAL_IMPORTANT)) != 0;

    // counted closely: ggml and its scheduler keep about a kilobyte for each node that there could be
    uint32_t res = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const uint32_t n_halving = std::log2(std::max(1u, n_tokens*hparams.n_gqa(il)));

        // the weights, if they are not there, and the scaled queries; what ragged rows write, their views and masks
        res += 8 + (params.ragged ? 24 : 0) + (hits ? 8 : 0);
        for (int s = 0; s < llama_kvtool::n_signal; ++s) {
            // two views and a sum, a view and a sum for what is left over; a maximum is three operations
            const bool is_max = params.group == LLAMA_KVTOOL_GROUP_MAX || 1u << s == LLAMA_KVTOOL_SIGNAL_IMPORTANT;

            res += kvtool->has(s) ? (is_max ? 16 + 9*n_halving : 8 + 5*n_halving) : 0;
        }
    }

    return res;
}

//
// guard
//

static char g_message[4096];
static int  g_exit_code = 0;
static bool g_verbose   = false;

static std::atomic_flag g_ended = ATOMIC_FLAG_INIT;

// only what a signal handler may do
[[noreturn]] static void end_process() {
    if (g_ended.test_and_set()) {
        // another thread is at it
        for (;;) {
#if !defined(_WIN32)
            pause();
#endif
        }
    }
#if defined(_WIN32)
    fputs(g_message, stderr);
    fflush(stderr);
#else
    for (size_t i = 0, n = strlen(g_message); i < n; ) {
        const auto n_written = write(STDERR_FILENO, g_message + i, n - i);
        if (n_written <= 0) {
            break;
        }
        i += n_written;
    }
#endif
    std::_Exit(g_exit_code);
}

static void on_signal(int) {
    end_process();
}

static void on_abort(const char * why) {
    if (g_verbose) {
        fprintf(stderr, "%s\n", why);
    }
    end_process();
}

static void on_terminate() {
    if (g_verbose) {
        try {
            if (auto e = std::current_exception()) {
                std::rethrow_exception(e);
            }
        } catch (const std::exception & e) {
            fprintf(stderr, "uncaught exception: %s\n", e.what());
        } catch (...) {
            fprintf(stderr, "uncaught exception\n");
        }
    }
    end_process();
}

static constexpr int g_fatal[] = {
    SIGABRT, SIGFPE, SIGILL, SIGSEGV,
#if !defined(_WIN32)
    SIGBUS,
#endif
};

// what was there before, for when the guard goes
struct guard_before {
    std::terminate_handler terminate;
    ggml_abort_callback_t  abort;
#if defined(_WIN32)
    void (*signals[std::size(g_fatal)])(int);
#else
    struct sigaction signals[std::size(g_fatal)];
#endif
};

static guard_before g_before;
static bool         g_guarding = false;

static void guard_on() {
#if defined(_WIN32)
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
        g_before.signals[i] = signal(g_fatal[i], on_signal);
    }
#else
    // a stack that has overflowed cannot be used
    static char stack[1 << 16];
    stack_t alt = {};
    alt.ss_sp   = stack;
    alt.ss_size = sizeof(stack);
    stack_t was = {};
    if (sigaltstack(nullptr, &was) == 0 && (was.ss_flags & SS_DISABLE)) {
        sigaltstack(&alt, nullptr);
    }

    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags   = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
        sigaction(g_fatal[i], &action, &g_before.signals[i]);
    }
#endif
    // before the signal there would be ggml's words and a backtrace, and C++'s
    g_before.abort     = ggml_set_abort_callback(on_abort);
    g_before.terminate = std::set_terminate(on_terminate);
}

static void guard_off() {
    for (size_t i = 0; i < std::size(g_fatal); ++i) {
#if defined(_WIN32)
        signal(g_fatal[i], g_before.signals[i]);
#else
        sigaction(g_fatal[i], &g_before.signals[i], nullptr);
#endif
    }
    ggml_set_abort_callback(g_before.abort);
    std::set_terminate(g_before.terminate);
}

//
// memory of devices
//

struct device_limit {
    void (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);

    size_t n_bytes;
};

static std::mutex                                 g_limits_mutex;
static std::map<ggml_backend_dev_t, device_limit> g_limits;

static void get_limited_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    std::lock_guard<std::mutex> lock(g_limits_mutex);

    const auto & limit = g_limits.at(dev);

    limit.get_memory(dev, free, total);
    *total = std::min(*total, limit.n_bytes);
    *free  = std::min(*free,  limit.n_bytes);
}

//
// spares of devices
//

// what a spare is once more
static std::map<ggml_backend_dev_t, ggml_backend_dev_t> g_spare_of;

static ggml_backend_dev_t spare_of(ggml_backend_dev_t spare) {
    std::lock_guard<std::mutex> lock(g_spares_mutex);
    return g_spare_of.at(spare);
}

// where nothing at all is said, llama.cpp takes the host's memory for the device's
static void get_spare_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0;
    *total = LLAMA_KVTOOL_SPARE_BYTES;
}

static ggml_backend_t init_spare(ggml_backend_dev_t spare, const char * params) {
    ggml_backend_dev_t dev = spare_of(spare);

    ggml_backend_t res = dev->iface.init_backend(dev, params);
    if (res) {
        // a server asks it for its memory
        res->device = spare;
    }
    return res;
}

//
// C API
//

int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose) {
    if (message && strlen(message) >= sizeof(g_message)) {
        return fail(format("a message has at most %d bytes", (int) sizeof(g_message) - 1));
    }
    if (message) {
        memcpy(g_message, message, strlen(message) + 1);
        g_exit_code = exit_code;
        g_verbose   = verbose;
    }
    if ((message != nullptr) != g_guarding) {
        g_guarding = !g_guarding;
        g_guarding ? guard_on() : guard_off();
    }
    return 0;
}

int32_t llama_kvtool_abi(void) {
    return LLAMA_KVTOOL_ABI;
}

const char * llama_kvtool_digest(void) {
    return LLAMA_KVTOOL_DIGEST;
}

const char * llama_kvtool_error(void) {
    return g_error.c_str();
}

// nothing thrown may cross into C
template <typename F>
static auto guarded(F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes) {
    if (!dev || n_bytes == 0) {
        return fail("no device or no bytes");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_limits_mutex);
        const auto it = g_limits.find(dev);
        if (it != g_limits.end()) {
            it->second.n_bytes = n_bytes;
        } else {
            g_limits[dev] = { dev->iface.get_memory, (size_t) n_bytes };
            dev->iface.get_memory = get_limited_memory;
        }
        return 0;
    });
}

ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev) {
    if (!dev) {
        g_error = "no device";
        return nullptr;
    }
    // as long as the process, as all devices
    auto * res = new ggml_backend_device(*dev);

    res->iface.get_memory   = get_spare_memory;
    res->iface.init_backend = init_spare;

    std::lock_guard<std::mutex> lock(g_spares_mutex);
    g_spare_of[res] = dev;

    return res;
}

int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t keys) {
    if (!dev || !edits || !keys) {
        return fail("no device or no spares");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_spares_mutex);
        g_spares[dev] = { edits, keys };
        return 0;
    });
}

int32_t llama_kvtool_enable(llama_context * ctx, const llama_kvtool_params * params) {
    if (!ctx || !params) {
        return fail("no context or no parameters");
    }
    return guarded([&] { return llama_kvtool::enable(*ctx, *params); });
}

int32_t llama_kvtool_row_layers(const llama_context * ctx, int32_t * layers, int32_t n_row) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!layers || n_row != kvtool->n_row) {
        return fail(format("there are %d rows, not %d", kvtool->n_row, n_row));
    }
    std::copy(kvtool->layer_of_row.begin(), kvtool->layer_of_row.end(), layers);
    return n_row;
}

int32_t llama_kvtool_n_dim(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->n_dim() : -1;
}

int32_t llama_kvtool_seen(llama_context * ctx, int32_t n_seen) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (n_seen < 0) {
        return fail(format("n_seen = %d must not be negative", n_seen));
    }
    kvtool->n_seen = n_seen;
    return 0;
}

int32_t llama_kvtool_resize(llama_context * ctx, const int32_t * n_cell, int32_t n_layer) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!n_cell || n_layer != (int32_t) kvtool->layers.size()) {
        return fail(format("there are %d layers, not %d", (int) kvtool->layers.size(), n_layer));
    }
    return guarded([&] { return kvtool->resize(*ctx, n_cell); });
}

int64_t llama_kvtool_cache_bytes(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    return kvtool->n_bytes();
}

static int64_t copy_cells(llama_context * ctx, int32_t layer, uint8_t * out, const uint8_t * in, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int32_t n_layer = kvtool->layers.size();
    if (layer < 0 || layer >= n_layer) {
        return fail(format("layer %d of %d", layer, n_layer));
    }
    if (n_cell < 0 || n_cell > kvtool->layers[layer].n_cell) {
        return fail(format("layer %d: %d cells of %d", layer, n_cell, kvtool->layers[layer].n_cell));
    }
    return guarded([&]() -> int64_t { return kvtool->copy_cells(*ctx, kvtool->layers[layer], out, in, n_cell); });
}

int32_t llama_kvtool_n_window(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->n_window() : -1;
}

int64_t llama_kvtool_get_window(llama_context * ctx, int32_t * table, uint8_t * out) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    return guarded([&]() -> int64_t { return kvtool->copy_window(*ctx, table, out, nullptr, nullptr); });
}

int64_t llama_kvtool_set_window(llama_context * ctx, const int32_t * table, const uint8_t * in) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int32_t n = kvtool->n_window();
    if (!table || !in || table[0] < 0 || table[0] > n) {
        return fail(format("no table, or a next cell that is not in 0..%d", n));
    }
    return guarded([&]() -> int64_t { return kvtool->copy_window(*ctx, nullptr, nullptr, table, in); });
}

int64_t llama_kvtool_get_cells(llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell) {
    return copy_cells(ctx, layer, out, nullptr, n_cell);
}

int64_t llama_kvtool_set_cells(llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell) {
    return copy_cells(ctx, layer, nullptr, in, n_cell);
}

// the index of a signal that can be read, or negative
static int signal_index(const llama_kvtool & kvtool, uint32_t signal, const float * data, int32_t n_row, int32_t n_cell) {
    if (!data || n_row != kvtool.n_row || n_cell < 0 || n_cell > kvtool.most_cells()) {
        return fail(format("there are %d rows of %d cells, not %d of %d", kvtool.n_row, kvtool.most_cells(), n_row, n_cell));
    }
    int s = 0;
    while (s < llama_kvtool::n_signal && signal != 1u << s) {
        ++s;
    }
    if (s == llama_kvtool::n_signal || !kvtool.has(s)) {
        return fail(format("signal %u is not enabled", signal));
    }
    return s;
}

int32_t llama_kvtool_read(llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int s = signal_index(*kvtool, signal, out, n_row, n_cell);
    if (s < 0) {
        return s;
    }
    return guarded([&]() -> int32_t {
        kvtool->collect(*ctx);
        for (int32_t row = 0; row < n_row; ++row) {
            const auto & src = kvtool->signals[s][row];
            float * dst = out + (size_t) row*n_cell;

            const size_t n = std::min<size_t>(n_cell, src.size());
            std::copy(src.begin(), src.begin() + n, dst);
            std::fill(dst + n, dst + n_cell, 0.0f);
        }
        return 0;
    });
}

int32_t llama_kvtool_write(llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell, int32_t n_query) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int s = signal_index(*kvtool, signal, in, n_row, n_cell);
    if (s < 0) {
        return s;
    }
    if (n_query < 0) {
        return fail(format("n_query = %d must not be negative", n_query));
    }
    return guarded([&]() -> int32_t {
        kvtool->collect(*ctx);
        kvtool->n_done = n_query;
        for (int32_t row = 0; row < n_row; ++row) {
            auto & dst = kvtool->signals[s][row];

            const float * src = in + (size_t) row*n_cell;
            std::copy(src, src + std::min<size_t>(n_cell, dst.size()), dst.begin());
        }
        return 0;
    });
}

int32_t llama_kvtool_read_keys(
        llama_context * ctx, const int32_t * first, const int32_t * delta, float * out, int32_t n_row, int32_t n_cell, int32_t n_dim) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!first || !delta || !out || n_row != kvtool->n_row || n_cell < 0 || n_cell > kvtool->most_cells() || n_dim != kvtool->n_dim()) {
        return fail(format("there are %d rows of %d cells of %d, not %d of %d of %d",
                kvtool->n_row, kvtool->most_cells(), kvtool->n_dim(), n_row, n_cell, n_dim));
    }
    return guarded([&] { return kvtool->read_keys(*ctx, first, delta, out, n_cell, n_dim); });
}

int32_t llama_kvtool_apply(llama_context * ctx, const llama_kvtool_edit * edit) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!edit) {
        return fail("no edit");
    }
    return guarded([&] { return kvtool->apply(*ctx, *edit); });
}
