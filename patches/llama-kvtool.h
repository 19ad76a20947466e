// What kvtool needs of llama.cpp beyond its public API, for a context with one sequence (id 0) and one plain KV cache,
// or that and one of sliding layers beside it, which have no rows and stay as llama.cpp keeps them:
//
// - signals: each layer's attention probabilities, reduced in the graph to a few floats per row and cell
// - edits:   keys and values of each row moved, keys rotated, values merged, on whatever device the cache lies
// - sizes:   each layer's cache made longer or shorter
// - copies:  cells and signals out of the cache and back in again
// - ragged:  rows that hold different numbers of cells, with an attention mask of their own
//
// A row is one (layer, KV head) pair, layer by layer. With nothing enabled, nothing of llama.cpp changes.
//
// Every function that can fail returns a negative number, and llama_kvtool_error says why. The cache is then as it was,
// unless the device itself failed in the middle of an edit.

#pragma once

#include "llama.h"

#define LLAMA_KVTOOL_ABI 3

#ifdef __cplusplus
extern "C" {
#endif

// reductions of the attention probabilities A[head, query, cell] over the queries since the signals were cleared
// the group of query heads of a KV head becomes one by `group`; a cell is important to a query that has seen t tokens,
// itself included, where A >= 1/t
enum llama_kvtool_signal {
    LLAMA_KVTOOL_SIGNAL_ATTENTION = 1,  // sum over the queries
    LLAMA_KVTOOL_SIGNAL_LAST      = 2,  // of the last query alone
    LLAMA_KVTOOL_SIGNAL_RECENT    = 4,  // sum over the last n_query queries of a batch; shorter batches after it are added
    LLAMA_KVTOOL_SIGNAL_SQUARES   = 8,  // sum of squares over the queries
    LLAMA_KVTOOL_SIGNAL_HITS      = 16, // how many (query, head) pairs it was important to
    LLAMA_KVTOOL_SIGNAL_IMPORTANT = 32, // 1 + the index of the latest query that it was important to, any head's; 0: none
};

enum llama_kvtool_group {
    LLAMA_KVTOOL_GROUP_SUM   = 0,
    LLAMA_KVTOOL_GROUP_MAX   = 1,
    LLAMA_KVTOOL_GROUP_FIRST = 2, // the group's first head
};

struct llama_kvtool_params {
    uint32_t signals; // of all later decodes
    uint32_t group;
    int32_t  n_query; // of the recent signal, at least 1

    bool log_n;  // attention logits times log_512(t)
    bool ragged; // rows may hold different numbers of cells
};

// K[row, dst] = rotate(K[row, src], delta) and V[row, dst] = V[row, src]
// all sources are read before anything is written; no two moves of a row may share dst
struct llama_kvtool_move {
    int32_t row;
    int32_t dst;
    int32_t src;
    int32_t delta; // positions to rotate the key by; 0: the bytes stay as they are
};

// V[row, dst] = sum of weight * V[row, src] over all terms with this (row, dst), which must be neighbours
// all sources are read before anything is written; merges come before moves
struct llama_kvtool_term {
    int32_t row;
    int32_t dst;
    int32_t src;
    float   weight;
};

struct llama_kvtool_edit {
    const struct llama_kvtool_move * moves;
    const struct llama_kvtool_term * terms;

    int32_t n_move;
    int32_t n_term;

    int32_t   n_keep; // cells 0 .. n_keep - 1 are in use afterwards, the others are free
    llama_pos pos_0;  // the last of them gets position pos_0 + n_keep - 1, the others come before it, and the next token at pos_0 + n_keep
                      // sliding layers go along where that is a jump, and forget everything where no cell is seen

    const int32_t * n_keep_row; // ragged: the same for each row, at most n_keep; null if not ragged

    int32_t n_hidden; // not ragged: the first cells, which no later query sees

    bool force_graph; // never take the short cut through host memory
};

LLAMA_API int32_t      llama_kvtool_abi(void);
LLAMA_API const char * llama_kvtool_digest(void); // of the patch files the library was built from
LLAMA_API const char * llama_kvtool_error(void);  // why the last call on this thread failed

// from now on a crash (an abort of ggml's, an exception that nobody catches, a bad access) writes this message to stderr
// and ends the process with exit_code, without a core dump; verbose: after what ggml and C++ say; null: as before
LLAMA_API int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose);

// from now on a device says that it has at most so many bytes of memory, of which all may be free
LLAMA_API int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes);

// what a spare says to have of memory, none of it free
#define LLAMA_KVTOOL_SPARE_BYTES 1

// a device once more, for a worker to serve beside it; null: it failed
LLAMA_API ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev);

// from now on edits of a cache on a worker's device are computed on one of its spares and keys are read on another, so that
// the worker keeps the graphs of both and the decode's
LLAMA_API int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t keys);

// start anew with these parameters, on an empty cache; returns the number of rows
LLAMA_API int32_t llama_kvtool_enable(struct llama_context * ctx, const struct llama_kvtool_params * params);

// the layer of each row; returns the number of rows
LLAMA_API int32_t llama_kvtool_row_layers(const struct llama_context * ctx, int32_t * layers, int32_t n_row);

// the length of the longest key
LLAMA_API int32_t llama_kvtool_n_dim(const struct llama_context * ctx);

// bytes of the K and V tensors, those of sliding layers among them
LLAMA_API int64_t llama_kvtool_cache_bytes(const struct llama_context * ctx);

// how many tokens the first query of the next decode has seen before it: what t counts from
LLAMA_API int32_t llama_kvtool_seen(struct llama_context * ctx, int32_t n_seen);

// give each layer n_cell[layer] cells, the live ones included; all the same unless ragged
LLAMA_API int32_t llama_kvtool_resize(struct llama_context * ctx, const int32_t * n_cell, int32_t n_layer);

// out[n_row][n_cell]: a signal's first n_cell cells, 0 beyond a layer's own
LLAMA_API int32_t llama_kvtool_read(struct llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell);

// let a signal go on from in[n_row][n_cell], as it was n_query queries after the last edit
LLAMA_API int32_t llama_kvtool_write(
        struct llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell, int32_t n_query);

// copy a layer's first cells as they are, keys and then values, each cell by cell, to where there is room for them;
// returns how many bytes these are, with null nothing else
LLAMA_API int64_t llama_kvtool_get_cells(struct llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell);
LLAMA_API int64_t llama_kvtool_set_cells(struct llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell);

// the same for layers that attend through a sliding window, which have no rows: all of their n_window cells, layer by
// layer; table[1 + n_window]: where the next token goes, then each cell's position, -1 if it is empty
LLAMA_API int32_t llama_kvtool_n_window  (const struct llama_context * ctx);
LLAMA_API int64_t llama_kvtool_get_window(struct llama_context * ctx, int32_t * table, uint8_t * out);
LLAMA_API int64_t llama_kvtool_set_window(struct llama_context * ctx, const int32_t * table, const uint8_t * in);

// out[n_row][n_cell][n_dim]: the keys of cells first[row] .. first[row] + n_cell - 1, each rotated by delta[n_row][n_cell]
// positions on the way, 0 beyond a layer's own length
LLAMA_API int32_t llama_kvtool_read_keys(
        struct llama_context * ctx, const int32_t * first, const int32_t * delta, float * out, int32_t n_row, int32_t n_cell, int32_t n_dim);

// apply an edit and clear the signals; waits until it is done
LLAMA_API int32_t llama_kvtool_apply(struct llama_context * ctx, const struct llama_kvtool_edit * edit);

#ifdef __cplusplus
}

//
// hooks, called from llama.cpp
//

#include <cstdint>
#include <vector>

class  llama_kvtool_input;
class  llm_graph_result;
struct llama_hparams;
struct llama_kvtool;
struct llm_graph_context;

// what a graph has of ours
struct llama_kvtool_graph {
    static constexpr int n_signal = 6;

    struct probe {
        int il;

        ggml_tensor * t[n_signal]; // [n_kv, 1, n_head_kv] or null, as where signals add up on the device
    };

    std::vector<probe> probes;

    llama_kvtool_input * input = nullptr;
};

// ragged: store keys and values at each row's own end, and let k and v be the layer's views; false if not ragged
bool llama_kvtool_store(
        const llm_graph_context & graph,
        ggml_tensor * k_cur,
        ggml_tensor * v_cur,
        ggml_tensor * & k,
        ggml_tensor * & v,
                int   il);

// ragged: each row's own mask; the given one if not
ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il);

// log n: scaled queries; the given ones if off
ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k);

// add the signals of one layer to the graph; p: the probabilities [n_kv, n_tokens, n_head], null with flash attention
void llama_kvtool_build(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il);

// whether every row has cells for that many more tokens: the table of llama.cpp does not know where rows are ragged
bool llama_kvtool_fits(const llama_context & lctx, uint32_t n_tokens);

// count the queries of a computed graph, and copy to the host those of its signals that add up there
void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens);

// the most nodes that we add to a graph
uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens);

#endif
