// llama.cpp's own memory: which of its kinds a model has, and the tables of its cells.

#pragma once

#include "layer.h"
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

// its functions alone touch the private members of llama.cpp's caches
struct llama_kvtool_memory {
    //
    // kinds
    //

    // the cache of the layers with rows, null if there is none that can be edited
    static llama_kv_cache * cache(llama_memory_i * memory);

    // the cache of the sliding layers, null if there are none
    static llama_kv_cache * sliding_cache(llama_memory_i * memory);

    // the keys of an index, null if there is none
    static llama_kv_cache * index_cache(llama_memory_i * memory);

    // the states of recurrent layers, null if there are none
    static llama_memory_recurrent * recurrent(llama_memory_i * memory);

    // the same of a context's memory
    static llama_kv_cache         * cache        (const llama_context & lctx);
    static llama_kv_cache         * sliding_cache(const llama_context & lctx);
    static llama_kv_cache         * index_cache  (const llama_context & lctx);
    static llama_memory_recurrent * recurrent    (const llama_context & lctx);

    // a memory of one cell says what one of any size would
    static std::unique_ptr<llama_memory_i> smallest(const llama_model & model);

    // why a model with this memory cannot be used; empty: it can
    static std::string unsupported(const llama_model & model, llama_memory_i * memory);

    // why this context cannot be used; empty: it can
    static std::string unsupported(const llama_context & lctx);

    // the most cells that a model's index chooses for a query
    static int most_indexed(const llama_model & model, llama_memory_i * memory);

    //
    // layers
    //

    // what each layer of a model with this memory keeps
    static std::vector<llama_kvtool_layer> describe(const llama_model & model, llama_memory_i * memory);

    // the layers of a cache, but for those without attention; their rows are counted from 0
    static std::vector<kvtool::layer> layers(const llama_model & model, const llama_kv_cache & kv);

    // where among these is the one whose cells each layer of the model reads; -1: it has none of them
    static std::vector<int> owners(const llama_model & model, const llama_kv_cache & kv);

    // the layers of an index
    static std::vector<kvtool::layer> index_layers(const llama_kv_cache & kv);

    // the cells of all layers of a cache, also of those without attention
    static std::vector<int> layer_cells(const llama_kv_cache & kv);

    // Gives one of these layers of a cache its tensors, which have changed and lie in buf, and views of them. Frees the buffers
    // in which none of the layers lies any more.
    static void replace(
            llama_kv_cache & kv, const std::vector<kvtool::layer> & layers, const kvtool::layer & l, ggml_tensor * k_stream,
            ggml_tensor * v_stream, ggml_context_ptr ctx, ggml_backend_buffer_ptr buf);

    // whether values are stored transposed
    static bool is_transposed(const llama_kv_cache & kv);

    // the matrix [n, n] that quantized keys are stored under
    static const std::vector<float> & key_rotation(const llama_kv_cache & kv, int64_t n);

    // the size of that matrix; 0: keys are stored as they are
    static int key_map(const llama_kv_cache & kv);

    //
    // tables
    //

    // Sets the table of cells of the rows' cache, and that of its index: n in use, the last at position pos_0 + n - 1 and the
    // others before it; the first n_hidden of them belong to a sequence without queries.
    static void fill_tables(const llama_context & lctx, int n, llama_pos pos_0, int n_hidden = 0);

    // gives both so many cells, the first n_own of which stay as they are; false: they had so many already
    static bool resize_tables(const llama_context & lctx, int n_cell, int n_own);

    // cells that hold the context's own tokens: the table's first ones, but for those of ragged rows
    static int n_used(const llama_kv_cache & kv, int n_recall);

    // the last n_recall cells are for recalled tokens, which are older than all others: there are n_recalled of these
    static void fill_recalled(llama_kv_cache & kv, int n_recall, int n_recalled);

    // copies where the next token goes, and each cell's position or -1, to out or from in; returns how many numbers these are
    static int copy_table(llama_kv_cache & kv, int32_t * out, const int32_t * in);

    // moves the tokens of the table by delta positions, and forgets those that would come before 0; returns the cells
    // whose keys have to turn
    static std::vector<int> shift_swa(llama_kv_cache & kv, int delta);

    // the newest token that a recurrent layer has read has this position from now on; -1: it has read none
    static void set_newest(llama_memory_recurrent & mem, llama_pos pos);

private:
    static void fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden);
};

namespace kvtool {

using memory = llama_kvtool_memory;

} // namespace kvtool
