// Functions that kvtool needs in llama.cpp and that the public API lacks. They work on a context with one sequence (id
// 0). Some layers of its model attend to all earlier tokens and keep keys for these tokens: these layers have rows.
// Other layers may read an earlier layer's cells, attend through a sliding window or be recurrent. llama.cpp manages
// the memory of sliding and recurrent layers.
//
// - signals: each layer's attention probabilities, reduced in the graph to a few floats per row and cell
// - edits: keys and values of each row are moved, keys are rotated and values are merged. This happens on the device
//   that holds the cache
// - sizes: each layer's cache can be made longer or shorter
// - copies: cells and signals can be copied out of the context and back in
// - archive: keys and values that have left the cache, in this process's memory or in a file. Each step either recalls
//   some of these tokens or attends to all of them through synthetic cells
// - ragged: rows may hold different numbers of cells; each row has its own attention mask
//
// A row is one (layer, KV head) pair. Rows are numbered layer by layer. The arguments `layer` and `n_layer` count only
// layers with rows. With nothing enabled, llama.cpp computes the same bits as without the patch.
//
// Every function that can fail returns a negative number, and llama_kvtool_error gives the reason. A call that fails
// leaves the cache unchanged, unless a device failed during an edit.
//
// A token's position in the stream is the number of tokens before it, including evicted tokens. It is less than 2^40.

#pragma once

#include "llama.h"

#define LLAMA_KVTOOL_ABI 28

// returned if the archive has no memory or disk space for a call; the caller may try again
#define LLAMA_KVTOOL_NO_ROOM (-2)

#ifdef __cplusplus
extern "C" {
#endif

// Reductions of the attention probabilities A[head, query, cell] over the queries since the last edit. Only the recent
// signal reaches further back: it covers the last n_query queries. Edits move its values along with the cells, but an
// edit that hides cells clears it.
// The query heads of one KV head form a group. `llama_kvtool_params::group` sets how the values of these heads are
// reduced to one value. If several layers read a row's cells, the values of these layers are added. The signals
// IMPORTANT and HIGHEST are not added, but cover the heads of all these layers.
// A cell is important to a query that has seen t tokens (including the query's own token) if A >= 1/t.
enum llama_kvtool_signal {
    LLAMA_KVTOOL_SIGNAL_ATTENTION = 1,  // Sum over the queries.
    LLAMA_KVTOOL_SIGNAL_LAST      = 2,  // Value of the last query.
    LLAMA_KVTOOL_SIGNAL_RECENT    = 4,  // Sum over the last n_query queries.
    LLAMA_KVTOOL_SIGNAL_SQUARES   = 8,  // Sum of squares over the queries.
    LLAMA_KVTOOL_SIGNAL_HITS      = 16, // Number of (query, head) pairs that the cell was important to.
    LLAMA_KVTOOL_SIGNAL_IMPORTANT = 32, // Age of the last query that the cell was important to in any head: 1 for the
                                        // last query, 2 for the query before it. 0 if there is no such query.
    LLAMA_KVTOOL_SIGNAL_HIGHEST   = 64, // Maximum over all queries and all heads. `group` has no effect.
};

enum llama_kvtool_group {
    LLAMA_KVTOOL_GROUP_SUM   = 0,
    LLAMA_KVTOOL_GROUP_MAX   = 1,
    LLAMA_KVTOOL_GROUP_FIRST = 2, // first head of the group
};

struct llama_kvtool_params {
    uint32_t signals; // bits of llama_kvtool_signal that every later decode computes
    uint32_t group;
    // number of queries that the recent signal covers, at least 1; each query needs one float per row and cell
    int32_t  n_query;

    // number of later positions that `llama_kvtool_read_future` covers. If this is not 0, the context stores its last
    // n_query queries
    int32_t  n_future;

    // maximum number of draft tokens of a step; also the maximum number of tokens that `llama_kvtool_drop` removes
    int32_t n_draft;

    // Maximum number of queries whose signals are deferred: steps store their queries, and the signals of several steps
    // are computed together later. If this is 0, without flash attention, or if layers lie on a worker, only steps with
    // draft tokens defer their signals. With an archive, no step defers them. Therefore, draft tokens are not possible
    // with both signals and an archive
    int32_t n_defer;

    // Number of cells at the end of each row that every step fills from the archive: with synthetic cells, or with
    // archived tokens. 0: there is no archive
    int32_t n_recall;
    // Number of synthetic cells per token of a step: one for each query head of a row. Attention to these cells equals
    // attention to the whole archive. If this is 0, the n_recall archived tokens with the most attention return to
    // cells instead
    int32_t n_synthetic;
    // In a step of one token, each row attends exactly to all archived tokens without clusters, and to about n_exact
    // tokens in the clusters with the most attention per token. All other clusters are represented by their means. If
    // n_exact is 0, the step attends exactly to all archived tokens
    int32_t n_exact;
    // maximum distance between a query and an archived token: tokens farther away are treated as if at this distance
    int32_t n_near;
    int32_t type_k;   // Type (ggml_type) of archived keys.
    int32_t type_v;   // Type (ggml_type) of archived values.

    // If false, archived keys and values of fewer than 8 bits are multiplied by a Hadamard matrix before they are
    // rounded. True is for archives of earlier versions, which lack this multiplication
    bool plain;

    bool logn;   // Multiply the attention logits of a query that has seen t tokens by log_512(t).
    bool ragged; // Rows may hold different numbers of cells.
};

// K[row, dst] = rotate(K[row, src], delta) and V[row, dst] = V[row, src]. All sources are read before anything is
// written. No two moves of a row may have the same dst.
struct llama_kvtool_move {
    int32_t row;
    int32_t dst;
    int32_t src;
    int32_t delta; // number of positions by which the key is rotated; if 0, its bytes are copied
};

// V[row, dst] = sum of weight * V[row, src] over all terms with this (row, dst). These terms must be neighbours in the
// list. All sources are read before anything is written. Merges are computed before moves.
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

    // the number of cells that each row keeps: after the edit cells 0 .. n_keep - 1 are in use and all later cells are
    // free
    int32_t   n_keep;
    // Cell n_keep - 1 gets position pos_0 + n_keep - 1, and the other cells in use get lower positions. The next token
    // must have position pos_0 + n_keep. If this changes the position of the newest token, all positions in sliding
    // layers are shifted by the same amount. If n_hidden equals n_keep, sliding and recurrent layers are emptied
    llama_pos pos_0;

    // only if rows are ragged, else null: the number of cells that each row keeps, at most n_keep
    const int32_t * n_keep_row;

    // The first n_hidden cells of each row are hidden from all later queries. n_hidden must be 0 if rows are ragged,
    // and pos_0 must be at least -n_hidden
    int32_t n_hidden;

    // true: the edit is computed as a graph even if the cache is in host memory
    bool force_graph;
};

LLAMA_API int32_t      llama_kvtool_abi(void);
LLAMA_API const char * llama_kvtool_digest(void); // Digest of the patch files in this library.
LLAMA_API const char * llama_kvtool_error(void);  // Reason why the last call on this thread failed.

// Install crash handlers. After a crash (an abort of ggml, an uncaught exception, a bad access), they write this
// message to stderr and end the process with exit_code, without a core dump. If `verbose` is true, the reports of ggml
// and C++ are printed first. A null message restores the previous handlers.
LLAMA_API int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose);

// let a device report at most this many bytes as its total memory and as its free memory
LLAMA_API int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes);

// total memory that a spare reports (see llama_kvtool_spare); the free memory that it reports is 0
#define LLAMA_KVTOOL_SPARE_BYTES 1

// Create a spare: a second handle of a device. A worker (an RPC server) serves the device and its spare as separate
// devices. Returns null on failure
LLAMA_API ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev);

// Set the spares for the part of a cache that lies on a worker's device `dev`: edits are computed on the spare `edits`,
// and cells are read on the spare `reads`. A worker caches only one graph per device. With these two spares, the graphs
// of decode, edits and reads all stay cached.
LLAMA_API int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t reads);

// name of llama.cpp's ith architecture; null if there are no more
LLAMA_API const char * llama_kvtool_arch(int32_t i);

// bit of a token's attributes: the token ends a generation
#define LLAMA_KVTOOL_TOKEN_ENDS (1 << 30)

// Write the attributes of all tokens of a vocabulary: bits of llama_token_attr, and LLAMA_KVTOOL_TOKEN_ENDS
LLAMA_API int32_t llama_kvtool_token_attrs(const struct llama_vocab * vocab, int32_t * attrs);

// Write the bytes of all tokens of a vocabulary one after another, if they fit into out[n_out], and where each token ends.
// For a control token, these are the bytes of its name. Returns the number of bytes of all tokens, which may be more
// than n_out
LLAMA_API int64_t llama_kvtool_pieces(const struct llama_vocab * vocab, char * out, int64_t n_out, int64_t * ends);

// memory that a layer of a model keeps
enum llama_kvtool_layer_kind {
    LLAMA_KVTOOL_LAYER_ROWS      = 0, // Cells for all tokens.
    LLAMA_KVTOOL_LAYER_SLIDING   = 1, // Cells for the tokens in a sliding window.
    LLAMA_KVTOOL_LAYER_RECURRENT = 2, // A state of constant size.
    LLAMA_KVTOOL_LAYER_INDEX     = 3, // Cells for all tokens, and keys by which the model chooses some of them.
};

struct llama_kvtool_layer {
    int32_t il;   // Index of the layer in the model.
    int32_t kind; // One of llama_kvtool_layer_kind.

    // index of the layer whose cells this layer reads: this layer or an earlier layer
    int32_t owner;

    int32_t n_head;   // Number of KV heads.
    int32_t n_embd_k; // Elements of a key of one head.
    int32_t n_embd_v; // Elements of a value of one head. 0 if values are a part of the keys (MLA).

    int64_t n_bytes; // bytes of a recurrent state
};

// Write a description of the memory of each layer of a model to out[n]. A layer that has both cells and a state appears
// twice. A layer that has no memory does not appear. Returns the number of entries, which may be more than n; a
// negative number if contexts of this model cannot be enabled
LLAMA_API int32_t llama_kvtool_layers(const struct llama_model * model, struct llama_kvtool_layer * out, int32_t n);

// Maximum number of cells per layer for this model. If the model has an index that chooses cells for each query, this
// is the number of cells that the index chooses: with more cells, it would not choose all of them. Otherwise INT32_MAX
LLAMA_API int32_t llama_kvtool_most_cells(const struct llama_model * model);

// true if the model biases attention by distance (ALiBi)
LLAMA_API bool llama_kvtool_has_alibi(const struct llama_model * model);

// True if the newest tokens of a step can be removed: either the model has no recurrent layers, or llama.cpp can keep
// the recurrent states after each of a step's last tokens
LLAMA_API bool llama_kvtool_can_drop(const struct llama_model * model);

// true if the model has layers for multi-token prediction (MTP), these layers are loaded, and llama.cpp can compute
// them. A context of type LLAMA_CONTEXT_TYPE_MTP runs them
LLAMA_API bool llama_kvtool_has_mtp(const struct llama_model * model);

// Make later decodes keep the hidden states that MTP layers read. all: true for the hidden states of all tokens, false
// for tokens with logits only
LLAMA_API int32_t llama_kvtool_output_hidden(struct llama_context * ctx, bool all);

// read the hidden states of tokens first .. first + n - 1 of the last decode: out[n][llama_model_n_embd_out]
LLAMA_API int32_t llama_kvtool_get_hidden(struct llama_context * ctx, int32_t first, int32_t n, float * out);

// empty the cache and enable kvtool with these parameters; returns the number of rows
LLAMA_API int32_t llama_kvtool_enable(struct llama_context * ctx, const struct llama_kvtool_params * params);

// write the index of each row's layer among all layers of the model; returns the number of rows
LLAMA_API int32_t llama_kvtool_row_layers(const struct llama_context * ctx, int32_t * layers, int32_t n_row);

// number of elements of the longest key
LLAMA_API int32_t llama_kvtool_n_dim(const struct llama_context * ctx);

// bytes of all K and V tensors (also in sliding layers) and of recurrent states
LLAMA_API int64_t llama_kvtool_cache_bytes(const struct llama_context * ctx);

// bytes of the queries that steps store to compute their signals later; 0 if each step computes its own signals at once
LLAMA_API int64_t llama_kvtool_deferred_bytes(const struct llama_context * ctx);

// Turn the signals on or off for later decodes; at first they are on. The queries of decodes with signals off are not
// in any signal
LLAMA_API int32_t llama_kvtool_watch(struct llama_context * ctx, bool watch);

// set how many tokens come before the next token; each decoded token adds one. Signals and logn use this number
LLAMA_API int32_t llama_kvtool_seen(struct llama_context * ctx, int32_t n_seen);

// Set the number of cells of each layer, without the cells of residents. n_cell[layer] must be at least the layer's
// live cells plus n_recall. Unless rows are ragged, all layers need the same number
LLAMA_API int32_t llama_kvtool_resize(struct llama_context * ctx, const int32_t * n_cell, int32_t n_layer);

// read a signal into out[n_row][n_cell]; entries beyond a layer's cells are 0
LLAMA_API int32_t llama_kvtool_read(struct llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell);

// Restore a signal from in[n_row][n_cell], in the layout that llama_kvtool_read writes. The recent signal has a
// separate function, llama_kvtool_write_recent
LLAMA_API int32_t llama_kvtool_write(struct llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell);

// Read the recent signal query by query, the oldest first: out[n_query][n_row][n_cell]. Values are 0 for cells beyond a
// layer's cells. If there were fewer than n_query queries, the values of the missing queries are 0
LLAMA_API int32_t llama_kvtool_read_recent(struct llama_context * ctx, float * out, int32_t n_query, int32_t n_row, int32_t n_cell);

// restore the recent signal from in[n_query][n_row][n_cell]; values of the cells from n_cell on become 0
LLAMA_API int32_t llama_kvtool_write_recent(struct llama_context * ctx, const float * in, int32_t n_query, int32_t n_row, int32_t n_cell);

// Estimate the logits that later queries will give each row's first n_cell cells. The estimate assumes that the last
// n_last queries come again at the positions pos .. pos + n_future - 1, where pos is the position that the next token
// is rotated to. Each query is therefore multiplied by the mean of the rotations to these positions. For each head of a
// row's group, this function writes the mean and the variance of the logits over the queries, each as
// [n_row][n_head][n_cell]. A group has the query heads of all layers that read the row's cells, and n_head is the size
// of the largest group. Entries are 0 for heads that a smaller group does not have, and for cells beyond a layer's
// cells. The logits have no soft cap and no ALiBi
LLAMA_API int32_t llama_kvtool_read_future(
        struct llama_context * ctx, int32_t n_last, int64_t pos, float * mean, float * variance,
        int32_t n_row, int32_t n_head, int32_t n_cell);

// Copy the last n_query queries, the oldest first, to out[n_query][n] or from in[n_query][n], where n is the number of
// elements of a query in all layers together. pos[n_query] has the position that each query is rotated to. If there
// were fewer than n_query queries, pos is -1 for the missing queries. Both functions return n; if a buffer is null,
// they do nothing else.
LLAMA_API int64_t llama_kvtool_get_queries(struct llama_context * ctx, float * out, int32_t * pos);
LLAMA_API int64_t llama_kvtool_set_queries(struct llama_context * ctx, const float * in, const int32_t * pos);

// Write the Euclidean norm of each cell's value to out[n_row][n_cell]. The norm is given as 1 if values are a part of
// the keys (MLA), and as 0 beyond a layer's cells
LLAMA_API int32_t llama_kvtool_read_value_norms(struct llama_context * ctx, float * out, int32_t n_row, int32_t n_cell);

// Copy a layer's first n_cell cells in their stored format to or from a buffer with room for them: all keys cell by
// cell, then all values cell by cell. Both functions return the number of bytes; if the buffer is null, they do nothing
// else.
LLAMA_API int64_t llama_kvtool_get_cells(struct llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell);
LLAMA_API int64_t llama_kvtool_set_cells(struct llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell);

// Set the positions of the keys in each row's first n_cell cells: pos[n_row][n_cell]. Only models with ALiBi need this,
// because their keys do not contain their positions
LLAMA_API int32_t llama_kvtool_set_positions(struct llama_context * ctx, const int32_t * pos, int32_t n_row, int32_t n_cell);

// Copy the fixed state: the memory of layers without rows. `out` and `in` have all cells of the sliding layers, then
// all recurrent states. `table` has llama_kvtool_n_fixed_state numbers:
// - if there are sliding layers: first the index of the cell for their next token, then the position of the token in
//   each of their cells (-1 if the cell is empty)
// - if there are recurrent layers: last the position of the newest token (-1 before the first token)
// `get` and `set` return the number of bytes in `out` or `in`. If `table` and `out` are null, `get` copies nothing.
LLAMA_API int32_t llama_kvtool_n_fixed_state  (const struct llama_context * ctx);
LLAMA_API int64_t llama_kvtool_get_fixed_state(struct llama_context * ctx, int32_t * table, uint8_t * out);
LLAMA_API int64_t llama_kvtool_set_fixed_state(struct llama_context * ctx, const int32_t * table, const uint8_t * in);

// Declare that the last n tokens of the next decode are draft tokens; n is at most n_draft. In that decode, the
// archived tokens that are attended to exactly are chosen separately for each token. The attention of a draft token is
// added to the signals later, unless llama_kvtool_drop removes the token first.
LLAMA_API int32_t llama_kvtool_mark_drafts(struct llama_context * ctx, int32_t n);

// Make ctx compute joint steps of up to n_most contexts. These contexts must be enabled with the same parameters as
// `like`. ctx never holds tokens between steps. Its cells must be F16, and its n_seq_max at least n_most.
LLAMA_API int32_t llama_kvtool_enable_joint(struct llama_context * ctx, const struct llama_context * like, int32_t n_most);

// Decode the tokens of several contexts in one step: the first n_tokens[0] tokens of the batch belong to members[0],
// the next n_tokens[1] tokens to members[1], and so on. The tokens of a member have one seq_id, and each member has a
// different seq_id. Afterwards ctx has the logits, and each member is in the same state as if it had decoded its tokens
// alone. Returns the status of llama_decode. If a member has no room, the status is 1 and no member has decoded
// anything.
LLAMA_API int32_t llama_kvtool_decode_joint(
        struct llama_context * ctx, struct llama_batch batch, struct llama_context ** members, const int32_t * n_tokens,
        int32_t n_member);

// Remove the last n tokens: their cells become free, and their attention is removed from the signals. n is at most
// n_draft, or n_draft + 1 with residents. Tokens before the last edit cannot be removed. With signals or recurrent
// layers, only draft tokens of the last decode can be removed; if that decode used residents, all its tokens can. With
// recurrent layers, n is at most the context's n_rs_seq, and another decode must come before the next removal.
LLAMA_API int32_t llama_kvtool_drop(struct llama_context * ctx, int32_t n);

// Read the keys of cells first[row] .. first[row] + n_cell - 1 into out[n_row][n_cell][n_dim]. Each key is rotated by
// delta[n_row][n_cell] positions. Elements beyond a layer's key length are 0
LLAMA_API int32_t llama_kvtool_read_keys(
        struct llama_context * ctx, const int32_t * first, const int32_t * delta, float * out,
        int32_t n_row, int32_t n_cell, int32_t n_dim);

// Keep the archive in a new file at that path. Call this before anything is archived. The file is unlinked before this
// function returns, so its space is freed when the context is closed or the process ends.
LLAMA_API int32_t llama_kvtool_archive_file(struct llama_context * ctx, const char * path);

// Copy these cells of all rows to the archive. Their tokens have positions pos_0, pos_0 + 1, ... in the stream and must
// follow the archive's last token. The archive keeps only its newest n_max tokens; n_max is at least 1.
LLAMA_API int32_t llama_kvtool_archive(
        struct llama_context * ctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max);

// declare the base: keys in the cache, and keys of later decodes, are rotated to their position in the stream minus
// base
LLAMA_API int32_t llama_kvtool_base(struct llama_context * ctx, int64_t base);

// Make later steps attend to all archived tokens (at most n_token tokens) on the device of each layer. The tokens are
// copied to the devices layer by layer through two buffers. n_token 0 ends this. Returns the size of the buffers on
// devices, in bytes. While the base is 0, queries have their true distances from all tokens. Otherwise, tokens that are
// more than n_near positions before a step's first query are treated as if they were n_near positions before it. Not
// available with signals, with logn, or if a model with MLA has an index.
LLAMA_API int64_t llama_kvtool_stage(struct llama_context * ctx, int64_t n_token);

// Bytes that llama_kvtool_stage needs on a device for each archived token, in each of its two buffers.
LLAMA_API int64_t llama_kvtool_stage_bytes(struct llama_context * ctx);

// Let steps of one token (plus its draft tokens) attend to residents instead of synthetic cells. A row has four kinds
// of residents:
// - means of clusters, at most n_mean
// - means of sets of 16 clusters, at most n_mean_set
// - all tokens without a cluster
// - tokens of the clusters that the last queries attended to most, at most n_token
// If n_mean_set is 0, n_mean has to be enough for all clusters. Otherwise, n_mean_set has to be enough for all sets.
// For the sets that the last queries attended to most, the means of their clusters are then resident instead.
// Residents lie in additional cells at the end of each row, so a step computes nothing on the host. If the cells are
// not enough, steps use synthetic cells again. n_token 0 ends this. Returns the size of the additional cells and
// buffers on devices, in bytes.
// Not available without flash attention or without synthetic cells, with signals, with logn, with an index, if
// values are a part of the keys (MLA), or if layers lie on a worker. With recurrent layers, the context's n_rs_seq
// must be above n_draft.
LLAMA_API int64_t llama_kvtool_reside(struct llama_context * ctx, int32_t n_mean, int32_t n_mean_set, int32_t n_token);

// return the size in bytes of the cells that llama_kvtool_reside would add; fails if residents are not available
LLAMA_API int64_t llama_kvtool_resident_bytes(struct llama_context * ctx, int32_t n_mean, int32_t n_mean_set, int32_t n_token);

// Choose the residents of the next step from the queries of the last step. Returns the share of attention that the last
// step missed. This is attention to clusters that are chosen now but were not resident in the last step, without the
// part that the means of these clusters represent. For each token of the step, the share is averaged over all query
// heads of all layers. The result is the largest of these averages, and 0 if the step had no residents. The shares are
// a little too large, because the softmax omits tokens without a cluster and some live tokens that were decoded after
// the last edit. To repeat the step, drop its tokens and decode them again
LLAMA_API float llama_kvtool_missed(struct llama_context * ctx);

// delete all tokens of the archive; another stream may then begin
LLAMA_API int32_t llama_kvtool_forget(struct llama_context * ctx);

// Rewind the stream:
// - The archive deletes its tokens from position `end` on.
// - Its newest n_cell tokens then leave it for the cells cell .. cell + n_cell - 1 of all rows, the oldest first.
// - `base` becomes the base, see llama_kvtool_base. This call rotates the keys that return to cells; the caller must
//   edit all other cells.
// next: the stream's next position just after the newest remaining token was archived. Archived tokens more than n_near
// before `next` count as beyond n_near.
LLAMA_API int32_t llama_kvtool_rewind(
        struct llama_context * ctx, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

// Copy a layer's archived tokens in their stored format, token by token, from position begin to end - 1. `get` copies
// them to a buffer with room for them. `set` copies them from n buffers: in[i] holds the tokens from position first[i]
// on (first[0] is begin). Afterwards the layer holds exactly these tokens, and layers that held other tokens are
// emptied. Both functions return the number of bytes; if the buffers are null, they do nothing else.
LLAMA_API int64_t llama_kvtool_get_archive(struct llama_context * ctx, int32_t layer, uint8_t * out, int64_t begin, int64_t end);
LLAMA_API int64_t llama_kvtool_set_archive(
        struct llama_context * ctx, int32_t layer, const uint8_t * const * in, const int64_t * first, int32_t n,
        int64_t begin, int64_t end);

// Copy the rest of an archive's state as a table of 3 + 2*n_frame numbers. The first three are positions: of the
// archive's first token, of the token after its last token, and of its first token within n_near. Then come two numbers
// for each frame (a run of tokens whose keys have one base): its first token and its base. Both functions return the
// table's length; a null table is not written. Set the table after the layers, and then call `llama_kvtool_seal` until
// it returns 0.
LLAMA_API int32_t llama_kvtool_get_archive_table(struct llama_context * ctx, int64_t * table, int32_t n);
LLAMA_API int32_t llama_kvtool_set_archive_table(struct llama_context * ctx, const int64_t * table, int32_t n);

// Copy the centers of all blocks that hold tokens from position begin to end - 1. Keys that are archived as iq4_nl are
// stored minus the center of their block. Set the centers after the layers and before the table. Both functions return
// the number of bytes, which is 0 if keys have another type; if the buffer is null, they do nothing else.
LLAMA_API int64_t llama_kvtool_get_centers(struct llama_context * ctx, uint8_t * out, int64_t begin, int64_t end);
LLAMA_API int64_t llama_kvtool_set_centers(struct llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end);

// Report which blocks have clusters in all rows. A block has the tokens of one slab (see llama_kvtool_archive_slab).
// The tokens span[0] .. span[1] - 1 have clusters for tokens beyond n_near, and span[2] .. span[3] - 1 have clusters
// for tokens within n_near. Returns the size of one block's clusters in bytes; 0 if there are no clusters.
LLAMA_API int64_t llama_kvtool_clusters(struct llama_context * ctx, int64_t * span);

// Copy the cluster numbers of the tokens from position begin to end - 1. is_far: true if these blocks have clusters for
// tokens beyond n_near, false if for tokens within n_near. The order is block by block and row by row, with two tokens
// per byte. Set the cluster numbers after the layers and before the table. If clusters are not set, or do not fit the
// blocks, they are computed again. Both functions return the number of bytes; if the buffer is null, they do nothing
// else.
LLAMA_API int64_t llama_kvtool_get_clusters(struct llama_context * ctx, uint8_t * out, int64_t begin, int64_t end, bool is_far);
LLAMA_API int64_t llama_kvtool_set_clusters(struct llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end, bool is_far);

// Compute clusters that are missing after `llama_kvtool_set_archive_table`, for a few rows per call. Returns the number
// of rows that are left. The next call of `llama_kvtool_archive` computes all missing clusters. n_max: the archive's
// maximum size, as for `llama_kvtool_archive`
LLAMA_API int32_t llama_kvtool_seal(struct llama_context * ctx, int64_t n_max);

// The archive allocates memory in slabs. Slab i has room for the tokens i*n_block .. (i + 1)*n_block - 1 of the stream
// in all layers. When all tokens of a slab are deleted, its memory is used again. Returns the size of a slab in bytes.
LLAMA_API int64_t llama_kvtool_archive_slab(const struct llama_context * ctx, int32_t * n_block);

// Make every later step record, for each row, the n archived tokens that the row attends to most. If there are no
// synthetic cells, the recorded tokens are the n_recall tokens that return to cells, so n must be n_recall.
LLAMA_API int32_t llama_kvtool_trace(struct llama_context * ctx, int32_t n);

// Read the tokens that the last step with an archive recorded. out[n_row][n] gets the positions of the tokens, the
// oldest first, followed by -1 if there are fewer than n. attn[n_row][n] gets the attention to each of these tokens,
// summed over the row's query heads and the step's tokens. n must be the same as for llama_kvtool_trace
LLAMA_API int32_t llama_kvtool_attended(struct llama_context * ctx, int64_t * out, float * attn, int32_t n_row, int32_t n);

// bytes of the archive
LLAMA_API int64_t llama_kvtool_archive_bytes(const struct llama_context * ctx);

// apply an edit, clear all signals except the recent signal, and return when the edit is done
LLAMA_API int32_t llama_kvtool_apply(struct llama_context * ctx, const struct llama_kvtool_edit * edit);

#ifdef __cplusplus
}
#endif
