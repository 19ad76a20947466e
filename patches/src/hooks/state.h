// kvtool's state of a context. Only state.cpp, join.cpp, sizes.cpp, resident.cpp and deferred.cpp touch private members
// of llama.cpp's context.

#pragma once

#include "cache/graphs.h"
#include "joint.h"
#include "cache/layer.h"
#include "llama-kvtool.h"
#include "cache/key-positions.h"
#include "cache/queries.h"
#include "archive/recaller.h"
#include "cache/recent.h"
#include "cache/resident-cells.h"
#include "cache/signals.h"
#include "archive/staging.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class  llama_kv_cache;
struct llama_context;
struct llama_hparams;

struct llama_kvtool {
    llama_kvtool_params params;

    std::vector<kvtool::layer> layers;  // layers with rows

    // layers with a sliding window: llama.cpp manages their cache, and they have no rows
    std::vector<kvtool::layer> sliding;

    // keys by which a model's index chooses cells; see llama_kvtool_dense
    std::vector<kvtool::layer> index;

    std::vector<ggml_tensor *> states; // states of recurrent layers, managed by llama.cpp

    std::vector<int> layer_of_row;
    // for each layer of the model, the index in `layers` of the layer whose cells it reads; -1 if it reads no cells
    std::vector<int> index_of_il;

    int  n_indexed  = INT32_MAX; // number of cells that a model's index chooses; decoding fails if a layer has more cells
    int  n_row      = 0;
    bool v_trans    = false; // Values are stored transposed.
    bool defers_all = false; // The signals of all steps are deferred, not only of steps with draft tokens.

    int n_live      = 0; // Number of cells in use in each row. Not for ragged rows.
    int n_marked    = 0; // Number of draft tokens at the end of the next batch.
    int n_removable = 0; // Number of newest tokens that `drop` can remove now.

    int n_hidden = 0; // number of cells that no query sees

    int64_t n_seen = 0; // number of tokens that come before the next query

    bool is_watching = true; // true if decodes compute the signals

    std::vector<int32_t> n_live_row; // number of cells in use of each row; only if rows are ragged

    std::string broken; // reason why the context is unusable; empty if it is usable

    kvtool::signals signals { layers, params };
    kvtool::recent  recent  { layers, params };
    kvtool::queries queries { params };

    kvtool::deferred deferred;

    kvtool::graphs  graphs;
    kvtool::key_positions positions; // used with ALiBi only

    // mean rotation over n_future positions, for each layer; computed at the first call of llama_kvtool_read_future
    std::vector<std::vector<float>> mean_rotations;

    std::unique_ptr<kvtool::recaller> archive; // Null if there is no archive.
    std::unique_ptr<kvtool::staging>  staging; // Null if steps read the archive on the host.

    std::unique_ptr<kvtool::resident_cells> resident; // null if there are no residents

    int n_resident = 0; // number of cells for residents, among the last n_recall cells

    // Version of the tensors that graphs view. No two contexts have the same version. A graph is invalid if it views
    // tensors of an older version
    uint64_t version = 0;

    std::unique_ptr<kvtool::joint> joint; // null if the context decodes its own tokens

    explicit llama_kvtool(const llama_kvtool_params & params) : params(params) {}

    llama_kvtool(const llama_kvtool &) = delete;

    // see llama_kvtool_enable; joint: not null if the context computes steps of other contexts
    static int32_t enable(llama_context & lctx, const llama_kvtool_params & params, std::unique_ptr<kvtool::joint> joint = nullptr);

    // Return the state of a context. If kvtool is not enabled or the context is unusable, set the error and return null
    static llama_kvtool * get(const llama_context * ctx);

    //
    // contents of the context
    //

    int64_t n_archived() const { return archive ? archive->tokens.size() : 0; }

    // True if the next step attends to all archived tokens on the device. If the archive is empty, this is false,
    // because llama.cpp's own attention sees all tokens
    bool is_staging() const { return staging && n_archived() > 0; }

    // number of cells that a step fills from the archive
    int n_filled() const { return params.n_recall - n_resident; }

    // true if a step of n_tokens tokens attends to residents
    bool uses_residents(int64_t n_tokens) const;

    // reason why the context cannot have residents; empty if it can
    std::string no_residents(const llama_context & lctx) const;

    // see llama_kvtool_resident_bytes
    int64_t resident_bytes(const llama_context & lctx, const kvtool::resident_sizes & n) const;

    // see llama_kvtool_reside
    int64_t reside(llama_context & lctx, const kvtool::resident_sizes & n);

    // see llama_kvtool_missed
    float missed(llama_context & lctx);

    // Prepare a step of n_tokens tokens with residents: bring the residents' cells up to date, and keep the recurrent
    // states from before the step. Returns false if a device failed
    bool update_residents(llama_context & lctx, int n_tokens);
    bool keep_states(llama_context & lctx, int n_tokens) const;

    // drop the residents; call this if layers are resized, or if archived tokens change in any other way than by
    // llama_kvtool_archive
    void drop_residents();

    // see llama_kvtool_stage
    int64_t stage(llama_context & lctx, int64_t n_archived);

    // reason why the archive's tokens cannot be staged for the next step; empty if they can
    std::string no_staging() const;

    // the layer whose cells layer il of the model reads: this layer or an earlier layer. Null if it reads no rows
    const kvtool::layer * find(int il) const;

    // Return the layers of the model that attend to rows. attn_layer::t is null, because no memory for queries is
    // allocated
    std::vector<kvtool::stored_queries::attn_layer> attn_layers(const llama_context & lctx) const;

    // read from a graph how the keys of a layer are rotated
    void read_rope(int il, const ggml_tensor * keys);

    // true if k is a view of cells in rows; other keys belong to a sliding layer, an encoder or cross-attention
    bool has_keys(const ggml_tensor * k) const;

    int most_cells() const;
    int most_live(const kvtool::layer & l) const;

    // true if all rows of a layer hold the same number of tokens; a query then sees the same cells in each of these
    // rows
    bool is_even(const kvtool::layer & l) const;

    std::vector<int> layer_cells() const;
    std::vector<int> row_cells()   const;

    int64_t n_bytes() const;
    int32_t n_dim()   const;

    // number of entries of the table that copy_fixed_state copies
    int32_t n_fixed_state() const;

    // true if the signals of a batch are computed later: see deferred.cpp
    bool defers(int64_t n_tokens) const;

    // see llama_kvtool_mark_drafts
    void mark_drafts(int n);

    // compute the signals of the deferred queries; returns false if a device failed
    bool sum_deferred(llama_context & lctx);

    // copy all signals to the host; returns false if a device failed
    bool collect(llama_context & lctx);

    // see llama_kvtool_watch
    bool watch(llama_context & lctx, bool on);

    // see llama_kvtool_drop
    int32_t drop(llama_context & lctx, int n);

    // update the state after a batch has been computed
    void decoded(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens);

    //
    // sizes of the layers
    //

    // See llama_kvtool_resize. n_resident: number of cells for residents; if it is negative, the number of cells for
    // residents does not change
    int32_t resize(llama_context & lctx, const int32_t * n_cell, int n_resident = -1);

    //
    // copies of cells and of the fixed state
    //

    // Drop all copies of cells outside of the cache: on the host, for staging, and on devices, for residents. To be
    // called before cells change
    void forget_copies() const;

    // Copy a layer's first n cells to `out`, or from `in`: all keys cell by cell, then all values cell by cell. If both
    // are null, copy nothing. Returns the number of bytes
    int64_t copy_cells(llama_context & lctx, const kvtool::layer & l, uint8_t * out, const uint8_t * in, int n) const;

    // Copy the memory of layers without rows: all cells of the sliding layers, then the recurrent states. A table holds
    // the index of the cell for the sliding layers' next token, the position in each of their cells (-1 if empty), and
    // the position of the newest token (-1 if there is no token)
    int64_t copy_fixed_state(llama_context & lctx, int32_t * table_out, uint8_t * out, const int32_t * table_in, const uint8_t * in) const;

    //
    // llama.cpp's tables and graphs
    //

    // see llama_kvtool_memory
    int  n_used       (const llama_context & lctx) const;
    void fill_recalled(const llama_context & lctx, int n_tokens = 1) const; // n_tokens: tokens of the step; 0: fill none

    // make the next decode build a new graph; reserve: also make it allocate its compute buffers again
    static void forget_graphs(llama_context & lctx, bool reserve);

    //
    // joint steps
    //

    static int32_t enable_joint(llama_context & lctx, const llama_context & like, int n_member_max);

    // see llama_kvtool_decode_joint
    static int32_t decode_joint(
            llama_context & lctx, const llama_batch & batch, llama_context ** members, const int32_t * n_tokens, int n_member);

    static llm_graph_params graph_params(const kvtool::member & m, llm_graph_result * res);

private:
    static bool begin(kvtool::member & m, const llama_batch & batch);

    // reason why the rotation of a layer's keys cannot be determined
    std::string rope_error;

    void add_layers(const llama_context & lctx);
    bool keep_queries(const llama_context & lctx);
    bool make_deferred(const llama_context & lctx, const std::vector<kvtool::stored_queries::attn_layer> & new_layers);
    void make_archive(const llama_kv_cache & kv);

    // reason why some layer's keys cannot be rotated; empty if all can
    std::string no_rotation() const;
    std::string no_archive(const llama_hparams & hparams) const;

    bool resize(llama_context & lctx, llama_kv_cache & kv, std::vector<kvtool::layer> & cache_layers, size_t i, int n);
};
