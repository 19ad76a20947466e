// Keys in 8 bits. A pack has 16 interleaved keys, so that a query is multiplied with all of them at once.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtool {

constexpr int n_pack = 16;

// Convert numbers to 8 bits and return their scale. NaN and values out of range become 0.
float to_bytes(const float * x, int64_t n, int8_t * out);

// a query in 8 bits
struct byte_query {
    std::vector<int32_t> quads; // each entry holds four 8-bit numbers

    float   scale = 0.0f;
    int32_t sum   = 0;

    void set(const float * query, int64_t n_embd);
};

// bytes of a pack: [n_embd/4][n_pack][4] bytes, then n_pack scales. n_embd: a multiple of 8
size_t pack_bytes(int64_t n_embd);

void set_key(uint8_t * pack, int i, const float * key, int64_t n_embd);

void get_key(const uint8_t * pack, int i, float * key, int64_t n_embd);

// copy key j of the pack `src` to key i of the pack `dst`
void copy_key(uint8_t * dst, int i, const uint8_t * src, int j, int64_t n_embd);

// out[n*n_pack]: products of n packs with a query
void multiply(const uint8_t * packs, int n, const byte_query & query, int64_t n_embd, float * out);

} // namespace kvtool
