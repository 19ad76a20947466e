// What kvtool keeps of a context. Its functions alone touch the private members of llama.cpp's context.

#pragma once

#include "graphs.h"
#include "joint.h"
#include "layer.h"
#include "llama-kvtool.h"
#include "places.h"
#include "queries.h"
#include "recaller.h"
#include "recent.h"
#include "signals.h"
#include "staging.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class  llama_kv_cache;
struct llama_context;
struct llama_hparams;

struct llama_kvtool {
    llama_kvtool_params params;

    std::vector<kvtool::layer> layers;  // those with rows
    std::vector<kvtool::layer> sliding; // those with a sliding window: llama.cpp keeps their cache, and they have no rows

    std::vector<kvtool::layer> index; // keys of an index, by which a model chooses among its cells; see llama_kvtool_dense

    std::vector<ggml_tensor *> states; // of recurrent layers, which llama.cpp keeps as well

    std::vector<int> layer_of_row;
    std::vector<int> index_of_il; // in layers: whose cells a layer of the model reads; -1: it has none of them

    int  n_most  = INT32_MAX; // cells that a layer may have when tokens are decoded
    int  n_row   = 0;
    bool v_trans = false; // V is stored transposed

    int n_own   = 0; // cells of each row that are in use, unless rows are ragged
    int n_guess = 0; // tokens of the next batch that are guesses
    int n_back  = 0; // of the last tokens: those that can be taken back

    int64_t n_seen = 0; // tokens that the next query has seen before itself

    bool is_watching = true; // decodes compute the signals

    std::vector<int32_t> live; // ragged: how many cells of each row are in use

    std::string broken; // why nothing may be done with the context any more; empty: it may be used

    kvtool::signals signals { layers, params };
    kvtool::recent  recent  { layers, params };
    kvtool::queries queries { params };
    kvtool::graphs  graphs;
    kvtool::places  places; // with ALiBi alone

    std::vector<std::vector<float>> mean_turns; // of each layer, once it has been needed: see read_future

    std::unique_ptr<kvtool::recaller> archive; // null: there is none
    std::unique_ptr<kvtool::staging>  staging; // null: steps recall from the archive on the host

    uint64_t version = 0; // of the tensors that graphs view, and of what they do with them: no two contexts have the same

    std::unique_ptr<kvtool::joint> joint; // null: the context's steps are its own

    explicit llama_kvtool(const llama_kvtool_params & params) : params(params) {}

    llama_kvtool(const llama_kvtool &) = delete;

    // see llama_kvtool_enable; with joint, its steps are those of others
    static int32_t enable(llama_context & lctx, const llama_kvtool_params & params, std::unique_ptr<kvtool::joint> joint = nullptr);

    // null, with the error set, where kvtool is not enabled or the context may not be used any more
    static llama_kvtool * get(const llama_context * ctx);

    //
    // counts
    //

    // tokens in the archive
    int64_t n_archived() const { return archive ? archive->tokens.size() : 0; }

    // whether a step attends to all archived tokens on the device; without any, llama.cpp's own attention sees everything
    bool is_staging() const { return staging && n_archived() > 0; }

    // see llama_kvtool_stage
    int64_t stage(llama_context & lctx, int64_t n_archived);

    // why the archive's tokens cannot be staged for the next step; empty: they can
    std::string unstaged() const;

    // the layer whose cells this layer of the model reads, itself or an earlier one; null if these are no rows
    const kvtool::layer * find(int il) const;

    // a graph has a layer with these keys: from now on it is known how they are rotated
    void see(int il, const ggml_tensor * keys);

    // whether k is a view of the cache; other keys belong to an encoder or to cross-attention
    bool has_keys(const ggml_tensor * k) const;

    int most_cells() const;
    int most_live(const kvtool::layer & l) const;

    // whether all rows of a layer hold as many tokens: their queries then see the same cells
    bool is_even(const kvtool::layer & l) const;

    std::vector<int> layer_cells() const;
    std::vector<int> row_cells()   const;

    int64_t n_bytes() const;
    int32_t n_dim()   const;

    // of the tables of copy_beside
    int32_t n_beside() const;

    // whether the next batch's tokens are kept apart, so that some of them can be left out: see llama_kvtool_guess
    bool is_apart() const { return n_guess > 0; }

    void guess(int n);

    // see llama_kvtool_watch
    void watch(llama_context & lctx, bool on);

    // see llama_kvtool_take_back
    int32_t take_back(llama_context & lctx, int n);

    // a batch has been computed
    void decoded(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens);

    //
    // sizes
    //

    // see llama_kvtool_resize
    int32_t resize(llama_context & lctx, const int32_t * n_cell);

    //
    // copies
    //

    // a layer's first n cells as bytes, keys and then values, each cell by cell: copies to out or from in, or nothing
    // where both are null; returns how many bytes these are
    int64_t copy_cells(llama_context & lctx, const kvtool::layer & l, uint8_t * out, const uint8_t * in, int n) const;

    // what a model keeps beside its rows: all cells of the sliding layers, then the states of recurrent ones; the tables are
    // [where the next token of the sliding layers goes, each cell's position or -1, the newest token's position or -1]
    int64_t copy_beside(llama_context & lctx, int32_t * table_out, uint8_t * out, const int32_t * table_in, const uint8_t * in) const;

    //
    // llama.cpp's own
    //

    // see memory
    int  n_used       (const llama_context & lctx) const;
    void fill_recalled(const llama_context & lctx, int n_tokens = 1) const; // of a step

    // the next decode makes a new graph; reserve: it needs other compute buffers, too
    static void forget_graphs(llama_context & lctx, bool reserve);

    //
    // joint steps
    //

    static int32_t enable_joint(llama_context & lctx, const llama_context & like, int n_most);

    // see llama_kvtool_decode_joint
    static int32_t decode_joint(
            llama_context & lctx, const llama_batch & batch, llama_context ** members, const int32_t * n_tokens, int n_member);

    static llm_graph_params graph_params(const kvtool::member & m, llm_graph_result * res);

private:
    static bool begin(kvtool::member & m, const llama_batch & batch);

    std::string unreadable; // why it cannot be known how the keys of a layer are rotated

    void add_layers(const llama_context & lctx);
    bool keep_queries(const llama_hparams & hparams);
    void make_archive(const llama_kv_cache & kv);

    // why a layer's keys cannot be turned; empty: all can
    std::string unseen() const;
    std::string no_archive(const llama_hparams & hparams) const;

    bool resize(llama_context & lctx, llama_kv_cache & kv, std::vector<kvtool::layer> & some, size_t i, int n);
};
