// Graphs that kvtool computes in addition to the decode's graph: edits, reads of keys, copies.

#pragma once

#include "layer.h"
#include "shapes.h"

#include "ggml-cpp.h"

#include <array>
#include <functional>
#include <map>
#include <vector>

class  llama_kv_cache;
struct llama_context;

namespace kvtool {

// input of a graph: one list for all layers, filled on the host before the tensor is created
struct input {
    ggml_type type;

    std::vector<uint8_t> data;

    ggml_tensor * t = nullptr;

    // begin the next layer's part: pad the list to an offset at which devices allow a view to begin, and return this
    // offset
    size_t start(size_t align) {
        data.resize(GGML_PAD(data.size(), align));
        return data.size();
    }

    template <typename T> void push(T value) {
        const auto * bytes = (const uint8_t *) &value;
        data.insert(data.end(), bytes, bytes + sizeof(T));
    }

    void create(ggml_context * ctx);
    void upload() const;

    ggml_tensor * view(ggml_context * ctx, size_t start, int64_t n) const {
        return ggml_view_1d(ctx, t, n, start);
    }
};

// A graph that this process and a worker (ggml's RPC server) both keep, so that a later request sends only the graph's
// id. The server keeps one graph per device, and the device with the layers has the decode's graph. All other graphs
// are therefore computed on a spare: a second handle of that device
struct cached_graph {
    ggml_backend_buffer_type_t buft; // buffer type of the device that holds the layers

    ggml_backend_ptr backend; // computes the graph on the spare
    ggml_gallocr_ptr alloc;
    ggml_context_ptr ctx;

    ggml_cgraph * gf = nullptr;

    std::vector<ggml_tensor *> inputs;
    std::vector<ggml_tensor *> outputs;

    std::vector<layer_shape> shapes; // one per layer: lengths of the lists that the graph reads

    // true if the graph cannot be cached, because it reads a tensor that is not on the layers' device
    bool is_uncacheable = false;

    void clear() {
        gf = nullptr;
        inputs.clear();
        outputs.clear();
        shapes.clear();
    }
};

enum graph_use { GRAPH_EDITS, GRAPH_KEYS, GRAPH_CELLS, n_graph_use };

// layers that are served by one graph
struct part {
    std::vector<size_t> layers;

    cached_graph * graph; // null if the scheduler computes the graph

    // alignment of a layer's part of a list; 256 is enough for every device
    size_t align() const;
};

// return one part with all these layers; a ggml scheduler computes its graph
part single_part(const std::vector<layer> & layers);

class graphs {
public:
    // Adds layer i of the part to the graph. Returns the tensor that has the layer's result after the graph is
    // computed, or null if there is no result. k_rot: Hadamard matrix of quantized keys; null if keys are not
    // multiplied by one
    using build_t = std::function<ggml_tensor * (ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * k_rot)>;

    // called with the results after the graph is computed, and before their memory is reused
    using read_t = std::function<void (const std::vector<ggml_tensor *> & results)>;

    // layers grouped by the graph that serves them
    std::vector<part> parts(const std::vector<layer> & layers, graph_use use);

    // build and compute a graph over the part's layers; returns false if a device failed
    bool compute(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p, size_t max_nodes,
            const std::vector<input *> & inputs, const build_t & build, const read_t & read = {});

    // Wait for the last decode, then compute one graph per device, and call read(i, data) for each layer i that has a
    // result. Results must be F32. `build` gets indices in `layers`. An input is sent to a device only once, because
    // one graph reads it. Returns false if a device failed
    bool compute_each(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, size_t max_nodes,
            const std::vector<input *> & inputs, const build_t & build, const std::function<void (size_t i, const float * data)> & read);

    // drop the cached graphs; call this if the tensors of the layers have changed
    void clear();

private:
    std::vector<uint8_t> buf_graph;

    std::map<ggml_backend_buffer_type_t, std::array<cached_graph, n_graph_use>> cached;

    cached_graph * find_cached(const layer & l, graph_use use);
};

// On entry, `shapes` has the lengths that an edit needs for its lists. They are replaced by the lengths that the graph
// uses. If the edit uses the cached graph, these are the lengths in this graph. Otherwise they are lengths for a new
// graph, and the cached graph is dropped
void fit_shapes(const std::vector<layer> & layers, const part & p, bool v_trans, std::vector<layer_shape> & shapes);

} // namespace kvtool
