// Archive: keys and values that have left the cache, in host memory or in a file.

#pragma once

#include "clusters.h"
#include "hadamard.h"
#include "index.h"
#include "store.h"
#include "rotations.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvtool {

// A run of tokens whose keys are rotated to their positions minus `base`. In a long stream, the gaps between positions
// are closed whenever the end of the context is reached. A new run begins each time.
struct frame {
    int64_t first; // position of the run's first token
    int64_t base;
};

// parameters of an archive, see llama_kvtool_params
struct archive_params {
    int32_t n_recall;
    int32_t n_near;
    int32_t type_k;
    int32_t type_v;
    int32_t v_trans;
    int32_t n_synthetic;
    int32_t n_exact;

    bool is_plain = false; // true if archived keys and values are not multiplied by Hadamard matrices
};

// shape of one layer
struct archive_shape {
    int32_t n_head;
    int32_t n_embd_k; // elements of a head's key
    int32_t n_embd_v;

    rotation rope;

    bool has_mapped_values = false; // true if the cache's values are already multiplied by a Hadamard matrix
};

// tokens that leave the cache for the archive
struct evicted_tokens {
    const int32_t * cells;

    int32_t n_cell;
    int64_t pos_0; // Position of the first token that leaves.
    int64_t n_max; // Maximum number of tokens in the archive. The oldest tokens beyond it are deleted.
    int64_t rot;   // Position that the cache's next token will be rotated to.

    int64_t end() const { return pos_0 + n_cell; }

    // An archive holds the tokens begin .. end - 1, and the evicted tokens are added. Return the oldest token that is
    // kept
    int64_t first(int64_t begin, int64_t end) const { return std::max(begin < end ? begin : pos_0, this->end() - n_max); }
};

// contents of some cells of a layer, cell by cell
struct gathered {
    ggml_type type_k;
    ggml_type type_v;

    std::vector<uint8_t> k;
    std::vector<uint8_t> v; // empty if values are a part of the keys (MLA)
};

constexpr int64_t n_block = store::n_block; // tokens in a block

// Archived tokens of one layer. Their positions in the stream are consecutive.
class archived_layer {
public:
    // memory: slabs, each with room for 256 tokens of all layers. offset: byte offset of this layer in each slab
    archived_layer(const store & memory, size_t offset, const archive_shape & shape, const archive_params & params);

    int64_t begin() const { return first; }
    int64_t end()   const { return last; }

    // set the range of tokens that the layer holds; `memory` must already have slabs for them
    void set_span(int64_t begin, int64_t end);

    // Store token i. k and v have the keys and the values of all heads; both buffers are overwritten. If is_centered is
    // true, the keys must be centered already
    void put(int64_t i, float * k, float * v);

    // Reorder the tokens of a complete block in memory: for i >= first, the token in slot src[i] of the block moves
    // to slot i
    void sort(int head, int64_t block, int first, const uint8_t * src);

    size_t token_bytes() const { return n_head*size; }

    // A slot is the index at which a token is stored. In a clustered block, tokens are stored cluster by cluster, so a
    // token's slot differs from its position: see archive::slot_of

    // n keys of a head as f32, from this slot on; all of them lie in one block. If is_centered is true, the keys are
    // centered: see archive::keys
    void keys(int head, int64_t slot, int n, float * out) const;

    // n values of a head as f32, from this slot on
    void values(int head, int64_t slot, int n, float * out) const;

    // a key and a value in their stored format; they may be multiplied by Hadamard matrices
    const uint8_t * raw_key  (int head, int64_t slot) const { return key_at  (head, slot); }
    const uint8_t * raw_value(int head, int64_t slot) const { return value_at(head, slot); }

    uint8_t * raw_key  (int head, int64_t slot) { return key_at  (head, slot); }
    uint8_t * raw_value(int head, int64_t slot) { return value_at(head, slot); }

    // The center of a block at position 0: [n_head][n_embd_k]. center_of rotates it to a token's position
    const ggml_fp16_t * center(int64_t block) const { return (const ggml_fp16_t *) (memory.at(block*n_block) + center_offset()); }
    ggml_fp16_t       * center(int64_t block)       { return (ggml_fp16_t       *) (memory.at(block*n_block) + center_offset()); }

    // number of elements of a block's center; 0 if keys are not centered
    size_t n_center() const { return is_centered ? n_head*n_embd_k : 0; }

    // end of the block of token i
    static int64_t block_end(int64_t i) { return (i/n_block + 1)*n_block; }

    // end of the layer in each slab: a byte offset, rounded up to a cache line
    size_t slab_end() const;

    const int     n_head;
    const int64_t n_embd_k; // elements of a head's key
    const int64_t n_embd_v;

    const ggml_type type_k;
    const ggml_type type_v;

    // sizes of the Hadamard matrices by which stored keys and values are multiplied; 0 if there is no matrix
    const int n_map_k;
    const int n_map_v;

    // True for iq4_nl: stored keys are centered. Before they are rounded, a vector close to their mean is subtracted.
    // The keys of a head are similar to each other in most models, so their differences can be rounded more finely.
    const bool is_centered;

    const size_t size_k; // bytes of a key
    const size_t size_v;
    const size_t size;   // bytes of a key and the value stored after it

    static constexpr int n_block = store::n_block;

private:
    const store & memory;

    // Byte offset of the layer's tokens in each slab. A slab stores [n_head][n_block] keys of the layer, each followed
    // by its value, and then the center of the block
    const size_t offset;

    int64_t first = 0;
    int64_t last  = 0;

    size_t center_offset() const { return offset + n_head*n_block*size; }

    uint8_t * key_at  (int head, int64_t slot) const { return memory.at(slot) + offset + (head*n_block + slot % n_block)*size; }
    uint8_t * value_at(int head, int64_t slot) const { return key_at(head, slot) + size_k; }
};

// a part of a layer's tokens, from token `first` on, in the format of archive::get
struct archive_part {
    const uint8_t * data;
    int64_t         first;
};

// consecutive archived tokens whose keys have the same rotation
struct stretch {
    int64_t begin;
    int64_t end;

    int64_t delta; // number of positions by which a query is rotated before it is multiplied with these keys
};

class archive {
public:
    // create empty layers of these shapes
    void make(const archive_params & params, const std::vector<archive_shape> & shapes);

    // Keys of a head as f32. `key` reads the key of token i, which is stored in `slot`. `keys` reads n keys from `slot`
    // on, all in one block. order: sealed_block::order of a clustered block; null if the block's tokens are in the
    // order of the stream
    void key (size_t layer, int head, int64_t i, int64_t slot, float * out) const;
    void keys(size_t layer, int head, int64_t slot, int n, const uint8_t * order, float * out) const;

    // the vector that was subtracted from the key of token i before it was stored
    void center_of(size_t layer, int head, int64_t i, float * out) const;

    // Keep the archive in a new file at that path. Nothing may be archived yet. Throws std::runtime_error on failure.
    void open(const std::string & path) { memory.open(path); }

    bool has_file() const { return memory.has_file(); }

    // Archiving takes four steps:
    // 1. `reserve` allocates the memory. It throws out_of_space.
    // 2. `start` deletes tokens that are too old. It returns the oldest token that the archive keeps.
    // 3. `put` stores a layer's tokens, from position pos on.
    // 4. `finish` completes the archive and its clusters.
    void reserve(const evicted_tokens & evicted) { memory.reserve(first_of(evicted), evicted.end()); }
    int64_t start(const evicted_tokens & evicted);
    void put    (size_t layer, int64_t pos, const gathered & cells);
    void finish (const evicted_tokens & evicted, int64_t first, int n_thread);

    // store one token: keys and values of all heads
    void put(size_t layer, int64_t pos, ggml_type type_k, const uint8_t * k, ggml_type type_v, const uint8_t * v);

    // the oldest token of the archive after these tokens are added
    int64_t first_of(const evicted_tokens & evicted) const {
        const int64_t begin = size() > 0 ? this->begin() : evicted.pos_0;
        return first_kept(begin, evicted.first(begin, end()), evicted.end());
    }

    // While clustering is deferred, `finish` computes no clusters. Instead, `seal_row` clusters the complete blocks
    // of one head of a layer. Several heads may be clustered at the same time, but nothing else may read or change the
    // layer meanwhile. When the deferral ends, the remaining blocks are clustered.
    void defer_seal(bool on, int n_thread);
    void seal_row(size_t layer, int head);

    bool has_clusters() const { return !clusters.empty(); }

    // Set the base of the tokens that are archived next: in the cache, their keys are rotated to their positions minus
    // `base`
    void set_base(int64_t base);

    // base of the newest run
    int64_t base() const { return frames.empty() ? 0 : frames.back().base; }

    // Delete the tokens from `end` on. Restore the state that the archive had just after token end - 1 was archived.
    // next: the stream's next position at that time. Runs may be removed, so the caller must call `set_base`
    // afterwards.
    void cut(int64_t end, int64_t next);

    void clear();

    // Prepare for `fill` with the tokens begin .. end - 1: allocate their memory, and empty the layers that hold other
    // tokens. If there is no memory, throws out_of_space and leaves everything unchanged.
    void expect(int64_t begin, int64_t end);

    // copy a layer's keys and values to `out` in their stored format, token by token; each token has token_bytes bytes
    void   get(size_t layer, uint8_t * out, int64_t begin, int64_t end) const;
    size_t token_bytes(size_t layer) const { return layers[layer].token_bytes(); }

    // fill a layer with the tokens begin .. end - 1 of `in`; each part must begin where the part before it ends
    void fill(size_t layer, const std::vector<archive_part> & in, int64_t begin, int64_t end, int n_thread);

    // Copy the centers of the blocks from the block of token `begin` to the block of token end - 1, block by block and
    // layer by layer. To restore an archive, call set_centers after `fill` and before set_table.
    size_t center_bytes() const;
    void   get_centers(uint8_t * out, int64_t begin, int64_t end) const;
    void   set_centers(const uint8_t * in, int64_t begin, int64_t end);

    // Clusters of a saved archive, see llama_kvtool_clusters. is_far: kind of the clusters, see key_origin::is_far.
    // get_clusters returns true if every row has clusters of this kind for all blocks in begin .. end, otherwise false.
    // To restore an archive, call set_clusters after `fill` and before set_table.
    std::array<int64_t, 4> clustered() const;
    size_t                 cluster_bytes() const { return n_row()*sizeof(membership); }

    bool get_clusters(uint8_t * out, int64_t begin, int64_t end, bool is_far) const;
    void set_clusters(const uint8_t * in, int64_t begin, int64_t end, bool is_far);

    // Compute the clusters that are missing after `set_table`, for a few rows per call. n_max: maximum size of the
    // archive. Returns the number of rows that still have no clusters
    int seal_next_rows(int64_t n_max, int n_thread);

    // See llama_kvtool_get_archive_table. On success, set_table marks all rows as not clustered and returns an empty
    // string. If the table is invalid, it returns the reason
    std::vector<int64_t> table() const;
    std::string          set_table(const std::vector<int64_t> & table);

    int64_t begin() const { return layers.empty() ? 0 : layers[0].begin(); }
    int64_t end()   const { return layers.empty() ? 0 : layers[0].end(); }
    int64_t size()  const { return end() - begin(); }

    // Size of the archive and of one slab in bytes, including their clusters. The clusters lie in host memory even if
    // the slabs lie in a file
    int64_t bytes()      const;
    int64_t slab_bytes() const;

    size_t n_layer() const { return layers.size(); }

    const archived_layer & operator[](size_t i) const { return layers[i]; }

    // slot where a row stores token i. It differs from i in clustered blocks, which are stored in another order
    int64_t slot_of(size_t layer, int head, int64_t i) const;

    // sealed_block::order of a row's block; null if the block has no clusters, and is thus in the order of the stream
    const uint8_t * order_of(size_t layer, int head, int64_t block) const;

    const rotations & rotations_of(size_t i) const { return rope[i]; }

    // Tokens before this position are far: they are more than n_near positions before the stream's next token. Queries
    // attend to far tokens as if the distance were n_near. A clustered block is far if key_origin::is_far is true. This
    // flag may change later than this position: it changes only when the block is clustered again.
    int64_t far_end() const { return far; }

    // runs of the archived tokens, the oldest first; the newest run may not have any tokens yet
    std::vector<frame> frames;

    // Return all tokens as ranges. A range's delta is the number of positions by which a query is rotated for the
    // tokens of the range. The tokens before far_end are one range with delta = far_rotation: RoPE is undone for their
    // keys. Each other range has the tokens of one run, whose keys have the same base.
    std::vector<stretch> stretches(int64_t far_end, int64_t far_rotation) const;

    int64_t base_of(int64_t i) const;

    int64_t n_near = 0; // distance limit: tokens farther away are treated as if they were at this distance

    // clusters of a row's keys; they exist only if archive_params::n_exact > 0
    const row_clusters & clusters_of(size_t layer, int head) const { return clusters[layer][head]; }

    // Rotations between a stored key and a query, as numbers of positions. A key in the archive is rotated as it was in
    // the cache, by its position minus the base of its run. A query is rotated to position `rot`.
    //
    // function         rotates   to
    // rotation_to      a key     the position at which its block is clustered
    // query_rotation   a query   the position with the right distances to the keys of a clustered block
    // far_rotation     a query   n_near, for far keys, which are at position 0
    // rotation_back    a key     the position with the right distance to the query

    // number of positions by which the key of token i is rotated before its block is clustered
    int64_t rotation_to(const key_origin & origin, int64_t i) const { return base_of(i) - (origin.is_far ? i : origin.base); }

    // Number of positions by which a query at position `rot` is rotated before it is multiplied with keys beyond
    // n_near. Undoing RoPE rotates these keys to position 0, so the query is rotated to position n_near
    int64_t far_rotation(int64_t rot) const { return n_near - rot; }

    // number of positions by which a query at position `rot` is rotated before it is multiplied with the keys of a
    // clustered block
    int64_t query_rotation(const key_origin & origin, int64_t rot) const {
        return origin.is_far ? far_rotation(rot) : base() - origin.base;
    }

    // number of positions by which the key of token i is rotated, so that it has the right distance from a query at
    // position `rot`
    int64_t rotation_back(int64_t i, bool is_far, int64_t rot) const { return base_of(i) - (is_far ? i + far_rotation(rot) : base()); }

    // First token that is at most n_near positions before position `rot`. Until gaps between positions are closed for the
    // first time, all positions are within the context, and the archive's first token is returned. Only staging uses
    // this: it then attends at true distances, while a search limits distances to n_near (see far_end)
    int64_t near_begin(int64_t rot) const { return base() == 0 ? begin() : base() + rot - n_near; }

    // positions must be below this limit, so that computations with them do not overflow
    static constexpr int64_t max_pos = (int64_t) 1 << 40;

private:
    store memory;

    std::vector<archived_layer> layers;
    std::vector<rotations>      rope;

    int64_t far    = 0;
    int64_t n_max  = max_pos; // maximum size of the archive
    int64_t oldest = 0;       // the archive's first token, after the tokens are added for which `start` was called

    // Return the first token that remains after the tokens before `first` are deleted. It may be later than `first`:
    // clustered blocks are deleted as a whole
    int64_t first_kept(int64_t begin, int64_t first, int64_t end) const;

    std::vector<std::vector<row_clusters>> clusters; // [layer][head]

    // after set_table: the last n_unsealed rows have no clusters yet
    int n_unsealed = 0;

    // clusters that were passed to `set_clusters`, by (block, is_far); one entry per row
    std::map<std::pair<int64_t, bool>, std::vector<membership>> saved_members;

    int n_row() const;

    // Blocks of a row that should have clusters: all blocks before block `end`. Among them, the blocks before block
    // `far_end` are clustered as tokens beyond n_near
    struct row_span {
        int64_t far_end;
        int64_t end;
    };
    row_span span_of(int i_row) const;

    // Compute the center of the block of token i, which is the first token of the block that is archived. k: the keys
    // of n tokens, from token i on
    void set_center(size_t layer, int64_t i, ggml_type type, const uint8_t * k, int n);

    void move_far(int64_t end);

    // Update the clusters: cluster the blocks that have become complete, cluster blocks again if they are now beyond
    // n_near, and remove the clusters of deleted blocks.
    void seal_all(int n_thread);
    void seal_row(int i_row);

    bool is_deferred = false;
    // cluster one block of a row; keys, values: buffers for a block
    void seal_block(size_t layer, int head, int i_row, int64_t block, bool is_far, std::vector<float> & keys, std::vector<float> & values);
    void clear_clusters();

    // Remove the tokens before `first`. The caller has already fitted `memory` to the remaining tokens
    void forget(int64_t first);
};

} // namespace kvtool
