// The archive, in this process's memory or in a file, and what recalls from it while a graph is computed.

#pragma once

#include "archive.h"
#include "attention.h"

#include <cstdint>
#include <vector>

struct llama_context;
struct llm_graph_context;

namespace kvtool {

class graphs;
class recaller;
class staging;

// what recall of one layer reads
struct recalled_layer {
    recaller * all;
    size_t     i;

    logit_params logits; // in the graph that was made last
    ggml_type    type_k; // of the cache there
    ggml_type    type_q; // to which attention to it rounds queries, F32: to none

    std::vector<attended_token> attended; // [n_head][n_traced]: those that its rows attended to most in the last step, then -1
};

// Recalls tokens, as an operation of ggml's; userdata: a recalled_layer. dst: K [k][n_head][n_embd_k], then V
// [k][n_head][n_embd_v] or transposed, as F16 or F32; src: the queries [n_embd_k, n_head_q, n_tokens], where the first of them
// is rotated to, and of their products with the live cells the highest one and its probability, both [n_head_q][n_tokens]
void recall_into(ggml_tensor * dst, int ith, int nth, void * userdata);

// The same with made cells, n_made a token; src: the same, or without tracing the first two
void make_into(ggml_tensor * dst, int ith, int nth, void * userdata);

class recaller {
public:
    recaller(const archive_params & params, const std::vector<archive_shape> & shapes);

    // Copies these cells of all rows; the cache stays as it is. Throws no_room, and nothing has changed then. staging: null, or what may store
    // them later
    void push(graphs & graphs, llama_context & lctx, const std::vector<layer> & layers, const leaving & some, int n_thread, staging * staging);

    // see llama_kvtool_go_back
    void go_back(
            llama_context & lctx, const std::vector<layer> & layers, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

    void clear();

    // What recalls tokens of layer i, whose keys are k, in a graph: see recall_into and make_into. n: the numbers that it gives
    ggml_tensor * build(
            const llm_graph_context & graph, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
            const logit_params & logits);

    // from now on each row says which tokens it attends to most in a step, so many; recalled ones are said anyway
    void trace(int32_t n);

    const archive_params params;

    int32_t n_traced = 0;

    bool is_apart = false; // whether each token of the next step looks into what it would look into alone

    archive        tokens;
    attention_work attending;

    std::vector<recalled_layer> recalled; // one a layer
};

} // namespace kvtool
