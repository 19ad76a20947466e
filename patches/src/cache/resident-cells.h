// Residents on the devices: their masks, the queries of the last step, and the graph that writes keys and values to cells.

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
    // an asker's `t` is its part of each row of its device's `queries`
    using asker = stored_queries::asker;

    // Reason why no residents are possible with these layers; empty if they are
    static std::string unsupported(const std::vector<layer> & layers, bool v_trans, bool has_flash);

    // n_query: maximum tokens of a step; n_filled: cells before the residents' that steps fill from the archive, masked
    // here; n_thread: threads that choose. Throws no_room if a device lacks memory
    resident_cells(
            const archive & tokens, const std::vector<layer> & layers, std::vector<asker> askers, int n_mean, int n_token, int n_query,
            int n_filled, int n_thread);

    // Cells at the end of each row: those of `residents`, and at least one more, which is never seen
    static int region(int n_mean, int n_token);

    // Bytes on devices
    int64_t bytes() const;

    // Store a step's queries [n_embd, n_head, n_tokens] of a layer of the model, in the slots I64 [n_tokens]
    ggml_tensor * store(ggml_context * ctx, int il, ggml_tensor * queries, ggml_tensor * slots, float scale);

    // Bring all cells and masks up to date. rot: position that the next query is rotated to. Returns false if a device failed
    bool place(llama_context & lctx, int64_t rot, uint64_t version);

    // Choose the residents of the next step with the queries of the last step; see residents::choose. n_live: live cells;
    // cap: soft cap of logits
    float choose(int n_live, float cap);

    // The keys of live cells have changed, except those in the first n cells
    void forget_live(int n = 0) { n_copied = std::min(n_copied, n); }

    // mask of a layer's device: F16 [n_filled + n_region, 1, 1, rows on the device], and the layer's first row there
    ggml_tensor * mask(size_t layer) const { return devices[homes[layer].device].mask; }
    int           first_row(size_t layer) const { return homes[layer].row; }

    residents chosen;

    const int n_query;
    const int n_region;

    int  n_asked = 0;    // queries that have not chosen yet
    bool is_fit  = true; // the cells can stand for the archive

private:
    // keys, values and numbers of cells on a device, for a layer
    struct upload {
        ggml_tensor * at; // I64: cell*n_head + head
        ggml_tensor * k;
        ggml_tensor * v;
    };

    struct device {
        ggml_backend_buffer_type_t buft;

        std::vector<size_t> layers;
        int n_row  = 0;
        int n_number = 0; // elements of a token's queries

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor           * mask;
        ggml_tensor           * queries;    // F32 [n_number, n_query]: a token's queries of all layers, so that one copy reads them
        std::vector<upload>     uploads; // [layers]
        ggml_tensor           * all_uploads; // the memory of all uploads, so that one copy fills them

        ggml_context_ptr  graph_ctx;
        ggml_gallocr_ptr  alloc;
        ggml_cgraph     * graph   = nullptr;
        uint64_t          version = 0; // of the cache's tensors that the graph writes to

        std::vector<uint8_t> upload_data; // contents of `all_uploads`; stays until the device has read it
        std::vector<float>   query_data;  // contents of `queries`
    };

    struct home {
        size_t device;
        int    row;
    };

    const std::vector<layer> & layers;
    std::vector<asker>         askers;

    const int n_filled;

    // keys of the first n_copied live cells, in the cache's format [cell][head], per layer
    std::vector<std::vector<uint8_t>> live;
    int n_copied = 0;

    std::vector<device> devices;
    std::vector<home>   homes; // [layer]

    // the masks on the devices, [layer]
    std::vector<std::vector<ggml_fp16_t>> masks;

    workers threads;

    void make_device(device & d);
    bool make_graph(device & d, uint64_t version);
    bool write(ggml_backend_t backend, device & d, const std::vector<residents::cells> & all);
    void write_masks(ggml_backend_t backend, device & d);

    void  copy_live(int n_live);
    void  sum_live(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, float * sums) const;
    float choose_layer(size_t layer, float cap);

    // call f(i) for 0 <= i < n, shared by all threads; throws if a thread failed
    void share(int n, const std::function<void (int)> & f);
};

} // namespace kvtool
