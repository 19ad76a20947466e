// The archive of a context, and the ggml operation that recalls from it while a graph is computed.

#pragma once

#include "archive.h"
#include "attention.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace kvtool {

class recaller;
class staging;

// data for the recall of one layer
struct recalled_layer {
    recaller * all;
    size_t     i;

    logit_params logits; // of the newest graph
    ggml_type    type_k; // type of the cache's keys in the newest graph
    ggml_type    type_q; // type that attention to the cache rounds queries to; F32: it does not round them

    // [n_head][n_traced]: tokens that each row attended to most in the last step, then tokens with position -1
    std::vector<attended_token> attended;
};

// Custom ggml operation that recalls tokens; userdata: a recalled_layer. dst: K [k][n_head][n_embd_k], then V
// [k][n_head][n_embd_v] or transposed, as F16 or F32. src: the queries [n_embd_k, n_head_q, n_tokens]; the position
// that the first query is rotated to; each query's highest product with a live cell; the probability of that cell. The
// last two are [n_head_q][n_tokens]
void recall_into(ggml_tensor * dst, int ith, int nth, void * userdata);

// The same with synthetic cells, n_made per token. src: the same four tensors, or the first two if nothing is traced
void make_into(ggml_tensor * dst, int ith, int nth, void * userdata);

class recaller {
public:
    recaller(const archive_params & params, const std::vector<archive_shape> & shapes);

    // Call f(i, contents of these n cells of layer i) for each layer. Returns false if a device failed
    using gatherer = std::function<bool (const int32_t * cells, int32_t n, const std::function<void (size_t, gathered &&)> & f)>;

    // Archive these cells of all rows; the cache is unchanged. Throws no_room, and nothing has changed then.
    // staging: null, or the staging that may store the cells later
    void push(const gatherer & gather, const leaving & some, int n_thread, staging * staging);

    // see llama_kvtool_rewind; nothing may be computing with these layers
    void rewind(const std::vector<layer> & layers, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

    void clear();

    // Build the recall of layer i, whose cached keys are k: see recall_into and make_into. n: elements of the
    // result. The operation must run on the host's CPU
    ggml_tensor * build(
            ggml_context * ctx, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n, const logit_params & logits);

    // Record, in every later step, the n tokens that each row attends to most. Without synthetic cells these are the
    // n_recall recalled tokens, which are recorded from the start
    void trace(int32_t n);

    const archive_params params;

    int32_t n_traced = 0;

    // each token of the next step chooses for itself which archived tokens it attends to exactly
    bool is_apart = false;

    archive        tokens;
    attention_work attending;

    std::vector<recalled_layer> recalled; // one per layer
};

} // namespace kvtool
