// The attention of each of the last n_query queries. The recent signal is their sum; the oldest query can leave it at any
// time, whatever the batches were. Edits move the attention along with the cells.

#pragma once

#include "layer.h"
#include "llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_context;

namespace kvtool {

struct layer_edit;

class recent {
public:
    // both outlive this
    recent(const std::vector<layer> & layers, const llama_kvtool_params & params) : layers(layers), params(params) {}

    bool is_on() const {
        return params.signals & LLAMA_KVTOOL_SIGNAL_RECENT;
    }

    // the queries' attention to the cells of all layers on one device: slots in a circle, one a query
    struct ring {
        ggml_backend_buffer_type_t buft;

        size_t n = 0; // floats of a slot: [layer][n_head][n_cell]

        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;

        ggml_tensor * t = nullptr; // [n_slot*n], beside the cache

        std::vector<float> copy; // the same on the host, complete after collect; empty where t itself is on the host

        float * data();
    };

    // where a layer begins in a slot
    struct place {
        size_t ring;
        size_t first;
        int    n_cell;
    };

    struct rings {
        std::vector<ring>  all;
        std::vector<place> places; // one a layer

        // layer i's head in a slot
        float * at(int slot, size_t i, int head) {
            const auto & p = places[i];
            return all[p.ring].data() + slot*all[p.ring].n + p.first + (size_t) head*p.n_cell;
        }
    };

    // makes empty rings for layers of so many cells; false: there is no memory
    bool make(rings & res, const int * n_cell) const;

    // replaces the rings by these, and keeps what they hold; collect comes first
    void take(rings && res);

    // stores the attention t [n_kv, q, n_head] of the last queries to layer i's cells in slots I64 [q]
    ggml_tensor * build(ggml_context * ctx, size_t i, ggml_tensor * t, ggml_tensor * slots) const;

    // queries that were taken back may not have taken the place of older ones
    int n_slot() const { return params.n_query + params.n_ahead; }

    // the slot of the next batch's query t
    int64_t slot(int64_t t) const { return (next + t) % n_slot(); }

    // the last n queries of the last batch do not count
    void take_back(int n);

    // a graph with n_tokens queries has been computed
    void decoded(int n_tokens);

    // copies what devices have stored to the host
    void collect(llama_context & lctx);

    // the following work on what has been collected

    // out[n_cell]: the sum over the queries, from the oldest to the newest, of layer i's head; 0 beyond the layer's cells
    void sum(size_t i, int head, float * out, int n_cell);

    // copies the queries, the oldest first, to out[n_query][n_row][n_cell] or from in; what is missing is 0
    void copy(float * out, const float * in, int n_cell);

    // moves cells as an edit does, and empties those that it frees; edits: the edit by layer
    void move(const llama_kvtool_edit & edit, const std::vector<layer_edit> & edits);

    void clear();

private:
    const std::vector<layer>  & layers;
    const llama_kvtool_params & params;

    rings own;

    // the slot of the last n_query queries' tth, the oldest first
    int64_t past(int64_t t) const { return slot(params.n_ahead + t); }

    int64_t next  = 0;     // the slot of the next query
    int     n_new = 0;     // how many of the last queries are still to be collected
    bool    stale = false; // devices have stored a query since they were cleared

    void clear_devices();
};

} // namespace kvtool
