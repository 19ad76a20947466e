// The last n_query queries of each layer, as they met the keys. They stay on the device, and no edit changes them.

#pragma once

#include "layer.h"
#include "llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_ubatch;

namespace kvtool {

class queries {
public:
    // outlives this
    queries(const llama_kvtool_params & params) : params(params) {}

    bool is_on() const { return params.n_future > 0; }

    // a layer of the model that attends to rows
    struct asker {
        int    il;
        size_t i;      // the layer whose cells it reads
        int    n_embd; // numbers in a query of one head
        int    n_head; // its query heads
        float  scale;  // of its logits, as its graph says

        ggml_tensor * t; // F32 [n_embd*n_head, n_slot], beside the cache: slots in a circle, one a query
    };

    std::vector<asker> askers;

    // Makes empty slots for these, whose tensors are null, in memory of the types of their layers' caches; false: there is none
    bool make(std::vector<asker> all, const std::vector<layer> & layers);

    // stores the queries q [n_embd, n_tokens, n_head] of a layer, or the last of them, in slots I64 [n]
    ggml_tensor * build(ggml_context * ctx, int il, ggml_tensor * q, ggml_tensor * slots, float scale);

    // queries that are taken back may not have taken the place of older ones
    int n_slot() const { return params.n_query + params.n_ahead; }

    // the slot of the next batch's query t
    int64_t slot(int64_t t) const { return (next + t) % n_slot(); }

    // the last n queries of a batch, which is about to be computed
    void note(const llama_ubatch & ubatch, int64_t n);

    // a graph with n_tokens queries has been computed
    void decoded(int n_tokens) { next = is_on() ? slot(n_tokens) : 0; }

    // the last n queries of the last batch do not count
    void take_back(int n) { next = is_on() ? slot(n_slot() - n) : 0; }

    // the slot of the last n_query queries' tth, the oldest first
    int64_t past(int64_t t) const { return slot(params.n_ahead + t); }

    // what each slot's query is rotated to; -1: there is none
    std::vector<int32_t> pos;

    // numbers of a query, of all layers together
    int64_t n_number() const;

    // copies the last n_query queries, the oldest first, to out[n_query][n_number] and at[n_query] or from in and at. Such a query has
    // been if at is 0 or more, which is what it is rotated to
    void copy(float * out, const float * in, int32_t * at);

    void clear();

private:
    const llama_kvtool_params & params;

    struct memory {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    std::vector<memory> memories;

    int64_t next = 0; // the slot of the next query
};

} // namespace kvtool
