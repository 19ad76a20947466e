// Residents on the devices: their masks, the queries of the last step, and the graph that writes keys and values to
// cells. Residents are cells that represent the archive, see archive/residents.h.

#pragma once

#include "archive/residents.h"
#include "archive/workers.h"
#include "queries.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct llama_context;

namespace kvtool {

class resident_cells {
public:
    // attn_layer::t is a view of `device::queries`: the elements of this layer
    using attn_layer = stored_queries::attn_layer;

    // reason why these layers cannot have residents; empty if they can
    static std::string unsupported(const std::vector<layer> & layers, bool v_trans, bool has_flash);

    // n_query: maximum number of tokens of a step. n_filled: number of cells that steps fill from the archive. They lie
    // before the residents' cells, and steps with residents do not see them. n_thread: number of threads that choose
    // residents. Throws out_of_space if a device lacks memory
    resident_cells(
            const archive & tokens, const std::vector<layer> & layers, std::vector<attn_layer> attn_layers, const resident_sizes & n, int n_query,
            int n_filled, int n_thread);

    // number of cells at the end of each row: the residents' cells, and at least one more cell, which no query sees
    static int region(const resident_sizes & n);

    int64_t bytes() const;

    // store the queries [n_embd, n_head, n_tokens] of layer il of the model in the slots I64 [n_tokens]
    ggml_tensor * store(ggml_context * ctx, int il, ggml_tensor * queries, ggml_tensor * slots, float scale);

    // Bring the cells and masks of the residents up to date. rot: position that the next query is rotated to. The
    // devices must not be computing when this is called. Copies may still run when it returns; later steps of lctx are
    // computed after these copies. Returns false if a device failed
    bool update(llama_context & lctx, int64_t rot);

    // Choose the residents of the next step with the queries of the last step: see residents::choose. Returns the
    // result of llama_kvtool_missed. n_live: number of live cells; cap: soft cap of logits
    float choose(int n_live, float cap);

    // drop the copied keys of all live cells but the first n; call this if the keys in these cells have changed
    void forget_live(int n = 0) { n_copied = std::min(n_copied, n); }

    // mask: the mask on the layer's device, F16 [n_filled + n_region, 1, 1, rows on the device]. first_row: index of
    // the layer's first row in this mask
    ggml_tensor * mask(size_t layer) const { return devices[locations[layer].i_device].mask; }
    int           first_row(size_t layer) const { return locations[layer].row_0; }

    residents selection;

    const int n_query;
    const int n_region;

    int  n_stored = 0;    // Number of stored queries that `choose` has not used yet.
    bool is_fit   = true; // True if the cells can represent the archive.

private:
    struct device {
        ggml_backend_buffer_type_t buft;

        std::vector<size_t> layers;
        int n_row      = 0;
        int n_embd_all = 0; // elements of a token's queries in all layers on the device

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor           * mask;
        // F32 [n_number, n_query]: the queries of all layers are in one tensor, so one copy reads all of them
        ggml_tensor           * queries;
        ggml_tensor           * upload; // I8: keys and values of new cells. One copy fills it for many layers.

        // Contents of the three tensors on the host. mask_data and upload_data must not change while a device copies
        // them
        ggml_backend_buffer_ptr mask_data;
        ggml_backend_buffer_ptr query_data;
        ggml_backend_buffer_ptr upload_data;

        // The graph that writes cells, and its memory. The memory is used again, because CUDA's backend keeps a record
        // for each address of a graph
        ggml_context_ptr     graph_ctx;
        std::vector<uint8_t> graph_memory;

        ggml_fp16_t * masks_of(int row) const;
    };

    // Cells of a layer in `upload`. idx, k and v are byte offsets: at `idx` begin the indices cell*n_head + head (I64),
    // at `k` the keys, at `v` the values
    struct part {
        size_t  layer;
        int64_t first; // index of the first cell in `changed_cells`
        int64_t n;
        size_t  idx;
        size_t  k;
        size_t  v;
    };

    struct location {
        size_t i_device;
        int    row_0; // index of the layer's first row in the device's mask
    };

    const std::vector<layer> & layers;
    std::vector<attn_layer>    attn_layers;

    const int n_filled;

    // for each layer: keys of the first n_copied live cells in the cache's format, [cell][head]
    std::vector<std::vector<uint8_t>> live_keys;
    int n_copied = 0;

    std::vector<device>   devices;
    std::vector<location> locations; // [layer]

    std::vector<residents::cells> changed_cells; // [layer]; a member because it takes long to allocate

    workers threads;

    void make_device(device & d);
    bool write(ggml_backend_t backend, device & d);
    void fill(const device & d, const part & p) const;
    ggml_cgraph * make_graph(device & d, const std::vector<part> & parts) const;
    void copy_mask(size_t layer);

    void copy_live(int n_live);
    void sum_live(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, float * sums) const;

    // for each token: the attention that its queries missed, summed over the layer's query heads
    std::vector<float> choose_layer(size_t layer, float cap);

    // call f(i) for 0 <= i < n, distributed over all threads; throws if a thread failed
    void parallel_for(int n, const std::function<void (int)> & f);
};

} // namespace kvtool
