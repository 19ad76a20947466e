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
    // kinds of memory
    //

    // cache of the layers with rows; null if the memory cannot be edited
    static llama_kv_cache * cache(llama_memory_i * memory);

    // cache of the sliding layers; null without such layers
    static llama_kv_cache * sliding_cache(llama_memory_i * memory);

    // keys by which a model's index chooses cells; null without an index
    static llama_kv_cache * index_cache(llama_memory_i * memory);

    // states of recurrent layers; null without such layers
    static llama_memory_recurrent * recurrent(llama_memory_i * memory);

    static llama_kv_cache         * cache        (const llama_context & lctx);
    static llama_kv_cache         * sliding_cache(const llama_context & lctx);
    static llama_kv_cache         * index_cache  (const llama_context & lctx);
    static llama_memory_recurrent * recurrent    (const llama_context & lctx);

    // Create a memory with one cell. One cell is enough for `describe`, which returns the same layers for a memory of
    // any size
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
    // layers of a memory
    //

    // entries of llama_kvtool_layers: the cells or the state that this memory keeps for each layer of a model
    static std::vector<llama_kvtool_layer> describe(const llama_model & model, llama_memory_i * memory);

    // layers of a cache, except layers without attention; their rows are not numbered yet
    static std::vector<kvtool::layer> layers(const llama_model & model, const llama_kv_cache & kv);

    // For each layer of the model, return the index in `layers` of the layer whose cells it reads: this layer or an
    // earlier layer. -1 if it reads no cells.
    static std::vector<int> owners(const llama_model & model, const llama_kv_cache & kv);

    // layers of the cache of a model's index; the index chooses cells by the keys in this cache
    static std::vector<kvtool::layer> index_layers(const llama_kv_cache & kv);

    // number of cells of every layer of a cache, including layers without attention
    static std::vector<int> layer_cells(const llama_kv_cache & kv);

    // Replace the cache's tensors of layer l.il by the tensors of l. The new tensors lie in buf, and k_stream and
    // v_stream are views of them. Buffers that no layer in `layers` uses any more are freed.
    static void replace(
            llama_kv_cache & kv, const std::vector<kvtool::layer> & layers, const kvtool::layer & l, ggml_tensor * k_stream,
            ggml_tensor * v_stream, ggml_context_ptr ctx, ggml_backend_buffer_ptr buf);

    // true if values are stored transposed
    static bool is_transposed(const llama_kv_cache & kv);

    // Hadamard matrix [n, n] that quantized keys are multiplied by
    static const std::vector<float> & key_hadamard(const llama_kv_cache & kv, int64_t n);

    // size of the Hadamard matrix that quantized keys are multiplied by; 0 if keys are not multiplied
    static int key_map(const llama_kv_cache & kv);

    //
    // tables of cells
    //

    // Fill the tables of the rows' cache and of the index's cache. The first n cells of each table are in use. The last
    // of them has position pos_0 + n - 1, and the cells before it have lower positions. The first n_hidden cells belong
    // to a second sequence, so no query sees them.
    static void fill_tables(const llama_context & lctx, int n, llama_pos pos_0, int n_hidden = 0);

    // resize both tables to n_cell cells, preserving the first n_live; returns false if they had that size already
    static bool resize_tables(const llama_context & lctx, int n_cell, int n_live);

    // number of cells that hold the context's own tokens; they are the first cells of the table. Not for ragged rows
    static int n_used(const llama_kv_cache & kv, int n_recall);

    // Number the last n_recall cells from 0. Mark cells begin .. end - 1 of them as tokens at position 0, and mark the
    // others as empty
    static void fill_recalled(llama_kv_cache & kv, int n_recall, int begin, int end);

    // Copy a table to out or from in: first the index of the next token's cell, then each cell's position (-1 if
    // empty). Returns the number of integers
    static int copy_table(llama_kv_cache & kv, int32_t * out, const int32_t * in);

    // Shift the positions in the table by delta, and remove tokens whose position would be negative. Returns the cells
    // whose keys have to be rotated
    static std::vector<int> shift_swa(llama_kv_cache & kv, int delta);

    // Number of tokens whose recurrent states were removed since the last decode. A tensor of states has n_rs_seq + 1
    // states, the newest first. The next decode begins with the state whose index is the number of removed tokens
    static int n_dropped(const llama_memory_recurrent & mem);

    // Set the position of the newest token that recurrent layers have read; -1 if they have read no token
    static void set_newest(llama_memory_recurrent & mem, llama_pos pos);

    // call this after a state was written to the first state of each tensor; the next decode begins with it
    static void restored(llama_memory_recurrent & mem);

private:
    static void fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden);
};

namespace kvtool {

using memory = llama_kvtool_memory;

} // namespace kvtool
