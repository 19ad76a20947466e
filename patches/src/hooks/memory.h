// Access to llama.cpp's memory: its kinds, its layers and its tables of cells.

#pragma once

#include "cache/layer.h"
#include "llama-kvtool.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class  llama_kv_cache;
class  llama_memory_recurrent;
struct llama_context;
struct llama_memory_i;
struct llama_model;

// the only code that touches private members of llama.cpp's caches
struct llama_kvtool_memory {
    //
    // kinds
    //

    // cache of the layers with rows; null if the memory cannot be edited
    static llama_kv_cache * cache(llama_memory_i * memory);

    // cache of the sliding layers; null without such layers
    static llama_kv_cache * sliding_cache(llama_memory_i * memory);

    // keys by which a model's index chooses cells; null without an index
    static llama_kv_cache * index_cache(llama_memory_i * memory);

    // states of recurrent layers; null without such layers
    static llama_memory_recurrent * recurrent(llama_memory_i * memory);

    // the same for the memory of a context
    static llama_kv_cache         * cache        (const llama_context & lctx);
    static llama_kv_cache         * sliding_cache(const llama_context & lctx);
    static llama_kv_cache         * index_cache  (const llama_context & lctx);
    static llama_memory_recurrent * recurrent    (const llama_context & lctx);

    // memory with one cell; `describe` finds the same layers in it as in a memory of any size
    static std::unique_ptr<llama_memory_i> smallest(const llama_model & model);

    // reason why a model with this memory cannot be used; empty if it can
    static std::string unsupported(const llama_model & model, llama_memory_i * memory);

    // reason why this context cannot be used; empty if it can
    static std::string unsupported(const llama_context & lctx);

    // see llama_kvtool_can_drop
    static bool can_drop(const llama_model & model);

    // maximum number of cells that a model's index chooses for a query; INT32_MAX without an index
    static int most_indexed(const llama_model & model, llama_memory_i * memory);

    //
    // layers
    //

    // entries of llama_kvtool_layers: the cells or the state that this memory keeps for each layer of a model
    static std::vector<llama_kvtool_layer> describe(const llama_model & model, llama_memory_i * memory);

    // layers of a cache except those without attention; rows are not numbered yet
    static std::vector<kvtool::layer> layers(const llama_model & model, const llama_kv_cache & kv);

    // A layer of the model reads its own cells or those of an earlier layer. For each layer of the model, this returns
    // the index in `layers` of the layer whose cells it reads; -1 if it reads no cells.
    static std::vector<int> owners(const llama_model & model, const llama_kv_cache & kv);

    // layers of the cache of a model's index; its keys are those by which the index chooses cells
    static std::vector<kvtool::layer> index_layers(const llama_kv_cache & kv);

    // number of cells of every layer of a cache, also of layers without attention
    static std::vector<int> layer_cells(const llama_kv_cache & kv);

    // Replace the tensors of the cache's layer l.il by those of l, which lie in buf; k_stream and v_stream are views of
    // them. Buffers that no layer in `layers` uses any more are freed.
    static void replace(
            llama_kv_cache & kv, const std::vector<kvtool::layer> & layers, const kvtool::layer & l, ggml_tensor * k_stream,
            ggml_tensor * v_stream, ggml_context_ptr ctx, ggml_backend_buffer_ptr buf);

    // true if values are stored transposed
    static bool is_transposed(const llama_kv_cache & kv);

    // Hadamard matrix [n, n] that quantized keys are multiplied by
    static const std::vector<float> & key_rotation(const llama_kv_cache & kv, int64_t n);

    // size of that matrix; 0: keys are stored unchanged
    static int key_map(const llama_kv_cache & kv);

    //
    // tables
    //

    // Set the table of cells of the rows' cache, and that of its index. n cells are in use: the last at position
    // pos_0 + n - 1, the others at lower ones. The first n_hidden cells belong to a second sequence, so no query
    // sees them.
    static void fill_tables(const llama_context & lctx, int n, llama_pos pos_0, int n_hidden = 0);

    // resize both tables to n_cell cells, preserving the first n_own; returns false if they had that size already
    static bool resize_tables(const llama_context & lctx, int n_cell, int n_own);

    // number of cells that hold the context's own tokens: the first cells of the table. Not for ragged rows
    static int n_used(const llama_kv_cache & kv, int n_recall);

    // among the last n_recall cells, mark the cells begin .. end - 1 as tokens at position 0 and the others as empty
    static void fill_recalled(llama_kv_cache & kv, int n_recall, int begin, int end);

    // copy the cell of the next token and each cell's position (-1 if empty) to out or from in; returns the
    // number of integers
    static int copy_table(llama_kv_cache & kv, int32_t * out, const int32_t * in);

    // shift the positions in the table by delta and remove tokens that would come before position 0; returns the cells
    // whose keys have to be rotated
    static std::vector<int> shift_swa(llama_kv_cache & kv, int delta);

    // number of the last tokens whose recurrent states were dropped since the last decode. A tensor of states has
    // n_rs_seq + 1 states, newest first, and the next decode begins with the state of this number
    static int n_dropped(const llama_memory_recurrent & mem);

    // set the position of the newest token that recurrent layers have read, whose state is the first; -1: none
    static void set_newest(llama_memory_recurrent & mem, llama_pos pos);

private:
    static void fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden);
};

namespace kvtool {

using memory = llama_kvtool_memory;

} // namespace kvtool
