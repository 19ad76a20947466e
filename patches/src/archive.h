// Keys and values that have left the cache, in host memory.

#pragma once

#include "index.h"
#include "layer.h"
#include "turns.h"

#include "ggml.h"

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

struct llama_context;
struct llama_kvtool;

namespace kvtool {

// A stretch of the stream whose keys are rotated to their positions less `base`: a long stream starts over at the end of
// the context.
struct frame {
    int64_t first; // the position of its first token
    int64_t base;
};

// The archived tokens of one layer, by their positions in the stream, which have no gaps.
class archived_layer {
public:
    archived_layer(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, ggml_type type_v, int n_bit);

    // adds the token at position end(), or at any where there are none: the keys of all heads and the values of all heads
    void push(int64_t pos, const float * k, const float * v);

    // forgets the tokens before this one
    void drop(int64_t first);

    void clear();

    int64_t begin() const { return first; }
    int64_t end()   const { return last; }
    int64_t bytes() const;

    // Copies keys and values as they are stored, token by token: to out, or from in, which then is all there is, but for
    // the index. Returns how many bytes these are.
    size_t copy(uint8_t * out, const uint8_t * in, int64_t begin, int64_t end);

    // as f32: keys i .. i + n - 1 of a head, which lie in one block; value i of a head
    void keys (int head, int64_t i, int n, float * out) const;
    void value(int head, int64_t i, float * out) const;

    // a key and a value as they are stored
    const uint8_t * raw_key  (int head, int64_t i) const;
    const uint8_t * raw_value(int head, int64_t i) const;

    // where the block of token i ends
    static int64_t block_end(int64_t i) { return (i/n_block + 1)*n_block; }

    // writes a key of the index anew
    void set_index(int head, int64_t i, const float * key);

    // the side of the index with token i, and what follows it up to the block's end
    const uint8_t * side(int head, int64_t i) const;

    const int     n_head;
    const int64_t n_embd_k; // of a head
    const int64_t n_embd_v;
    const int     n_bit; // of the index; 0: there is none

    const ggml_type type_k;
    const ggml_type type_v;

    static constexpr int n_block = 1024;

private:
    // [n_head][n_block][n_embd] of keys and values; [n_head][n_block/n_side] sides
    struct block {
        std::vector<uint8_t> k;
        std::vector<uint8_t> v;
        std::vector<uint8_t> index;
    };

    const size_t size_k;
    const size_t size_v;
    const size_t size_side;

    int64_t first = 0;
    int64_t last  = 0;

    std::deque<block> blocks; // from that of the first token on

    block new_block() const;

    const block & at(int64_t i) const { return blocks[i/n_block - first/n_block]; }
};

class archive {
public:
    // as many layers as the cache has, all empty
    void make(const llama_kvtool & kvtool, const llama_context & lctx);

    // copies these cells of all rows, the first of which has position pos_0; the cache stays as it is
    void push(const llama_kvtool & kvtool, llama_context & lctx, const int32_t * cells, int32_t n_cell, int64_t pos_0);

    // keys in the cache are rotated to their positions less base
    void set_base(int64_t base);

    // the same: of the newest frame
    int64_t base() const { return frames.empty() ? 0 : frames.back().base; }

    // keeps the newest n tokens
    void keep(int64_t n);

    void clear();

    // see llama_kvtool_get_archive_table; set_table says why it cannot be, or nothing, and makes the index anew
    std::vector<int64_t> table() const;
    std::string          set_table(const std::vector<int64_t> & table);

    int64_t begin() const { return layers.empty() ? 0 : layers[0].begin(); }
    int64_t end()   const { return layers.empty() ? 0 : layers[0].end(); }
    int64_t size()  const { return end() - begin(); }
    int64_t bytes() const;

    archived_layer       & operator[](size_t i)       { return layers[i]; }
    const archived_layer & operator[](size_t i) const { return layers[i]; }

    const turns & turns_of(size_t i) const { return rope[i]; }

    // the tokens before this one are far: they all have the same distance from a query
    int64_t far_end() const { return far; }

    std::vector<frame> frames; // those of the tokens that are not far, and the last one

    // the base of the frame of token i
    int64_t base_of(int64_t i) const;

    int64_t n_near = 0; // the distance of far tokens

private:
    std::vector<archived_layer> layers;
    std::vector<turns>          rope;

    int64_t far = 0;

    void move_far(int64_t end);
};

} // namespace kvtool
