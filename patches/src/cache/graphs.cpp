#include "graphs.h"

#include "devices.h"
#include "hooks/memory.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <numeric>

namespace kvtool {

void input::create(ggml_context * ctx) {
    if (!data.empty()) {
        t = ggml_new_tensor_1d(ctx, type, data.size()/ggml_type_size(type));
        ggml_set_input(t);
    }
}

void input::upload() const {
    if (t && t->buffer) {
        ggml_backend_tensor_set(t, data.data(), 0, data.size());
    }
}

size_t part::align() const {
    return graph ? ggml_backend_buft_get_alignment(graph->buft) : 256;
}

part single_part(const std::vector<layer> & layers) {
    part res = { std::vector<size_t>(layers.size()), nullptr };
    std::iota(res.layers.begin(), res.layers.end(), 0);
    return res;
}

// null if the layer's device has no spares
cached_graph * graphs::find_cached(const layer & l, graph_use use) {
    const auto buft = ggml_backend_buffer_get_type(l.k->buffer);

    spare_devices spares;
    if (!find_spares(ggml_backend_buft_get_device(buft), spares)) {
        return nullptr;
    }

    auto & res = cached[buft][use];
    if (!res.backend) {
        res.buft = buft;
        res.backend.reset(ggml_backend_dev_init(spares[use == GRAPH_EDITS ? 0 : 1], nullptr));
        res.alloc  .reset(ggml_gallocr_new(buft));
    }

    return res.backend && !res.is_uncacheable ? &res : nullptr;
}

std::vector<part> graphs::parts(const std::vector<layer> & layers, graph_use use) {
    std::vector<part> res;
    for (size_t i = 0; i < layers.size(); ++i) {
        auto * graph = find_cached(layers[i], use);

        auto it = std::find_if(res.begin(), res.end(), [&](const part & p) { return p.graph == graph; });
        if (it == res.end()) {
            it = res.insert(it, { {}, graph });
        }
        it->layers.push_back(i);
    }
    return res;
}

void graphs::clear() {
    for (auto & entry : cached) {
        for (auto & graph : entry.second) {
            graph.clear();
        }
    }
}

// build the graph that a spare keeps; returns false if the device lacks memory
static bool build_cached(
        const llama_kv_cache & kv, const part & p, size_t max_nodes, const std::vector<input *> & inputs, const graphs::build_t & build) {
    static std::atomic<uint64_t> n_synthetic;

    auto & cached = *p.graph;

    cached.clear();
    cached.ctx.reset(ggml_init({ ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false), nullptr, true }));

    ggml_context * ctx = cached.ctx.get();
    ggml_cgraph  * gf  = ggml_new_graph_custom(ctx, max_nodes, false);

    for (input * i : inputs) {
        i->create(ctx);
        cached.inputs.push_back(i->t);
    }

    ggml_tensor * k_rot = kv.build_input_k_rot(ctx);
    if (k_rot) {
        // Mark the Hadamard matrix as an output: it is uploaded only once, so its memory must not be reused
        ggml_set_output(k_rot);
    }

    for (size_t i = 0; i < p.layers.size(); ++i) {
        cached.outputs.push_back(build(ctx, gf, i, k_rot));
    }

    // A graph that reads tensors on other devices is not cached, because no scheduler would copy these tensors for it
    for (int i = 0; i < gf->n_leafs; ++i) {
        const auto * buf = gf->leafs[i]->buffer;
        cached.is_uncacheable = cached.is_uncacheable || (buf && buf->buft != cached.buft);
    }
    if (cached.is_uncacheable) {
        cached.clear();
        return true;
    }

    // ggml_gallocr_alloc_graph alone would mistake the new graph for the previous one if both have the same number of
    // nodes
    if (!ggml_gallocr_reserve(cached.alloc.get(), gf) || !ggml_gallocr_alloc_graph(cached.alloc.get(), gf)) {
        cached.clear();
        return false;
    }
    if (k_rot && k_rot->buffer) {
        ggml_backend_tensor_set(k_rot, memory::key_hadamard(kv, k_rot->ne[0]).data(), 0, ggml_nbytes(k_rot));
    }
    // ggml's RPC client recognizes the graph by this id
    gf->uid = ++n_synthetic;
    cached.gf = gf;

    return true;
}

static bool compute_cached(cached_graph & cached, const std::vector<input *> & inputs, const graphs::read_t & read) {
    if (ggml_graph_n_nodes(cached.gf) == 0) {
        return true;
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
        inputs[i]->t = cached.inputs[i];
        inputs[i]->upload();
    }
    // Do not wait for the decode: a worker executes its commands in order, even if they are for different devices
    if (ggml_backend_graph_compute(cached.backend.get(), cached.gf) != GGML_STATUS_SUCCESS) {
        return false;
    }
    if (read) {
        read(cached.outputs);
    }

    return true;
}

bool graphs::compute(
        llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p, size_t max_nodes,
        const std::vector<input *> & inputs, const build_t & build, const read_t & read) {
    if (p.graph) {
        if (!p.graph->gf && !build_cached(kv, p, max_nodes, inputs, build)) {
            return false;
        }
        if (!p.graph->is_uncacheable) {
            return compute_cached(*p.graph, inputs, read);
        }
    }

    buf_graph.resize(ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false));

    ggml_context_ptr ctx_ptr { ggml_init({ buf_graph.size(), buf_graph.data(), true }) };

    ggml_context * ctx = ctx_ptr.get();
    ggml_cgraph  * gf  = ggml_new_graph_custom(ctx, max_nodes, false);

    std::vector<ggml_backend_t>             backends;
    std::vector<ggml_backend_buffer_type_t> bufts;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(lctx.get_sched()); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(lctx.get_sched(), i));
        bufts   .push_back(ggml_backend_sched_get_buffer_type(lctx.get_sched(), backends.back()));
    }

    // Use a separate scheduler, for two reasons. The decode's scheduler would have to rebuild the decode's graph after
    // every edit. And when a scheduler's buffers are freed, a worker drops all graphs that use these buffers. The
    // separate scheduler has its own buffers, so the worker keeps the decode's graph
    ggml_backend_sched_ptr sched { ggml_backend_sched_new(
            backends.data(), bufts.data(), backends.size(), max_nodes, false, false) };

    for (input * i : inputs) {
        i->create(ctx);
    }

    ggml_tensor * k_rot = kv.build_input_k_rot(ctx);

    std::vector<ggml_backend_t> layer_backends;
    std::vector<ggml_tensor *>  results;

    for (size_t i = 0; i < p.layers.size(); ++i) {
        const int i_first = ggml_graph_n_nodes(gf);

        results.push_back(build(ctx, gf, i, k_rot));

        // Assign the operations to the device that holds the cache. Do not assign views: the viewed tensor may be an
        // input on the host, and its view must stay there
        const auto buft = ggml_backend_buffer_get_type(layers[p.layers[i]].k->buffer);
        const auto backend = std::find_if(backends.begin(), backends.end(),
                [&](ggml_backend_t b) { return ggml_backend_supports_buft(b, buft); });
        layer_backends.push_back(backend == backends.end() ? nullptr : *backend);
        if (layer_backends.back() && results.back() && results.back()->op == GGML_OP_NONE) {
            // the graph writes the layer's result to this tensor, so this tensor must lie on the cache's device as well
            ggml_backend_sched_set_tensor_backend(sched.get(), results.back(), layer_backends.back());
        }
        for (int j = i_first; backend != backends.end() && j < ggml_graph_n_nodes(gf); ++j) {
            ggml_tensor * node = ggml_graph_node(gf, j);
            if (!ggml_op_is_empty(node->op) && ggml_backend_supports_op(*backend, node)) {
                ggml_backend_sched_set_tensor_backend(sched.get(), node, *backend);
            }
        }
    }

    if (ggml_graph_n_nodes(gf) == 0) {
        return true;
    }

    // If all layers lie on one device, assign the lists to this device. Each list is then sent in one copy. Otherwise
    // the scheduler copies each layer's part of a list separately
    const bool is_one_backend = layer_backends[0] &&
        std::count(layer_backends.begin(), layer_backends.end(), layer_backends[0]) == (ptrdiff_t) layer_backends.size();
    for (const input * i : inputs) {
        if (is_one_backend && i->t) {
            ggml_backend_sched_set_tensor_backend(sched.get(), i->t, layer_backends[0]);
        }
    }

    if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {
        return false;
    }

    for (const input * i : inputs) {
        i->upload();
    }
    if (k_rot && k_rot->buffer) {
        kv.set_input_k_rot(k_rot);
    }
    if (ggml_backend_sched_graph_compute(sched.get(), gf) != GGML_STATUS_SUCCESS) {
        return false;
    }
    if (read) {
        read(results);
    }

    return true;
}

// group the layers by device: one part per device
static std::vector<part> parts_by_device(const std::vector<layer> & layers) {
    const auto buft_of = [&](size_t i) { return ggml_backend_buffer_get_type(layers[i].k->buffer); };

    std::vector<part> res;
    for (size_t i = 0; i < layers.size(); ++i) {
        auto it = std::find_if(res.begin(), res.end(), [&](const part & p) { return buft_of(p.layers[0]) == buft_of(i); });
        if (it == res.end()) {
            it = res.insert(it, { {}, nullptr });
        }
        it->layers.push_back(i);
    }
    return res;
}

bool graphs::compute_each(
        llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, size_t max_nodes,
        const std::vector<input *> & inputs, const build_t & build, const std::function<void (size_t i, const float * data)> & read) {
    lctx.synchronize();

    std::vector<float> data;
    for (const auto & p : parts_by_device(layers)) {
        const auto build_part = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * k_rot) {
            return build(ctx, gf, p.layers[i], k_rot);
        };
        const auto read_part = [&](const std::vector<ggml_tensor *> & results) {
            for (size_t i = 0; i < results.size(); ++i) {
                if (results[i]) {
                    data.resize(ggml_nelements(results[i]));
                    ggml_backend_tensor_get(results[i], data.data(), 0, ggml_nbytes(results[i]));
                    read(p.layers[i], data.data());
                }
            }
        };
        if (!compute(lctx, kv, layers, p, max_nodes, inputs, build_part, read_part)) {
            return false;
        }
    }
    return true;
}

void fit_shapes(const std::vector<layer> & layers, const part & p, bool v_trans, std::vector<layer_shape> & shapes) {
    // maximum number of unneeded bytes in the lists of an edit, per node of the cached graph
    static constexpr int64_t n_unneeded_node = 128;

    auto & cached = *p.graph;

    auto new_shapes = capacities(shapes, nullptr);

    bool    fits       = cached.gf;
    int64_t n_unneeded = 0;

    for (size_t i = 0; cached.gf && i < shapes.size(); ++i) {
        const auto & l = layers[p.layers[i]];

        fits = fits && holds(cached.shapes[i], shapes[i]);
        n_unneeded += list_bytes(l, cached.shapes[i], v_trans) - list_bytes(l, new_shapes[i], v_trans);
    }

    // The lists of a cached graph have fixed lengths, so an edit fills them up with entries that it does not need. If
    // there are too many such entries, sending them costs more than sending a new graph with shorter lists
    const bool is_wasteful = cached.gf && n_unneeded > ggml_graph_n_nodes(cached.gf)*n_unneeded_node;

    if (fits && !is_wasteful) {
        shapes = cached.shapes;
        return;
    }
    shapes = cached.gf && !is_wasteful ? capacities(shapes, &cached.shapes) : std::move(new_shapes);
    cached.clear();
}

} // namespace kvtool
