// The archive of a context, and the ggml operation that recalls tokens from it while a graph is computed.

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
    kvtool::recaller * recaller;
    size_t             i;

    // data of the newest graph
    logit_params logits;
    ggml_type    type_k; // Type of the cache's keys.
    ggml_type    type_q; // Type to which attention to the cache rounds queries; F32 if queries are not rounded.

    // [n_head][n_traced]: the tokens that each row attended to most in the last step. If there are fewer than n_traced,
    // the remaining entries have position -1
    std::vector<attended_token> attended;
};

// Custom ggml operation that recalls tokens. userdata: a recalled_layer. dst, as F16 or F32: K [k][n_head][n_embd_k],
// then V [k][n_head][n_embd_v] or, if v_trans, [n_head][n_embd_v][k]. src has four tensors:
// - the queries [n_embd_k, n_head_q, n_tokens]
// - the position that the first query is rotated to
// - each query's highest product with a live cell, [n_head_q][n_tokens]
// - the probability of that cell, [n_head_q][n_tokens]
void recall_op(ggml_tensor * dst, int ith, int nth, void * userdata);

// Custom ggml operation that computes n_synthetic synthetic cells per token. userdata and dst: see recall_op. src: the
// same four tensors, or only the first two if no tokens are traced
void synthesize_op(ggml_tensor * dst, int ith, int nth, void * userdata);

class recaller {
public:
    recaller(const archive_params & params, const std::vector<archive_shape> & shapes);

    // Calls f(i, contents) for each layer i, with the contents of these n cells. Returns false if a device failed
    using gatherer = std::function<bool (const int32_t * cells, int32_t n, const std::function<void (size_t, gathered &&)> & f)>;

    // Copy these cells of all rows to the archive. If memory is short, throws out_of_space and leaves the archive unchanged.
    // staging: if not null, it copies the cells later if it can
    void push(const gatherer & gather, const evicted_tokens & evicted, int n_thread, staging * staging);

    // see llama_kvtool_rewind; no graph that uses these layers may be running
    void rewind(const std::vector<layer> & layers, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

    void clear();

    // Build the operation for layer i: recall_op or synthesize_op. k: the layer's cached keys. n: number of elements of
    // the result. The operation must run on the host's CPU
    ggml_tensor * build(
            ggml_context * ctx, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n, const logit_params & logits);

    // From the next step on, record the n archived tokens that each row attends to most. If there are no synthetic
    // cells, the constructor calls this with n = n_recall, so that the recalled tokens are always recorded
    void trace(int32_t n);

    const archive_params params;

    int32_t n_traced = 0;

    // true if the next step runs a separate search for each of its tokens; ignored while tokens are traced
    bool is_separate = false;

    archive        tokens;
    attention_work work;

    std::vector<recalled_layer> recalled; // one per layer
};

} // namespace kvtool
