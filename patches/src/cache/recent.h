// Attention of each of the last n_query queries. The recent signal is the sum over these queries. The attention of each
// query is stored separately, so that old queries can be dropped one by one. Edits move the attention along with the
// cells.

#pragma once

#include "layer.h"
#include "hooks/llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_context;

namespace kvtool {

struct layer_edit;

class recent {
public:
    // layers and params must outlive this object
    recent(const std::vector<layer> & layers, const llama_kvtool_params & params) : layers(layers), params(params) {}

    bool is_on() const {
        return params.signals & LLAMA_KVTOOL_SIGNAL_RECENT;
    }

    // Attention of the queries to the cells of all layers on one device: a ring buffer with one slot per query
    struct ring {
        ggml_backend_buffer_type_t buft;

        size_t n = 0; // floats per slot: [layer][n_head][n_cell]

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;

        ggml_tensor * t = nullptr; // [n_slot*n], on the cache's device, or on the host if the device lacks memory

        // copy on the host, complete after `collect`; empty if t itself is on the host
        std::vector<float> copy;

        float * data();
    };

    // where a layer's attention begins in a slot
    struct location {
        size_t i_ring;
        size_t offset;
        int    n_cell;
    };

    struct ring_buffers {
        std::vector<ring>     rings;
        std::vector<location> locations; // one per layer

        // attention of layer i's head in a slot
        float * at(int slot, size_t i, int head) {
            const auto & loc = locations[i];
            return rings[loc.i_ring].data() + slot*rings[loc.i_ring].n + loc.offset + (size_t) head*loc.n_cell;
        }
    };

    // create empty ring buffers for layers with these numbers of cells; returns false if there is no memory
    bool make(ring_buffers & res, const int * n_cell) const;

    // Use these ring buffers from now on, and copy the content of the previous ring buffers to them. Call `collect`
    // first
    void replace(ring_buffers && new_buffers);

    // store t [n_kv, q, n_head], the attention of the last q queries to layer i's cells, in the slots I64 [q]
    ggml_tensor * build(ggml_context * ctx, size_t i, ggml_tensor * t, ggml_tensor * slots) const;

    int n_slot() const { return params.n_query; }

    // slot of the next batch's query t
    int64_t slot(int64_t t) const { return (next + t) % n_slot(); }

    // move on to the slot after n_tokens queries; call this when their graph has been computed
    void decoded(int n_tokens);

    // copy the ring buffers of devices to the host
    void collect(llama_context & lctx);

    // call `collect` before the functions below

    // Write the recent signal of a head of layer i to out[n_cell]. It is the sum of the queries' attention, added from
    // the oldest to the newest query. It is 0 beyond the layer's cells
    void sum(size_t i, int head, float * out, int n_cell);

    // Copy the attention of the last n_query queries, the oldest first, to out[n_query][n_row][n_cell] or from in; the
    // other pointer is null. If the source has fewer cells than the destination, the remaining cells become 0
    void copy(float * out, const float * in, int n_cell);

    // move the attention as an edit moves the cells, and clear the cells that the edit frees. edits: the edit split by
    // layer
    void move(const llama_kvtool_edit & edit, const std::vector<layer_edit> & edits);

    void clear();

private:
    const std::vector<layer>  & layers;
    const llama_kvtool_params & params;

    ring_buffers buffers;

    // slot of query t of the last n_query queries; query 0 is the oldest
    int64_t past_slot(int64_t t) const { return slot(t); }

    int64_t next     = 0;     // Slot of the next query.
    int     n_new    = 0;     // Number of the newest queries whose attention `collect` has not copied yet.
    bool    is_stale = false; // True if devices have stored a query since their ring buffers were cleared.

    void clear_devices();
};

} // namespace kvtool
