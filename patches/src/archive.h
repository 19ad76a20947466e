// Keys and values that have left the cache, in host memory or in a file.

#pragma once

#include "clusters.h"
#include "index.h"
#include "layer.h"
#include "store.h"
#include "turns.h"

#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <string>
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
    int32_t n_bit;
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

// The archived tokens of one layer, by their positions in the stream, which have no gaps.
class archived_layer {
public:
    // at: where the layer's part of a slab begins
    archived_layer(
            const store & memory, size_t at, int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, ggml_type type_v, int n_bit);

    int64_t begin() const { return first; }
    int64_t end()   const { return last; }

    // the tokens that there are from now on; the memory has slabs for them
    void set_span(int64_t begin, int64_t end);

    // stores token i: the keys of all heads and the values of all heads, and the index of what is stored
    void put(int64_t i, const float * k, const float * v, std::vector<float> & tmp);

    // Copies keys and values as they are stored, token by token: to out, or from in, but for the index. Returns how many
    // bytes these are.
    size_t copy(uint8_t * out, const uint8_t * in, int64_t begin, int64_t end) const;

    // as f32: keys i .. i + n - 1 of a head, which lie in one block
    void keys(int head, int64_t i, int n, float * out) const;

    // the same of values
    void values(int head, int64_t i, int n, float * out) const;

    // asks for a key's and a value's memory
    void prefetch(int head, int64_t i) const {
#ifdef __GNUC__
        for (const uint8_t * x = key_at(head, i), * end = x + size_k; x < end; x += 64) {
            __builtin_prefetch(x);
        }
        for (const uint8_t * x = value_at(head, i), * end = x + size_v; x < end; x += 64) {
            __builtin_prefetch(x);
        }
#else
        (void) head, (void) i;
#endif
    }

    // a key and a value as they are stored
    const uint8_t * raw_key  (int head, int64_t i) const { return key_at  (head, i); }
    const uint8_t * raw_value(int head, int64_t i) const { return value_at(head, i); }

    // where the block of token i ends
    static int64_t block_end(int64_t i) { return (i/n_block + 1)*n_block; }

    // writes a key of the index anew
    void set_index(int head, int64_t i, const float * key);

    // the side of the index with token i, and what follows it up to the block's end
    const uint8_t * side(int head, int64_t i) const;

    // where the layer's part of a slab ends
    size_t slab_end() const;

    const int     n_head;
    const int64_t n_embd_k; // of a head
    const int64_t n_embd_v;
    const int     n_bit; // of the index; 0: there is none

    const ggml_type type_k;
    const ggml_type type_v;

    static constexpr int n_block = store::n_block;

private:
    const store & memory;

    const size_t size_k;
    const size_t size_v;
    const size_t size_side;

    // in a slab: [n_head][n_block][n_embd] of keys and of values; [n_head][n_block/n_side] sides
    const size_t at_k;
    const size_t at_v;
    const size_t at_side;

    int64_t first = 0;
    int64_t last  = 0;

    uint8_t * key_at  (int head, int64_t i) const { return memory.at(i) + at_k + (head*n_block + i % n_block)*size_k; }
    uint8_t * value_at(int head, int64_t i) const { return memory.at(i) + at_v + (head*n_block + i % n_block)*size_v; }
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

    // Archives cells of all rows: `reserve` takes the memory, and throws no_room; `start` forgets what is too old; `put` copies
    // a layer's cells out of its cache; `finish` ends it.
    void reserve(const leaving & some) { memory.reserve(first_of(some), some.end()); }
    void start  (const leaving & some);
    void put    (size_t layer, const ggml_tensor * k, const ggml_tensor * v, const leaving & some);
    void finish (const leaving & some);

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

    // a layer's tokens are begin .. end - 1; some of them, from i on, as `copy` gave them
    void fill(size_t layer, const uint8_t * in, int64_t i, int64_t n, int64_t begin, int64_t end);

    // see llama_kvtool_get_archive_table; set_table says why it cannot be, or nothing, and makes the index anew
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

    // a key as f32, rotated to its position less base_of(i), whether token i is far or not
    void key(size_t layer, int head, int64_t i, float * out) const;

    const turns & turns_of(size_t i) const { return rope[i]; }

    // the tokens before this one are far: they all have the same distance from a query
    int64_t far_end() const { return far; }

    std::vector<frame> frames; // those of the tokens that are not far, and the last one

    // all tokens, for queries the first of which is rotated to rot; far ones as they were before RoPE
    std::vector<stretch> stretches(int64_t rot) const;

    // the base of the frame of token i
    int64_t base_of(int64_t i) const;

    int64_t n_near = 0; // the distance of far tokens

    // of a row's keys; none unless n_exact is given
    const row_clusters * clusters_of(size_t layer, int head) const { return clusters.empty() ? nullptr : &clusters[layer][head]; }

    // positions are less than this, so that nothing that is made of them overflows
    static constexpr int64_t most = (int64_t) 1 << 40;

private:
    store memory;

    std::vector<archived_layer> layers;
    std::vector<turns>          rope;

    bool v_trans = false;

    int64_t far = 0;

    int64_t first_of(const leaving & some) const { return some.first(begin(), end()); }

    std::vector<std::vector<row_clusters>> clusters; // [layer][head]

    void move_far(int64_t end);

    // makes the clusters of the blocks that are complete by now, and forgets those of blocks that are not any more
    void cluster();
    void clear_clusters();

    // forgets the tokens before this one, which have lost their memory
    void forget(int64_t begin);
};

} // namespace kvtool
