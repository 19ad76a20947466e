// Queries of past tokens. They stay on the devices.

#pragma once

#include "layer.h"
#include "hooks/llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_ubatch;

namespace kvtool {

// Queries of each layer, after RoPE. They lie on the device of the layer's cache, or on the host if the device lacks
// memory
class stored_queries {
public:
    // a layer of the model that attends to rows, and its stored queries
    struct attn_layer {
        int    il;
        size_t i;      // Index in `layers` of the layer whose cells this layer reads.
        int    n_embd; // Elements of a query of one head.
        int    n_head; // Number of query heads.

        float         scale = 0.0f;    // Scale of the layer's logits, read from the decode's graph.
        ggml_tensor * sinks = nullptr; // The layer's attention sinks, read from the decode's graph.

        ggml_tensor * t = nullptr; // F32 [n_embd*n_head, n_slot]: one slot per query
    };

    std::vector<attn_layer> attn_layers;

    // create n_slot empty slots for these layers; returns false if there is no memory
    bool make(std::vector<attn_layer> new_layers, const std::vector<layer> & layers, int n_slot);

    // store the last n of a layer's queries q [n_embd, n_tokens, n_head] in the slots I64 [n]
    ggml_tensor * build(ggml_context * ctx, int il, ggml_tensor * q, ggml_tensor * slots, float scale, ggml_tensor * sinks);

    // elements of a query in all layers together
    int64_t n_embd_all() const;

    // bytes of all slots
    int64_t n_bytes() const;

private:
    struct memory {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    std::vector<memory> memories;
};

// the last n_query queries, in a ring buffer. Edits do not change them
class queries : public stored_queries {
public:
    // params must outlive this object
    queries(const llama_kvtool_params & params) : params(params) {}

    bool is_on() const { return params.n_future > 0; }

    bool make(std::vector<attn_layer> new_layers, const std::vector<layer> & layers);

    // There are n_draft additional slots. Draft tokens therefore do not overwrite the n_query queries before them,
    // which are needed if the draft tokens are removed
    int n_slot() const { return params.n_query + params.n_draft; }

    // slot of the next batch's query t
    int64_t slot(int64_t t) const { return (next + t) % n_slot(); }

    // set the positions of the last n queries of a batch that is about to be computed
    void set_positions(const llama_ubatch & ubatch, int64_t n);

    // move on to the slot after n_tokens queries; call this when their graph has been computed
    void decoded(int n_tokens) { next = is_on() ? slot(n_tokens) : 0; }

    // remove the last n queries of the last batch
    void remove(int n) { next = is_on() ? slot(n_slot() - n) : 0; }

    // slot of query t of the last n_query queries; query 0 is the oldest
    int64_t past_slot(int64_t t) const { return slot(params.n_draft + t); }

    // position that each slot's query is rotated to; -1 if the slot is empty
    std::vector<int32_t> pos;

    // Copy the last n_query queries, the oldest first, to out[n_query][n_embd_all] or from in[n_query][n_embd_all]; the
    // other pointer is null. query_pos[n_query] has the position that each query is rotated to, or a negative number if
    // there is no such query; it is copied in the same direction
    void copy(float * out, const float * in, int32_t * query_pos);

    void clear();

private:
    const llama_kvtool_params & params;

    int64_t next = 0; // slot of the next query
};

// queries whose signals are computed later: see deferred.cpp
class deferred : public stored_queries {
public:
    int n_slot = 0; // Number of slots. 0 if every step computes its own signals.
    int n      = 0; // Number of queries whose signals are not computed yet. They are in the first slots.

    std::vector<int64_t> n_seen; // tokens that each of these n queries has seen

    void add(int n_tokens, int64_t n_before) {
        n += n_tokens;
        while ((int) n_seen.size() < n) {
            n_seen.push_back(++n_before);
        }
    }

    void remove(int n_tokens) {
        n -= n_tokens;
        n_seen.resize(n);
    }
};

} // namespace kvtool
