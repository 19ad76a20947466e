// The last n_query queries of each layer, in the form in which they are multiplied with the keys. They stay on the
// device, and edits do not change them.

#pragma once

#include "layer.h"
#include "hooks/llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct llama_ubatch;

namespace kvtool {

class queries {
public:
    // must outlive this object
    queries(const llama_kvtool_params & params) : params(params) {}

    bool is_on() const { return params.n_future > 0; }

    // a layer of the model that attends to rows, and its stored queries
    struct asker {
        int    il;
        size_t i;      // index of the layer whose cells it reads
        int    n_embd; // elements of a query of one head
        int    n_head; // query heads
        float  scale;  // scale of its logits, read from its graph

        ggml_tensor * t; // F32 [n_embd*n_head, n_slot], in the cache's memory type: a ring buffer with one slot per
                         // query
    };

    std::vector<asker> askers;

    // Create empty slots for these layers (their tensors are null) in memory of the types of their caches;
    // returns false if there is no memory
    bool make(std::vector<asker> all, const std::vector<layer> & layers);

    // store the queries q [n_embd, n_tokens, n_head] of a layer, or the last of them, in slots I64 [n]
    ggml_tensor * build(ggml_context * ctx, int il, ggml_tensor * q, ggml_tensor * slots, float scale);

    // there are n_ahead more slots, so that removed queries have not overwritten older ones
    int n_slot() const { return params.n_query + params.n_ahead; }

    // slot of the next batch's query t
    int64_t slot(int64_t t) const { return (next + t) % n_slot(); }

    // note the positions of the last n queries of a batch that is about to be computed
    void note(const llama_ubatch & ubatch, int64_t n);

    // count the n_tokens queries of a computed graph
    void decoded(int n_tokens) { next = is_on() ? slot(n_tokens) : 0; }

    // remove the last n queries of the last batch
    void take_back(int n) { next = is_on() ? slot(n_slot() - n) : 0; }

    // slot of query t of the last n_query, the oldest first
    int64_t past(int64_t t) const { return slot(params.n_ahead + t); }

    // position that each slot's query is rotated to; -1: the slot is empty
    std::vector<int32_t> pos;

    // elements of a query in all layers together
    int64_t n_number() const;

    // copy the last n_query queries, the oldest first, to out[n_query][n_number] and at[n_query] or from in and
    // at. at: position that a query is rotated to; negative: there is no such query
    void copy(float * out, const float * in, int32_t * at);

    void clear();

private:
    const llama_kvtool_params & params;

    struct memory {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buf;
    };

    std::vector<memory> memories;

    int64_t next = 0; // slot of the next query
};

} // namespace kvtool
