// Graphs of kvtool's own, beside the decode's: edits, reads of keys, copies.

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

// an input of a graph, filled on the host before the tensor is made: one list for all layers
struct input {
    ggml_type type;

    std::vector<uint8_t> data;

    ggml_tensor * t = nullptr;

    // begins the next layer's part, where a device allows a view to begin
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

// a graph that its worker keeps as well, so that later it is asked for by its number. ggml's server keeps one graph for
// each of its devices, and that of the device with the layers is the decode's: a kept graph is computed on a spare
struct kept_graph {
    ggml_backend_buffer_type_t buft; // of the device where the layers lie

    ggml_backend_ptr backend; // of the spare
    ggml_gallocr_ptr alloc;
    ggml_context_ptr ctx;

    ggml_cgraph * gf = nullptr;

    std::vector<ggml_tensor *> inputs;
    std::vector<ggml_tensor *> outputs;

    std::vector<layer_shape> shapes; // the lengths of its lists

    bool unfit = false; // something that it reads lies on another device: never kept

    void clear() {
        gf = nullptr;
        inputs.clear();
        outputs.clear();
        shapes.clear();
    }
};

enum kept_use { KEPT_EDITS, KEPT_KEYS, KEPT_CELLS, n_kept };

// the layers that one graph is for
struct part {
    std::vector<size_t> layers;

    kept_graph * kept; // null: the scheduler computes it

    // where a layer's part of a list may begin: 256 will do for every device
    size_t align() const;
};

// a part of all these layers, for the scheduler
part all_of(const std::vector<layer> & layers);

// parts whose layers lie on one device each, for the scheduler: lists go to each device once
std::vector<part> by_device(const std::vector<layer> & layers);

class graphs {
public:
    // adds the part's layer i to the graph and returns its result, or what that is written to, null if it has none; rot: the rotation of
    // quantized keys, null without one
    using build_t = std::function<ggml_tensor * (ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * rot)>;

    // reads the results before their memory is reused
    using read_t = std::function<void (const std::vector<ggml_tensor *> & results)>;

    // the layers by the graph that serves them
    std::vector<part> parts(const std::vector<layer> & layers, kept_use use);

    // builds and computes a graph over the part's layers; false: a device has failed
    bool compute(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p, size_t max_nodes,
            const std::vector<input *> & inputs, const build_t & build, const read_t & read = {});

    // the tensors of the layers are others now
    void clear();

private:
    std::vector<uint8_t> buf_graph;

    std::map<ggml_backend_buffer_type_t, std::array<kept_graph, n_kept>> kept;

    kept_graph * kept_of(const layer & l, kept_use use);
};

// gives an edit's lists the lengths of the kept graph, or drops that graph and gives them those of a new one
void fit(const std::vector<layer> & layers, const part & p, bool v_trans, std::vector<layer_shape> & shapes);

} // namespace kvtool
