// Sums of the signals since the last edit, on the host and on devices.

#pragma once

#include "hooks/hooks.h"
#include "layer.h"
#include "hooks/llama-kvtool.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <vector>

namespace kvtool {

class signals {
public:
    static constexpr int n_signal = llama_kvtool_graph::n_signal;

    // layers and params must outlive this object
    signals(const std::vector<layer> & layers, const llama_kvtool_params & params) : layers(layers), params(params) {}

    // true if signal s is enabled and summed here. The recent signal is not summed here, see recent.h
    bool has(int s) const {
        return (params.signals & ~LLAMA_KVTOOL_SIGNAL_RECENT) >> s & 1;
    }

    // resize to the layers' present numbers of cells; call `collect` first, because the sums on devices are lost
    void resize();

    // add a batch's signal s [n_kv, 1, n_head] of layer i to its sum on the device; returns null if the host keeps this
    // sum
    ggml_tensor * build_sum(ggml_context * ctx, size_t i, int s, ggml_tensor * t, int64_t n_tokens) const;

    // start to copy the signals that the host adds up; call this when the graph has been computed
    void extract(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens);

    // Add signal s [n] of n_query queries to a row's sum. These queries must be newer than all queries that were added
    // before. Call `collect` first
    void add(int s, int row, const float * src, size_t n, int n_query) {
        fold(s, src, sums[s][row].data(), n, n_query);
    }

    // copy all sums to the host, so that values() is complete
    void collect(llama_context & lctx);

    void clear(llama_context & lctx);

    // sums of signal s, after collect: [n_row][n_cell of the row's layer]
    std::vector<std::vector<float>> & values(int s) { return sums[s]; }

private:
    // Sums of all layers whose cache lies on one device, in that device's memory. They are copied to the host only when
    // they are read. Copies after every batch would be most of the traffic to a device of another machine
    struct device_sums {
        ggml_backend_buffer_type_t buft;

        size_t n = 0; // floats per signal

        ggml_context_ptr ctx;

        ggml_tensor *           t  [n_signal] = {};
        ggml_backend_buffer_ptr buf[n_signal];

        void clear() const;
    };

    // location of a layer's sums
    struct location {
        int    i_device = -1; // Index in `devices`. -1 if the sums are on the host.
        size_t offset   = 0;  // Index in the device's sums where the layer's sums [n_head][n_cell] begin.
    };

    const std::vector<layer>  & layers;
    const llama_kvtool_params & params;

    std::vector<std::vector<float>> sums[n_signal];

    // copies of the last batch's signals on their way to the host: [n_layer][n_head*n_kv]
    std::vector<std::vector<float>> pending[n_signal];

    int n_query_pending = 0; // number of queries of these copies; 0 if no copies are on their way

    std::vector<device_sums> devices;
    std::vector<location>    locations; // one per layer

    int n_query_device = 0; // queries since the devices' sums were cleared

    bool make_device_sums();

    void fold(llama_context & lctx);
    void fold(int s, const float * src, float * dst, size_t n, int n_query) const;

    void collect(int s, const float * src, std::vector<float> & dst) const;

    void clear_devices();
};

} // namespace kvtool
