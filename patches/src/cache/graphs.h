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

// A graph that is kept by this process and also by a worker (ggml's RPC server), so that a later request sends only the
// graph's id. The server keeps one graph for each of its devices. The device with the layers keeps the decode's graph.
// Other graphs are therefore computed on a spare, which is a second handle of that device
struct kept_graph {
    ggml_backend_buffer_type_t buft; // buffer type of the device that holds the layers

    ggml_backend_ptr backend; // computes the graph on the spare
    ggml_gallocr_ptr alloc;
    ggml_context_ptr ctx;

    ggml_cgraph * gf = nullptr;

    std::vector<ggml_tensor *> inputs;
    std::vector<ggml_tensor *> outputs;

    std::vector<layer_shape> shapes; // lengths of the lists that the graph reads

    // true if the graph cannot be kept, because it reads a tensor on another device
    bool unfit = false;

    void clear() {
        gf = nullptr;
        inputs.clear();
        outputs.clear();
        shapes.clear();
    }
};

enum kept_use { KEPT_EDITS, KEPT_KEYS, KEPT_CELLS, n_kept };

// layers that are served by one graph
struct part {
    std::vector<size_t> layers;

    kept_graph * kept; // null if the scheduler computes the graph

    // alignment of a layer's part of a list; 256 is enough for every device
    size_t align() const;
};

// put all these layers into one part, whose graph a ggml scheduler computes
part all_of(const std::vector<layer> & layers);

// Put the layers of each device into one part, whose graph a ggml scheduler computes. A list is then sent to each
// device only once
std::vector<part> by_device(const std::vector<layer> & layers);

class graphs {
public:
    // Adds the part's layer i to the graph. Returns the layer's result, or the tensor that the graph writes the result
    // to, or null if there is no result. rot: Hadamard matrix of quantized keys; null if keys are not multiplied by one
    using build_t = std::function<ggml_tensor * (ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * rot)>;

    // reads the results; called before their memory is reused
    using read_t = std::function<void (const std::vector<ggml_tensor *> & results)>;

    // layers grouped by the graph that serves them
    std::vector<part> parts(const std::vector<layer> & layers, kept_use use);

    // build and compute a graph over the part's layers; returns false if a device failed
    bool compute(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p, size_t max_nodes,
            const std::vector<input *> & inputs, const build_t & build, const read_t & read = {});

    // drop the kept graphs, because the tensors of the layers have changed
    void clear();

private:
    std::vector<uint8_t> buf_graph;

    std::map<ggml_backend_buffer_type_t, std::array<kept_graph, n_kept>> kept;

    kept_graph * kept_of(const layer & l, kept_use use);
};

// Set the lengths of an edit's lists. If the lists fit into the kept graph's lists, they get the same lengths.
// Otherwise drop the kept graph and choose lengths for a new graph
void fit(const std::vector<layer> & layers, const part & p, bool v_trans, std::vector<layer_shape> & shapes);

} // namespace kvtool
