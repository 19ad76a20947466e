// What kvtool needs of llama.cpp beyond its public API. It is for a context with one sequence (id 0) of whose layers some
// attend to everything and keep keys for it: these have rows. Others may read an earlier layer's cells, attend through a
// sliding window or be recurrent: llama.cpp keeps what those need itself.
//
// - signals: each layer's attention probabilities, reduced in the graph to a few floats per row and cell
// - edits:   keys and values of each row moved, keys rotated, values merged, on whatever device the cache lies
// - sizes:   each layer's cache made longer or shorter
// - copies:  cells and signals out of the cache and back in again
// - archive: keys and values that have left the cache, in this process's memory or in a file, of which every step recalls some, or
//            to which it attends by made cells
// - ragged:  rows that hold different numbers of cells, each with an attention mask of its own length
//
// A row is one (layer, KV head) pair, layer by layer. With nothing enabled, llama.cpp computes what it always does.
//
// Every function that can fail returns a negative number, and llama_kvtool_error says why. The cache is then as it was,
// unless the device itself failed in the middle of an edit. Positions in the stream are less than 2^40.

#pragma once

#include "llama.h"

#define LLAMA_KVTOOL_ABI 18

// what is returned where there is no room for the archive: the call may be made again
#define LLAMA_KVTOOL_NO_ROOM (-2)

#ifdef __cplusplus
extern "C" {
#endif

// Reductions of the attention probabilities A[head, query, cell] over the queries since the last edit; of the recent
// signal over the last n_query queries, whatever edits lie between: an edit moves the attention of earlier queries along
// with the cells, and one that hides cells clears it. The query heads of one KV head are its group, which `group` reduces
// to one value; where several layers read a row's cells, these values are summed over the layers. A cell is important to a query that has seen t tokens, itself included, where A >= 1/t.
enum llama_kvtool_signal {
    LLAMA_KVTOOL_SIGNAL_ATTENTION = 1,  // the sum over the queries
    LLAMA_KVTOOL_SIGNAL_LAST      = 2,  // the last query's
    LLAMA_KVTOOL_SIGNAL_RECENT    = 4,  // the sum over the last n_query queries
    LLAMA_KVTOOL_SIGNAL_SQUARES   = 8,  // the sum of squares over the queries
    LLAMA_KVTOOL_SIGNAL_HITS      = 16, // how many (query, head) pairs it was important to
    LLAMA_KVTOOL_SIGNAL_IMPORTANT = 32, // how many queries ago it was last important, to any head: 1 is the last query; 0: to none
    LLAMA_KVTOOL_SIGNAL_HIGHEST   = 64, // the highest of all queries and of all heads, whatever `group` is
};

enum llama_kvtool_group {
    LLAMA_KVTOOL_GROUP_SUM   = 0,
    LLAMA_KVTOOL_GROUP_MAX   = 1,
    LLAMA_KVTOOL_GROUP_FIRST = 2, // the group's first head
};

struct llama_kvtool_params {
    uint32_t signals; // those that every later decode computes
    uint32_t group;
    int32_t  n_query; // of the recent signal, at least 1: so many floats per row and cell are kept

    int32_t  n_future; // positions that `llama_kvtool_read_future` looks ahead: the last n_query queries are kept for it; 0: none are

    int32_t n_ahead; // the most tokens that `llama_kvtool_take_back` can leave out

    // the archive, if there is one
    int32_t n_recall; // of each row's last cells: those that a step fills from the archive; 0 without an archive
    int32_t n_made;   // of these for each token of a step: one for each query head of a row, made so that attention to them is
                      // attention to the whole archive; 0: the n_recall archived tokens come back that get most attention
    int32_t n_exact;  // archived tokens that a step looks into, those of clusters; the others are known by their cluster's mean
                      // alone. 0: it looks into all
    int32_t n_near;   // tokens farther than this count, and come back, as if they were so far
    int32_t type_k;   // ggml_type of archived keys
    int32_t type_v;   // and values

    bool log_n;  // scale attention logits by log_512(t)
    bool ragged; // rows may hold different numbers of cells
};

// K[row, dst] = rotate(K[row, src], delta) and V[row, dst] = V[row, src]
// All sources are read before anything is written. No two moves of a row may have the same dst.
struct llama_kvtool_move {
    int32_t row;
    int32_t dst;
    int32_t src;
    int32_t delta; // positions to rotate the key by; 0 keeps its bytes
};

// V[row, dst] = the sum of weight * V[row, src] over all terms with this (row, dst), which must be neighbours
// All sources are read before anything is written. Merges come before moves.
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
    llama_pos pos_0;  // the last of them gets position pos_0 + n_keep - 1 and the others come before it; the next token
                      // comes at pos_0 + n_keep. Sliding layers follow where that is a jump, and forget everything where
                      // later queries see no cell

    const int32_t * n_keep_row; // ragged: the same for each row, at most n_keep; else null

    int32_t n_hidden; // the first cells, which no later query sees; pos_0 may be as much below 0; 0 if ragged

    bool force_graph; // compute a graph even where the cache is in host memory
};

LLAMA_API int32_t      llama_kvtool_abi(void);
LLAMA_API const char * llama_kvtool_digest(void); // of the patch files that the library was built from
LLAMA_API const char * llama_kvtool_error(void);  // why the last call on this thread failed

// From now on a crash (an abort of ggml, an uncaught exception, a bad access) writes this message to stderr and ends the
// process with exit_code, without a core dump. verbose: what ggml and C++ say comes first. A null message undoes this.
LLAMA_API int32_t llama_kvtool_guard(const char * message, int32_t exit_code, bool verbose);

// from now on a device reports at most this much memory, used or free
LLAMA_API int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes);

// the memory that a spare reports, none of it free
#define LLAMA_KVTOOL_SPARE_BYTES 1

// a spare: the same device once more, for a worker to serve beside it; null: it failed
LLAMA_API ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev);

// From now on edits of a cache on a worker's device are computed on one of its spares, and cells are read on another. A
// worker keeps one graph for each device that it serves: so it keeps these two and the decode's.
LLAMA_API int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t reads);

// the name of llama.cpp's ith architecture; null from their number on
LLAMA_API const char * llama_kvtool_arch(int32_t i);

// what a layer of a model keeps
enum llama_kvtool_layer_kind {
    LLAMA_KVTOOL_LAYER_ROWS      = 0, // cells for all tokens
    LLAMA_KVTOOL_LAYER_SLIDING   = 1, // cells for those in a sliding window
    LLAMA_KVTOOL_LAYER_RECURRENT = 2, // a state, whose size never changes
    LLAMA_KVTOOL_LAYER_INDEX     = 3, // beside cells for all tokens, keys by which the model chooses some of them
};

struct llama_kvtool_layer {
    int32_t il;   // the layer of the model
    int32_t kind; // llama_kvtool_layer_kind

    int32_t owner; // the layer whose cells it reads: itself, or an earlier one

    int32_t n_head;   // KV heads
    int32_t n_embd_k; // numbers in a key of one head
    int32_t n_embd_v; // and in a value; 0 where values are a part of the keys

    int64_t n_bytes; // of a state
};

// What each layer of a model keeps: out[n], a layer with both cells and a state twice, one without either not at all. Returns
// how many there are, whatever n is; negative: contexts of this model cannot be enabled
LLAMA_API int32_t llama_kvtool_layers(const struct llama_model * model, struct llama_kvtool_layer * out, int32_t n);

// the most cells that this model may have: its index chooses no more for a query; INT32_MAX without an index
LLAMA_API int32_t llama_kvtool_most_cells(const struct llama_model * model);

// whether the model biases attention by distance (ALiBi)
LLAMA_API bool llama_kvtool_has_alibi(const struct llama_model * model);

// start anew with these parameters, on an empty cache; returns the number of rows
LLAMA_API int32_t llama_kvtool_enable(struct llama_context * ctx, const struct llama_kvtool_params * params);

// the layer of each row; returns the number of rows
LLAMA_API int32_t llama_kvtool_row_layers(const struct llama_context * ctx, int32_t * layers, int32_t n_row);

// the length of the longest key
LLAMA_API int32_t llama_kvtool_n_dim(const struct llama_context * ctx);

// bytes of the K and V tensors, of those of sliding layers and of recurrent states
LLAMA_API int64_t llama_kvtool_cache_bytes(const struct llama_context * ctx);

// whether later decodes compute the signals, as they do at first; where they do not, their queries count in none
LLAMA_API int32_t llama_kvtool_watch(struct llama_context * ctx, bool watch);

// how many tokens the first query of the next decode has seen before it; t counts from there
LLAMA_API int32_t llama_kvtool_seen(struct llama_context * ctx, int32_t n_seen);

// give each layer n_cell[layer] cells, enough for its live ones and n_recall; the same number for all unless ragged
LLAMA_API int32_t llama_kvtool_resize(struct llama_context * ctx, const int32_t * n_cell, int32_t n_layer);

// out[n_row][n_cell]: a signal's first n_cell cells, 0 beyond a layer's own
LLAMA_API int32_t llama_kvtool_read(struct llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell);

// let a signal go on from in[n_row][n_cell], as llama_kvtool_read gave it; not the recent one
LLAMA_API int32_t llama_kvtool_write(struct llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell);

// the recent signal of each of the last n_query queries, the oldest first: out[n_query][n_row][n_cell]. Cells beyond a
// layer's own, and queries that there have not been, are 0
LLAMA_API int32_t llama_kvtool_read_recent(struct llama_context * ctx, float * out, int32_t n_query, int32_t n_row, int32_t n_cell);

// let the recent signal go on from in[n_query][n_row][n_cell]; other cells become 0
LLAMA_API int32_t llama_kvtool_write_recent(struct llama_context * ctx, const float * in, int32_t n_query, int32_t n_row, int32_t n_cell);

// What the last n_last queries would make of each row's first n_cell cells if they came at pos .. pos + n_future - 1, where pos is what
// the next token is rotated to: each query at the mean of these places. mean[n_row][n_head][n_cell] and variance, over the
// queries, of the logits that each head of a row's group gives a cell, without soft caps and what falls with distance (ALiBi).
// n_head: those of the largest group, of all layers that read a row's cells; heads that a group lacks have 0, and so have cells
// beyond a layer's own
LLAMA_API int32_t llama_kvtool_read_future(
        struct llama_context * ctx, int32_t n_last, int64_t pos, float * mean, float * variance,
        int32_t n_row, int32_t n_head, int32_t n_cell);

// Copy the last n_query queries, the oldest first: out[n_query][numbers of a query in all layers], and pos[n_query], what each is
// rotated to; -1: it has not been. Both return how many numbers a query has; with a null buffer they do nothing else.
LLAMA_API int64_t llama_kvtool_get_queries(struct llama_context * ctx, float * out, int32_t * pos);
LLAMA_API int64_t llama_kvtool_set_queries(struct llama_context * ctx, const float * in, const int32_t * pos);

// out[n_row][n_cell]: the Euclidean length of each cell's value; 1 where values are a part of the keys (MLA), 0 beyond a layer's own
// cells
LLAMA_API int32_t llama_kvtool_read_lengths(struct llama_context * ctx, float * out, int32_t n_row, int32_t n_cell);

// Copy a layer's first n_cell cells as they are stored, keys and then values, each cell by cell, between the cache and a
// buffer that has room for them. Both return how many bytes these are; with a null buffer they do nothing else.
LLAMA_API int64_t llama_kvtool_get_cells(struct llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell);
LLAMA_API int64_t llama_kvtool_set_cells(struct llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell);

// where the keys of each row's first n_cell cells stand: pos[n_row][n_cell]. With ALiBi these are not in the keys
LLAMA_API int32_t llama_kvtool_set_places(struct llama_context * ctx, const int32_t * pos, int32_t n_row, int32_t n_cell);

// The same for what a model keeps beside its rows: all cells of the layers with a sliding window, then all recurrent states.
// table[n_beside]: with sliding layers, where their next token goes, and each cell's position, -1 if it is empty; with
// recurrent ones, the position of the newest token, -1 if there is none
LLAMA_API int32_t llama_kvtool_n_beside  (const struct llama_context * ctx);
LLAMA_API int64_t llama_kvtool_get_beside(struct llama_context * ctx, int32_t * table, uint8_t * out);
LLAMA_API int64_t llama_kvtool_set_beside(struct llama_context * ctx, const int32_t * table, const uint8_t * in);

// The last n tokens of the next decode are guesses: none of its tokens changes what another one looks into of an archive, and what
// they attend to is kept apart. At most n_ahead.
LLAMA_API int32_t llama_kvtool_guess(struct llama_context * ctx, int32_t n);

// Makes ctx compute steps of up to n_most contexts that are enabled as this one is; it has no tokens of its own. Its cells
// are to be F16, and n_seq_max n_most or more.
LLAMA_API int32_t llama_kvtool_enable_joint(struct llama_context * ctx, const struct llama_context * like, int32_t n_most);

// Decodes a batch whose first n_tokens[0] tokens are the first member's, and so on, in one step: ctx has the logits, the members
// are as if each had decoded its tokens itself. Each member's tokens need a seq_id of their own. Returns what llama_decode does, 1
// where a member has no room: no member has decoded anything then.
LLAMA_API int32_t llama_kvtool_decode_joint(
        struct llama_context * ctx, struct llama_batch batch, struct llama_context ** members, const int32_t * n_tokens,
        int32_t n_member);

// The last n tokens never came: their cells are free, and what they attended to counts nowhere. At most n_ahead, and no token before
// the last edit; with signals, only guesses of the last decode. Not where layers are recurrent.
LLAMA_API int32_t llama_kvtool_take_back(struct llama_context * ctx, int32_t n);

// out[n_row][n_cell][n_dim]: the keys of cells first[row] .. first[row] + n_cell - 1, each rotated by delta[n_row][n_cell]
// positions on the way, 0 beyond a layer's own length of a key
LLAMA_API int32_t llama_kvtool_read_keys(
        struct llama_context * ctx, const int32_t * first, const int32_t * delta, float * out,
        int32_t n_row, int32_t n_cell, int32_t n_dim);

// From now on the archive lies in a new file at that path: once, and before anything is archived. The file has no name any more when this returns: its space is free again when the context is closed or the process ends.
LLAMA_API int32_t llama_kvtool_archive_file(struct llama_context * ctx, const char * path);

// Copy these cells of all rows to the archive, which later steps recall from: tokens at pos_0, pos_0 + 1, ... in the
// stream, right after those that it has. It keeps the newest n_max tokens, at least 1.
LLAMA_API int32_t llama_kvtool_archive(
        struct llama_context * ctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max);

// keys in the cache, and those of the next decode, are rotated to their position in the stream less base
LLAMA_API int32_t llama_kvtool_base(struct llama_context * ctx, int64_t base);

// From now on a step attends to all archived tokens, at most n_token of them, on the device of its layer: they are copied there layer
// by layer, through two buffers. 0: no longer. Returns the bytes that the buffers take on devices. All keys must have one base, and none
// may be far; a step fails otherwise. Not where values are a part of the keys (MLA), nor with signals.
LLAMA_API int64_t llama_kvtool_stage(struct llama_context * ctx, int64_t n_token);

// forget all but the newest n tokens of the archive; without any, another stream may begin
LLAMA_API int32_t llama_kvtool_forget(struct llama_context * ctx, int64_t n);

// The stream goes back: the archive forgets its tokens from position end on, and the newest n_cell of the others leave it for the
// cells cell .. cell + n_cell - 1 of all rows, the oldest first. Keys in the cache are rotated to their position less base from
// now on: these are, and other cells are the caller's to edit. next: the position that came next when what stays had just been
// archived, by which its far tokens are told. Not where an archive lies on a worker.
LLAMA_API int32_t llama_kvtool_go_back(
        struct llama_context * ctx, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

// Copy what a layer's archive holds, as it is stored, token by token, from position begin to end: to a buffer that has
// room for it, or from n buffers, of which in[i] has the tokens from first[i] on; first[0] is begin. That is then all that the
// layer holds; layers with other tokens forget them. Both return how many bytes these are; with null they do nothing else.
LLAMA_API int64_t llama_kvtool_get_archive(struct llama_context * ctx, int32_t layer, uint8_t * out, int64_t begin, int64_t end);
LLAMA_API int64_t llama_kvtool_set_archive(struct llama_context * ctx, int32_t layer, const uint8_t * const * in, const int64_t * first, int32_t n, int64_t begin, int64_t end);

// What else there is to an archive: table[3 + 2*n_frame] is where it begins, where it ends, where its far tokens end, and of
// each stretch of the stream whose keys have one base where that begins, and the base. Both return the table's length;
// a null table is not written. It is set after the layers, and then `llama_kvtool_seal` is called until it returns 0.
LLAMA_API int32_t llama_kvtool_get_archive_table(struct llama_context * ctx, int64_t * table, int32_t n);
LLAMA_API int32_t llama_kvtool_set_archive_table(struct llama_context * ctx, const int64_t * table, int32_t n);

// Where the archive is clustered: span[0] .. span[1] - 1 are the tokens of blocks that have the clusters of far tokens in all rows,
// and span[2] .. span[3] - 1 of those that have those of near ones. Returns the bytes of a block's; 0: the archive has no clusters.
LLAMA_API int64_t llama_kvtool_clusters(struct llama_context * ctx, int64_t * span);

// Copy the clusters of blocks, as far or near tokens have them, from position begin to end: block by block and row by row which
// cluster each token is in, two tokens a byte. They are set between the layers and the table; those that are not set, or were set
// as the blocks do not need them, are made anew. Both return how many bytes these are; with a null buffer they do nothing else.
LLAMA_API int64_t llama_kvtool_get_clusters(struct llama_context * ctx, uint8_t * out, int64_t begin, int64_t end, bool is_far);
LLAMA_API int64_t llama_kvtool_set_clusters(struct llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end, bool is_far);

// Makes the clusters that rows lack behind `llama_kvtool_set_archive_table`, of a few rows; returns how many rows are left. What is
// left when tokens are archived is made then. n_max: the most tokens that there may be, as for `llama_kvtool_archive`
LLAMA_API int32_t llama_kvtool_seal(struct llama_context * ctx, int64_t n_max);

// The archive takes its memory in slabs. Slab i has room for the tokens i*n_token .. (i + 1)*n_token - 1 of the stream in all
// layers; one whose tokens are all forgotten is used again. Returns the bytes of a slab.
LLAMA_API int64_t llama_kvtool_archive_slab(const struct llama_context * ctx, int32_t * n_token);

// From now on each row says which archived tokens it attends to most in a step, n of them. Without made cells it says them of the
// n_recall that come back, and n must be n_recall.
LLAMA_API int32_t llama_kvtool_trace(struct llama_context * ctx, int32_t n);

// out[n_row][n]: these tokens' positions of the last step with an archive, the oldest first, then -1; attn[n_row][n]: what each of
// them gets of the attention, summed over the row's query heads and the step's tokens. n: as traced
LLAMA_API int32_t llama_kvtool_attended(struct llama_context * ctx, int64_t * out, float * attn, int32_t n_row, int32_t n);

// bytes that the archive takes
LLAMA_API int64_t llama_kvtool_archive_bytes(const struct llama_context * ctx);

// apply an edit, and clear all signals but the recent one; returns when it is done
LLAMA_API int32_t llama_kvtool_apply(struct llama_context * ctx, const struct llama_kvtool_edit * edit);

#ifdef __cplusplus
}
#endif
