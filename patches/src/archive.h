// Keys and values that have left the cache, in host memory or in a file.

#pragma once

#include "clusters.h"
#include "index.h"
#include "layer.h"
#include "store.h"
#include "turns.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvtool {

// A stretch of the stream whose keys are rotated to their positions less `base`: a long stream starts over at the end of
// the context.
struct frame {
    int64_t first; // the position of its first token
    int64_t base;
};

// what the layers of an archive have in common
struct archive_params {
    int32_t n_recall;
    int32_t n_near;
    int32_t type_k;
    int32_t type_v;
    int32_t v_trans;
    int32_t n_made;
    int32_t n_exact;
};

// one of them
struct archive_shape {
    int32_t n_head;
    int32_t n_embd_k; // of a head
    int32_t n_embd_v;

    rotation turns;
};

// tokens that leave the cache
struct leaving {
    const int32_t * cells;

    int32_t n_cell;
    int64_t pos_0; // of the first of them
    int64_t n_max; // tokens that stay in the archive: the newest
    int64_t next;  // what the next token of the cache will be rotated to

    int64_t end() const { return pos_0 + n_cell; }

    // the oldest token that an archive has with these, which has tokens begin .. end - 1 now
    int64_t first(int64_t begin, int64_t end) const { return std::max(begin < end ? begin : pos_0, this->end() - n_max); }
};

// what cells of a layer hold, cell by cell
struct gathered {
    ggml_type type_k;
    ggml_type type_v;

    std::vector<uint8_t> k;
    std::vector<uint8_t> v; // empty where values are a part of the keys
};

// The archived tokens of one layer, by their positions in the stream, which have no gaps.
class archived_layer {
public:
    // at: where the layer's part of a slab begins
    archived_layer(
            const store & memory, size_t at, int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, ggml_type type_v);

    int64_t begin() const { return first; }
    int64_t end()   const { return last; }

    // the tokens that there are from now on; the memory has slabs for them
    void set_span(int64_t begin, int64_t end);

    // stores token i: the keys of all heads and the values of all heads
    void put(int64_t i, const float * k, const float * v);

    // puts a complete block's keys and values into another order: the token that lies in each place from `first` on
    void sort(int head, int64_t block, int first, const uint8_t * from);

    size_t token_bytes() const { return n_head*size; }

    // tokens of blocks that are sorted are given by their places from here on

    // as f32: keys i .. i + n - 1 of a head, which lie in one block
    void keys(int head, int64_t i, int n, float * out) const;

    // the same of values
    void values(int head, int64_t i, int n, float * out) const;

    // a key and a value as they are stored
    const uint8_t * raw_key  (int head, int64_t i) const { return key_at  (head, i); }
    const uint8_t * raw_value(int head, int64_t i) const { return value_at(head, i); }

    uint8_t * raw_key  (int head, int64_t i) { return key_at  (head, i); }
    uint8_t * raw_value(int head, int64_t i) { return value_at(head, i); }

    // where the block of token i ends
    static int64_t block_end(int64_t i) { return (i/n_block + 1)*n_block; }

    // where the layer's part of a slab ends
    size_t slab_end() const;

    const int     n_head;
    const int64_t n_embd_k; // of a head
    const int64_t n_embd_v;

    const ggml_type type_k;
    const ggml_type type_v;

    const size_t size_k; // bytes of a key
    const size_t size_v;
    const size_t size;   // of both, which lie side by side

    static constexpr int n_block = store::n_block;

private:
    const store & memory;


    // in a slab: [n_head][n_block] keys, each with its value behind it; [n_head][n_block/n_side] sides
    const size_t at_k;

    int64_t first = 0;
    int64_t last  = 0;

    uint8_t * key_at  (int head, int64_t i) const { return memory.at(i) + at_k + (head*n_block + i % n_block)*size; }
    uint8_t * value_at(int head, int64_t i) const { return key_at(head, i) + size_k; }
};

// tokens of a layer as `get` gives them, from this one on
struct archive_part {
    const uint8_t * data;
    int64_t         first;
};

// archived tokens whose keys are rotated alike
struct stretch {
    int64_t begin;
    int64_t end;

    int64_t delta; // how far a query turns that is to be multiplied with them
};

class archive {
public:
    // layers of these shapes, all empty
    void make(const archive_params & params, const std::vector<archive_shape> & shapes);

    // from now on it lies in a new file at that path; nothing may be archived yet. Throws where that cannot be.
    void open(const std::string & path) { memory.open(path); }

    bool has_file() const { return memory.has_file(); }

    // Archives cells of all rows: `reserve` takes the memory, and throws no_room; `start` forgets what is too old, and returns the
    // oldest token that stays; `put` stores a layer's tokens from pos on, none of which is too old; `finish` ends it.
    void reserve(const leaving & some) { memory.reserve(first_of(some), some.end()); }
    int64_t start(const leaving & some);
    void put    (size_t layer, int64_t pos, const gathered & cells);
    void finish (const leaving & some, int64_t first, int n_thread);

    // stores one token, of a key and a value of all heads
    void put(size_t layer, int64_t pos, ggml_type type_k, const uint8_t * k, ggml_type type_v, const uint8_t * v);

    // the oldest token that there is with these
    int64_t first_of(const leaving & some) const {
        const int64_t begin = size() > 0 ? this->begin() : some.pos_0;
        return whole(begin, some.first(begin, end()), some.end());
    }

    // While it is deferred, `finish` makes no clusters: `seal_layer` makes those of complete blocks, of one head of a layer. Heads may
    // be sealed at the same time. Nothing else may read or change the layer meanwhile. The end of it makes what is left.
    void defer_seal(bool on, int n_thread);
    void seal_layer(size_t layer, int head);

    bool has_clusters() const { return !clusters.empty(); }

    // keys in the cache are rotated to their positions less base
    void set_base(int64_t base);

    // the same: of the newest frame
    int64_t base() const { return frames.empty() ? 0 : frames.back().base; }

    // keeps the newest n tokens
    void keep(int64_t n);

    // Forgets the tokens from this one on. What is left is as it was when these had just come, and position `next` came next in
    // the stream. `set_base` follows: a frame may have gone.
    void cut(int64_t end, int64_t next);

    void clear();

    // Layers with other tokens than begin .. end - 1 forget them. Throws no_room, and nothing has changed then.
    void expect(int64_t begin, int64_t end);

    // a layer's keys and values as they are stored, token by token; and the bytes of a token
    void   get(size_t layer, uint8_t * out, int64_t begin, int64_t end) const;
    size_t token_bytes(size_t layer) const { return layers[layer].token_bytes(); }

    // a layer's tokens are begin .. end - 1, in parts that follow each other
    void fill(size_t layer, const std::vector<archive_part> & in, int64_t begin, int64_t end, int n_thread);

    // The clusters of blocks, for a saved archive: see llama_kvtool_clusters. They are given after the layers and before the table.
    // `get_clusters` says whether all rows have them so.
    std::array<int64_t, 4> clustered() const;
    size_t                 cluster_bytes() const { return n_row()*sizeof(membership); }

    bool get_clusters(uint8_t * out, int64_t begin, int64_t end, bool is_far) const;
    void set_clusters(const uint8_t * in, int64_t begin, int64_t end, bool is_far);

    // Makes clusters that rows lack behind `set_table`, of a few rows; returns how many rows are left. n_max: tokens that there may be
    int seal_some(int64_t n_max, int n_thread);

    // see llama_kvtool_get_archive_table; set_table says why it cannot be, or nothing, and makes the clusters anew
    std::vector<int64_t> table() const;
    std::string          set_table(const std::vector<int64_t> & table);

    int64_t begin() const { return layers.empty() ? 0 : layers[0].begin(); }
    int64_t end()   const { return layers.empty() ? 0 : layers[0].end(); }
    int64_t size()  const { return end() - begin(); }

    // with those of the clusters, which lie in host memory where slabs lie in a file, too
    int64_t bytes()      const;
    int64_t slab_bytes() const;

    size_t n_layer() const { return layers.size(); }

    const archived_layer & operator[](size_t i) const { return layers[i]; }

    // where token i of a row lies: its block may be sorted
    int64_t place_of(size_t layer, int head, int64_t i) const;

    const turns & turns_of(size_t i) const { return rope[i]; }

    // The tokens before this one are far: they all have the same distance from a query. Where there are clusters, the blocks are
    // that are sealed as far.
    int64_t far_end() const { return far; }

    std::vector<frame> frames; // those of the tokens that are not far, and the last one

    // All tokens: those before far_end as they were before RoPE, for queries that are turned by far_turn.
    std::vector<stretch> stretches(int64_t far_end, int64_t far_turn) const;

    // the base of the frame of token i
    int64_t base_of(int64_t i) const;

    int64_t n_near = 0; // the distance of far tokens

    // of a row's keys; none unless n_exact is given
    const row_clusters & clusters_of(size_t layer, int head) const { return clusters[layer][head]; }

    // how far the key of token i has to be turned, for its block's bearing
    int64_t turn_to(const bearing & to, int64_t i) const { return base_of(i) - (to.is_far ? i : to.base); }

    // positions are less than this, so that nothing that is made of them overflows
    static constexpr int64_t most = (int64_t) 1 << 40;

private:
    store memory;

    std::vector<archived_layer> layers;
    std::vector<turns>          rope;

    int64_t far    = 0;
    int64_t n_most = most; // tokens that there may be

    // the first token that stays where those before `to` are forgotten: a block that may be sealed goes as a whole
    int64_t whole(int64_t begin, int64_t to, int64_t end) const;

    std::vector<std::vector<row_clusters>> clusters; // [layer][head]

    // so many of the last rows lack clusters of an archive that has been set
    int n_unsealed = 0;

    // of blocks, near or far: what `set_clusters` has given; [row]
    std::map<std::pair<int64_t, bool>, std::vector<membership>> known;

    int n_row() const;

    // what clusters a row has: of the blocks from the archive's first to `to`, as far before `far`
    struct row_span {
        int64_t far;
        int64_t to;
    };
    row_span span_of(int row) const;

    void move_far(int64_t end);

    // Makes the clusters of blocks that are complete by now, and anew of those that have become far; forgets those of blocks that
    // are not there any more.
    void seal(int n_thread);
    void seal_row(int row);

    bool is_deferred = false;
    // keys, values: room for a block's
    void seal(size_t layer, int head, int row, int64_t block, bool is_far, std::vector<float> & keys, std::vector<float> & values);
    void clear_clusters();

    // forgets the tokens before this one, which have lost their memory
    void forget(int64_t begin);
};

} // namespace kvtool
