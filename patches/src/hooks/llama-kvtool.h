// Functions that kvtool needs in llama.cpp and that the public API lacks. They work on a context with one sequence
// (id 0). Some layers of its model attend to all earlier tokens and keep keys for them: these layers have rows. Other
// layers may read an earlier layer's cells, attend through a sliding window or be recurrent; llama.cpp manages the
// memory of sliding and recurrent layers.
//
// - signals: each layer's attention probabilities, reduced in the graph to a few floats per row and cell
// - edits: keys and values of each row are moved, keys are rotated and values are merged, on the device that holds
//   the cache
// - sizes: each layer's cache can be made longer or shorter
// - copies: cells and signals can be copied out of the context and back in
// - archive: keys and values that have left the cache, in this process's memory or in a file. Each step recalls some
//   of these tokens, or attends to all of them through synthetic cells
// - ragged: rows may hold different numbers of cells; each has its own attention mask
//
// A row is one (layer, KV head) pair. Rows are numbered layer by layer. The arguments `layer` and `n_layer` count only
// layers with rows. With nothing enabled, llama.cpp computes the same bits as without the patch.
//
// Every function that can fail returns a negative number, and llama_kvtool_error gives the reason. The cache is
// unchanged then, unless a device failed during an edit. Positions in the stream are less than 2^40.

#pragma once

#include "llama.h"

#define LLAMA_KVTOOL_ABI 24

// error of a call for which the archive has no memory or disk space; the caller may try again
#define LLAMA_KVTOOL_NO_ROOM (-2)

#ifdef __cplusplus
extern "C" {
#endif

// Reductions of the attention probabilities A[head, query, cell] over the queries since the last edit. Only the
// recent signal reaches further back: it covers the last n_query queries, and an edit moves their attention along
// with the cells (an edit that hides cells clears it). The query heads of one KV head form a group; `group` in the
// parameters sets how their values are reduced to one. If several layers read a row's cells, their values are added.
// A cell is important to a query that has seen t tokens (itself included) if A >= 1/t.
enum llama_kvtool_signal {
    LLAMA_KVTOOL_SIGNAL_ATTENTION = 1,  // sum over the queries
    LLAMA_KVTOOL_SIGNAL_LAST      = 2,  // value of the last query
    LLAMA_KVTOOL_SIGNAL_RECENT    = 4,  // sum over the last n_query queries
    LLAMA_KVTOOL_SIGNAL_SQUARES   = 8,  // sum of squares over the queries
    LLAMA_KVTOOL_SIGNAL_HITS      = 16, // number of (query, head) pairs that the cell was important to
    LLAMA_KVTOOL_SIGNAL_IMPORTANT = 32, // how many queries ago the cell was last important to a head: 1 if to the last
                                        // query, 0 if never
    LLAMA_KVTOOL_SIGNAL_HIGHEST   = 64, // maximum over all queries and all heads, whatever `group` is
};

enum llama_kvtool_group {
    LLAMA_KVTOOL_GROUP_SUM   = 0,
    LLAMA_KVTOOL_GROUP_MAX   = 1,
    LLAMA_KVTOOL_GROUP_FIRST = 2, // first head of the group
};

struct llama_kvtool_params {
    uint32_t signals; // bits of llama_kvtool_signal that every later decode computes
    uint32_t group;
    int32_t  n_query; // queries of the recent signal, at least 1; each takes one float per row and cell

    // positions that `llama_kvtool_read_future` looks ahead; the last n_query queries are stored for it. 0: no
    // queries are stored
    int32_t  n_future;

    int32_t n_draft; // maximum number of draft tokens of a step, and of tokens that `llama_kvtool_drop` removes

    // Maximum number of queries that steps store to compute their signals together later. 0: each step computes its own
    // signals at once, as it also does without flash attention and on a worker. Steps with draft tokens always store
    // their queries
    int32_t n_defer;

    // archive
    // number of cells at the end of each row that every step fills from the archive; 0: no archive
    int32_t n_recall;
    // synthetic cells per token of a step, one for each query head of a row. Attention to them equals attention
    // to the whole archive. 0: the n_recall archived tokens with the most attention return to cells instead
    int32_t n_made;
    // A step of one token attends exactly to this many clustered tokens of a row, in whole clusters, and to all tokens
    // without clusters. The means of the other clusters represent the rest. 0: it attends to all tokens exactly
    int32_t n_exact;
    // distance limit: a token farther away is treated as if it were at this distance
    int32_t n_near;
    int32_t type_k;   // ggml_type of archived keys
    int32_t type_v;   // ggml_type of archived values

    // Archived keys and values of fewer than 8 bits are multiplied by a Hadamard matrix before they are rounded. true: they
    // are not, as in archives of earlier versions
    bool plain;

    bool log_n;  // scale attention logits by log_512(t)
    bool ragged; // rows may hold different numbers of cells
};

// K[row, dst] = rotate(K[row, src], delta) and V[row, dst] = V[row, src]. All sources are read before anything is
// written. No two moves of a row may have the same dst.
struct llama_kvtool_move {
    int32_t row;
    int32_t dst;
    int32_t src;
    int32_t delta; // positions to rotate the key by; 0 copies its bytes
};

// V[row, dst] = sum of weight * V[row, src] over all terms with this (row, dst), which must be neighbours in the
// list. All sources are read before anything is written. Merges come before moves.
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

    int32_t   n_keep; // afterwards cells 0 .. n_keep - 1 are in use and the rest are free
    // Cell n_keep - 1 gets position pos_0 + n_keep - 1, the other cells in use get lower positions, and the next token
    // must have position pos_0 + n_keep. If this changes the newest token's position, positions in sliding layers
    // change by as much. If n_hidden equals n_keep, sliding layers are emptied
    llama_pos pos_0;

    const int32_t * n_keep_row; // ragged: n_keep of each row, at most n_keep; otherwise null

    // number of cells at the start of each row that no later query sees; 0 if ragged. pos_0 must be at least -n_hidden
    int32_t n_hidden;

    bool force_graph; // compute a graph even for a cache in host memory
};

LLAMA_API int32_t      llama_kvtool_abi(void);
LLAMA_API const char * llama_kvtool_digest(void); // digest of the patch files in this library
LLAMA_API const char * llama_kvtool_error(void);  // why the last call on this thread failed

// Make a crash (an abort of ggml, an uncaught exception, a bad access) write this message to stderr and end the
// process with exit_code, without a core dump. verbose: print what ggml and C++ report first. A null message undoes
// this.
LLAMA_API int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose);

// limit the total memory and the free memory that a device reports to this many bytes
LLAMA_API int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes);

// total memory that a spare (see llama_kvtool_spare) reports; it reports no free memory
#define LLAMA_KVTOOL_SPARE_BYTES 1

// create a spare: a second handle of a device. A worker (an RPC server) serves both as separate devices. Returns null
// on failure
LLAMA_API ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev);

// For the part of a cache that lies on a worker's device `dev`: compute edits on the spare `edits`, and reads of cells
// on the spare `reads`. A worker caches one graph per device, so with these two spares the graphs of decode, edits and
// reads all stay cached.
LLAMA_API int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t reads);

// name of llama.cpp's ith architecture; null if there are no more
LLAMA_API const char * llama_kvtool_arch(int32_t i);

// memory that a layer of a model keeps
enum llama_kvtool_layer_kind {
    LLAMA_KVTOOL_LAYER_ROWS      = 0, // cells for all tokens
    LLAMA_KVTOOL_LAYER_SLIDING   = 1, // cells for the tokens in a sliding window
    LLAMA_KVTOOL_LAYER_RECURRENT = 2, // a state of constant size
    LLAMA_KVTOOL_LAYER_INDEX     = 3, // cells for all tokens, and keys by which the model chooses some of them
};

struct llama_kvtool_layer {
    int32_t il;   // number of the layer in the model
    int32_t kind; // llama_kvtool_layer_kind

    int32_t owner; // number of the layer whose cells it reads: itself or an earlier one

    int32_t n_head;   // KV heads
    int32_t n_embd_k; // elements of a key of one head
    int32_t n_embd_v; // elements of a value of one head; 0 if values are a part of the keys (MLA)

    int64_t n_bytes; // bytes of a recurrent state
};

// Describe the memory of each layer of a model in out[n]. A layer with both cells and a state appears twice, a layer
// with neither does not appear. Returns the number of entries, which may be more than n; negative: contexts of this
// model cannot be enabled
LLAMA_API int32_t llama_kvtool_layers(const struct llama_model * model, struct llama_kvtool_layer * out, int32_t n);

// Maximum number of cells per layer for this model. If the model has an index that chooses cells for each query, a
// layer may have only as many cells as the index chooses, so that it chooses all of them. INT32_MAX without an index
LLAMA_API int32_t llama_kvtool_most_cells(const struct llama_model * model);

// true if the model biases attention by distance (ALiBi)
LLAMA_API bool llama_kvtool_has_alibi(const struct llama_model * model);

// true if the newest tokens of a step can be removed: the model has no recurrent layers, or llama.cpp can keep their
// states after each of a step's last tokens
LLAMA_API bool llama_kvtool_can_drop(const struct llama_model * model);

// true if the model has layers for multi-token prediction (MTP) that llama.cpp can compute, and they are loaded. A context
// of type LLAMA_CONTEXT_TYPE_MTP runs them
LLAMA_API bool llama_kvtool_has_mtp(const struct llama_model * model);

// let later decodes keep the hidden states that MTP layers read: of all tokens, or only of those with logits
LLAMA_API int32_t llama_kvtool_output_hidden(struct llama_context * ctx, bool all);

// read the hidden states of tokens first .. first + n - 1 of the last decode: out[n][llama_model_n_embd_out]
LLAMA_API int32_t llama_kvtool_get_hidden(struct llama_context * ctx, int32_t first, int32_t n, float * out);

// empty the cache and enable kvtool with these parameters; returns the number of rows
LLAMA_API int32_t llama_kvtool_enable(struct llama_context * ctx, const struct llama_kvtool_params * params);

// write each row's layer, counted among all layers of the model; returns the number of rows
LLAMA_API int32_t llama_kvtool_row_layers(const struct llama_context * ctx, int32_t * layers, int32_t n_row);

// elements of the longest key
LLAMA_API int32_t llama_kvtool_n_dim(const struct llama_context * ctx);

// bytes of the K and V tensors, sliding layers included, and of recurrent states
LLAMA_API int64_t llama_kvtool_cache_bytes(const struct llama_context * ctx);

// bytes of the queries that steps store to compute their signals later; 0 if each step computes its own
LLAMA_API int64_t llama_kvtool_deferred_bytes(const struct llama_context * ctx);

// turn the signals on or off for later decodes; they are on at first. No signal includes the queries of decodes with
// signals off
LLAMA_API int32_t llama_kvtool_watch(struct llama_context * ctx, bool watch);

// set the number of tokens before the first query of the next decode; each later query has seen one more
LLAMA_API int32_t llama_kvtool_seen(struct llama_context * ctx, int32_t n_seen);

// give each layer n_cell[layer] cells, at least n_recall more than its live cells, in addition to those of residents.
// Unless rows are ragged, all layers need the same number
LLAMA_API int32_t llama_kvtool_resize(struct llama_context * ctx, const int32_t * n_cell, int32_t n_layer);

// read a signal: out[n_row][n_cell], 0 beyond a layer's cells
LLAMA_API int32_t llama_kvtool_read(struct llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell);

// restore a signal from in[n_row][n_cell], as llama_kvtool_read wrote it; not for the recent signal
LLAMA_API int32_t llama_kvtool_write(struct llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell);

// read the recent signal query by query, the oldest first: out[n_query][n_row][n_cell]. Values of queries that have
// not happened yet, and of cells beyond a layer's own, are 0
LLAMA_API int32_t llama_kvtool_read_recent(struct llama_context * ctx, float * out, int32_t n_query, int32_t n_row, int32_t n_cell);

// restore the recent signal from in[n_query][n_row][n_cell]; cells from n_cell on become 0
LLAMA_API int32_t llama_kvtool_write_recent(struct llama_context * ctx, const float * in, int32_t n_query, int32_t n_row, int32_t n_cell);

// Logits that the last n_last queries would give each row's first n_cell cells if they came again soon. Each query is
// rotated to the mean of the positions pos .. pos + n_future - 1, where pos is the position that the next token is
// rotated to. Writes the mean and the variance of these logits over the queries, each as [n_row][n_head][n_cell], for
// each head of a row's group. The logits have no soft cap and no ALiBi. n_head: heads of the largest group, counted
// over all layers that read a row's cells. Entries for heads that a group lacks, and for cells beyond a layer's own,
// are 0
LLAMA_API int32_t llama_kvtool_read_future(
        struct llama_context * ctx, int32_t n_last, int64_t pos, float * mean, float * variance,
        int32_t n_row, int32_t n_head, int32_t n_cell);

// Copy the last n_query queries, the oldest first, to out[n_query][n] or from in[n_query][n], where n is the number of
// elements of a query in all layers together. pos[n_query]: the position that each query is rotated to, -1 if it has
// not happened yet. Both return n; with a null buffer they do nothing else.
LLAMA_API int64_t llama_kvtool_get_queries(struct llama_context * ctx, float * out, int32_t * pos);
LLAMA_API int64_t llama_kvtool_set_queries(struct llama_context * ctx, const float * in, const int32_t * pos);

// out[n_row][n_cell]: Euclidean norm of each cell's value; 1 if values are a part of the keys (MLA), 0 beyond a
// layer's own cells
LLAMA_API int32_t llama_kvtool_read_lengths(struct llama_context * ctx, float * out, int32_t n_row, int32_t n_cell);

// Copy a layer's first n_cell cells in their stored format (all keys cell by cell, then all values cell by cell) to
// or from a buffer with room for them. Both return the number of bytes; with a null buffer they do nothing else.
LLAMA_API int64_t llama_kvtool_get_cells(struct llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell);
LLAMA_API int64_t llama_kvtool_set_cells(struct llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell);

// set the positions of the keys in each row's first n_cell cells: pos[n_row][n_cell]. Only ALiBi needs this, as its
// keys do not contain their positions
LLAMA_API int32_t llama_kvtool_set_places(struct llama_context * ctx, const int32_t * pos, int32_t n_row, int32_t n_cell);

// Copy the fixed state, which is the memory of layers without rows: all cells of the sliding layers, then all recurrent
// states. `table` has as many numbers as llama_kvtool_n_fixed_state returns, 0 without such layers. With sliding layers, the
// first is the index of the cell for their next token, and the next are the positions in all cells (-1 in an empty cell).
// With recurrent layers, the last is the position of the newest token (-1 before the first token). `get` and `set` return
// the number of bytes; `get` with null buffers does nothing else.
LLAMA_API int32_t llama_kvtool_n_fixed_state  (const struct llama_context * ctx);
LLAMA_API int64_t llama_kvtool_get_fixed_state(struct llama_context * ctx, int32_t * table, uint8_t * out);
LLAMA_API int64_t llama_kvtool_set_fixed_state(struct llama_context * ctx, const int32_t * table, const uint8_t * in);

// Declare that the last n tokens of the next decode are draft tokens, at most n_draft. In that decode each token
// chooses for itself which archived tokens it attends to exactly. The attention of a draft token is added to the
// signals later, unless llama_kvtool_drop removes the token first.
LLAMA_API int32_t llama_kvtool_mark_drafts(struct llama_context * ctx, int32_t n);

// Make ctx compute joint steps of up to n_most contexts that are enabled like `like`. ctx itself never holds tokens.
// Its cells must be F16, and its n_seq_max at least n_most.
LLAMA_API int32_t llama_kvtool_enable_joint(struct llama_context * ctx, const struct llama_context * like, int32_t n_most);

// Decode the tokens of several contexts in one step: the first n_tokens[0] tokens of the batch belong to members[0],
// and so on. A member's tokens have one seq_id, which differs from the other members'. Afterwards ctx has the logits,
// and each member is in the state that decoding its tokens alone would leave. Returns the status of llama_decode; 1 if
// a member has no room, and then no member has decoded anything.
LLAMA_API int32_t llama_kvtool_decode_joint(
        struct llama_context * ctx, struct llama_batch batch, struct llama_context ** members, const int32_t * n_tokens,
        int32_t n_member);

// Remove the last n tokens, at most n_draft, or n_draft + 1 with residents: their cells become free, and their attention
// leaves the signals. Tokens before the last edit cannot be removed; with signals, only draft tokens of the last decode can.
// With recurrent layers, n is at most the context's n_rs_seq, and another decode must come before the next removal.
LLAMA_API int32_t llama_kvtool_drop(struct llama_context * ctx, int32_t n);

// out[n_row][n_cell][n_dim]: keys of cells first[row] .. first[row] + n_cell - 1, each rotated by
// delta[n_row][n_cell] positions; 0 beyond a layer's own key length
LLAMA_API int32_t llama_kvtool_read_keys(
        struct llama_context * ctx, const int32_t * first, const int32_t * delta, float * out,
        int32_t n_row, int32_t n_cell, int32_t n_dim);

// Put the archive into a new file at that path. Call this before anything is archived. The file is unlinked before
// this returns: its space is freed when the context is closed or the process ends.
LLAMA_API int32_t llama_kvtool_archive_file(struct llama_context * ctx, const char * path);

// Copy these cells of all rows to the archive. Their tokens have positions pos_0, pos_0 + 1, ... in the stream and
// must follow the archive's last token. The archive keeps its newest n_max tokens; n_max is 1 or more.
LLAMA_API int32_t llama_kvtool_archive(
        struct llama_context * ctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max);

// set the base: keys in the cache and keys of the next decode are rotated to their position in the stream minus base
LLAMA_API int32_t llama_kvtool_base(struct llama_context * ctx, int64_t base);

// Make later steps attend to all archived tokens, at most n_token of them, on the device of each layer: they are
// copied there layer by layer through two buffers. 0 ends this. Returns the bytes of the buffers on devices. All
// archived keys must have one base and be nearer than n_near, or the step fails. Not available with signals, or if
// values are a part of the keys (MLA).
LLAMA_API int64_t llama_kvtool_stage(struct llama_context * ctx, int64_t n_token);

// Let steps of one token, and of its draft tokens, attend to residents instead of synthetic cells. Residents are the mean
// of each cluster (at most n_mean of a row), the tokens without a cluster, and the n_token archived tokens of the clusters
// that the last queries attended to most. They lie in cells at the end of each row, which are added to the row's own, so
// that the step computes nothing on the host. If a row has more than n_mean clusters, steps use synthetic cells again.
// n_token 0 ends this. Returns the bytes on devices. Not available without flash attention or synthetic cells, with
// signals or an index, if values are a part of the keys (MLA), and where layers lie on a worker. With recurrent layers,
// the context's n_rs_seq must be above n_draft.
LLAMA_API int64_t llama_kvtool_reside(struct llama_context * ctx, int32_t n_mean, int32_t n_token);

// bytes of the cells that llama_kvtool_reside would add; fails where that function is not available
LLAMA_API int64_t llama_kvtool_resident_bytes(struct llama_context * ctx, int32_t n_mean, int32_t n_token);

// Choose the residents of the next step from the queries of the last step. Returns how much the last step missed: the
// largest share of a query's attention that fell on clusters which are chosen now and were not resident. Attention to
// tokens without a cluster and to live tokens after the last edit is not counted. To repeat the step, drop its tokens and
// decode them again. 0 if the step had no residents
LLAMA_API float llama_kvtool_missed(struct llama_context * ctx);

// delete all but the newest n tokens of the archive; if none are left, another stream may begin
LLAMA_API int32_t llama_kvtool_forget(struct llama_context * ctx, int64_t n);

// Rewind the stream. The archive deletes its tokens from position end on, and its newest n_cell remaining tokens
// return to the cells cell .. cell + n_cell - 1 of all rows, the oldest first. From now on keys in the cache are
// rotated to their position minus base; this call does so for the returned cells, and the caller edits all other
// cells. next: position that the stream's next token had when the newest of the remaining archived tokens was archived.
// Archived tokens more than n_near before this position count as beyond n_near.
LLAMA_API int32_t llama_kvtool_rewind(
        struct llama_context * ctx, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

// Copy a layer's archived tokens in their stored format, token by token, from position begin to end - 1. `get` copies
// them to a buffer with room for them. `set` copies them from n buffers, of which in[i] holds the tokens from first[i]
// on (first[0] is begin); the layer then holds exactly these tokens, and layers that held others are emptied. Both
// return the number of bytes; with null buffers they do nothing else.
LLAMA_API int64_t llama_kvtool_get_archive(struct llama_context * ctx, int32_t layer, uint8_t * out, int64_t begin, int64_t end);
LLAMA_API int64_t llama_kvtool_set_archive(struct llama_context * ctx, int32_t layer, const uint8_t * const * in, const int64_t * first, int32_t n, int64_t begin, int64_t end);

// Copy the rest of an archive's state as a table of 3 + 2*n_frame numbers: the archive's first token, its end, the end
// of the tokens beyond n_near, and then for each frame (a run of tokens whose keys have one base) the first token and
// the base. Both return the table's length; a null table is not written. Set the table after the layers, and then
// call `llama_kvtool_seal` until it returns 0.
LLAMA_API int32_t llama_kvtool_get_archive_table(struct llama_context * ctx, int64_t * table, int32_t n);
LLAMA_API int32_t llama_kvtool_set_archive_table(struct llama_context * ctx, const int64_t * table, int32_t n);

// Report which blocks are clustered in all rows; a block is the tokens of a slab (llama_kvtool_archive_slab). The
// tokens span[0] .. span[1] - 1 are clustered as beyond n_near, span[2] .. span[3] - 1 as within n_near. Returns the
// bytes of one block's clusters; 0 if the archive has no clusters.
LLAMA_API int64_t llama_kvtool_clusters(struct llama_context * ctx, int64_t * span);

// Copy the cluster numbers of the tokens from position begin to end - 1, for blocks beyond n_near (is_far) or within
// it: block by block and row by row, two tokens a byte. Set them after the layers and before the table. Clusters that
// were not set, or do not fit the blocks, are computed again. Both return the number of bytes; with a null buffer they
// do nothing else.
LLAMA_API int64_t llama_kvtool_get_clusters(struct llama_context * ctx, uint8_t * out, int64_t begin, int64_t end, bool is_far);
LLAMA_API int64_t llama_kvtool_set_clusters(struct llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end, bool is_far);

// Compute clusters that are missing after `llama_kvtool_set_archive_table`, for a few rows per call; returns how many
// rows are left. The next call of llama_kvtool_archive computes whatever is left. n_max: the archive's maximum size,
// as for `llama_kvtool_archive`
LLAMA_API int32_t llama_kvtool_seal(struct llama_context * ctx, int64_t n_max);

// The archive allocates memory in slabs. Slab i has room for the tokens i*n_token .. (i + 1)*n_token - 1 of the
// stream in all layers; a slab whose tokens are all deleted is used again. Returns the bytes of a slab.
LLAMA_API int64_t llama_kvtool_archive_slab(const struct llama_context * ctx, int32_t * n_token);

// Make every later step record, for each row, the n archived tokens that the row attends to most. Without synthetic
// cells only the n_recall tokens that return to cells are recorded, and n must be n_recall.
LLAMA_API int32_t llama_kvtool_trace(struct llama_context * ctx, int32_t n);

// Read what llama_kvtool_trace recorded in the last step with an archive. out[n_row][n]: positions of the tokens, the
// oldest first, then -1. attn[n_row][n]: attention that each of them got, summed over the row's query heads and the
// step's tokens. n: as given to llama_kvtool_trace
LLAMA_API int32_t llama_kvtool_attended(struct llama_context * ctx, int64_t * out, float * attn, int32_t n_row, int32_t n);

// bytes of the archive
LLAMA_API int64_t llama_kvtool_archive_bytes(const struct llama_context * ctx);

// apply an edit and clear all signals except the recent one; returns when it is done
LLAMA_API int32_t llama_kvtool_apply(struct llama_context * ctx, const struct llama_kvtool_edit * edit);

#ifdef __cplusplus
}
#endif
