// What kvtool needs of llama.cpp beyond its public API, for a context with one sequence (id 0) and one plain KV cache:
//
// - signals: each layer's attention probabilities, reduced in the graph to a few floats per row and cell
// - edits:   keys and values of each row moved, keys rotated, values merged, on whatever device the cache lies
//
// A row is one (layer, KV head) pair, layer by layer. With nothing enabled, nothing of llama.cpp changes.
//
// Every function that can fail returns a negative number, and llama_kvtool_error says why. The cache is then as it was,
// unless the device itself failed in the middle of an edit.

#pragma once

#include "llama.h"

#define LLAMA_KVTOOL_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

// reductions of the attention probabilities A[head, query, cell]; g runs over the group of query heads of a KV head
enum llama_kvtool_signal {
    LLAMA_KVTOOL_SIGNAL_ATTENTION = 1, // sum over g and over all queries since the signals were cleared
    LLAMA_KVTOOL_SIGNAL_LAST      = 2, // sum over g, of the last query alone
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
    llama_pos pos_0;  // cell i gets position pos_0 + i; the next token must come at pos_0 + n_keep

    bool force_graph; // never take the short cut through host memory
};

LLAMA_API int32_t      llama_kvtool_abi(void);
LLAMA_API const char * llama_kvtool_digest(void); // of the patch files the library was built from
LLAMA_API const char * llama_kvtool_error(void);  // why the last call on this thread failed

// choose the signals of all later decodes; returns the number of rows
LLAMA_API int32_t llama_kvtool_enable(struct llama_context * ctx, uint32_t signals);

// the layer of each row; returns the number of rows
LLAMA_API int32_t llama_kvtool_row_layers(const struct llama_context * ctx, int32_t * layers, int32_t n_row);

// bytes of the K and V tensors
LLAMA_API int64_t llama_kvtool_cache_bytes(const struct llama_context * ctx);

// out[n_row][n_cell]: a signal's first n_cell cells
LLAMA_API int32_t llama_kvtool_read(struct llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell);

// apply an edit and clear the signals; waits until it is done
LLAMA_API int32_t llama_kvtool_apply(struct llama_context * ctx, const struct llama_kvtool_edit * edit);

#ifdef __cplusplus
}

//
// hooks, called from llama.cpp
//

#include <cstdint>

struct llm_graph_context;
class  llm_graph_result;
struct llama_hparams;

struct llama_kvtool_probe {
    int il;

    ggml_tensor * attention; // [n_kv, 1, n_head_kv] or null
    ggml_tensor * last;      // likewise
};

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

// copy the signals of a computed graph to the host
void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res);

// the most nodes that the signals add to a graph
uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, uint32_t signals, uint32_t n_tokens);

#endif
