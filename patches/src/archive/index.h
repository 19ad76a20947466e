// Keys in 8 bits. 16 keys are interleaved, so that a query is multiplied with all of them at once. Such a pack of 16
// keys is called a side.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtool {

constexpr int n_side = 16;

// Convert numbers to 8 bits and return their scale. NaN and values out of range become 0.
float to_bytes(const float * x, int64_t n, int8_t * out);

// a query in 8 bits
struct small_query {
    std::vector<int32_t> fours; // each entry holds four 8-bit numbers

    float   scale = 0.0f;
    int32_t sum   = 0;

    void set(const float * query, int64_t n_embd);
};

// bytes of a side: [n_embd/4][n_side][4] bytes, then n_side scales. n_embd: a multiple of 8
size_t side_bytes(int64_t n_embd);

void set_key(uint8_t * side, int i, const float * key, int64_t n_embd);

void get_key(const uint8_t * side, int i, float * key, int64_t n_embd);

// copy key j of the side `from` to key i of `side`
void copy_key(uint8_t * side, int i, const uint8_t * from, int j, int64_t n_embd);

// out[n*n_side]: products of n sides with a query
void multiply(const uint8_t * sides, int n, const small_query & query, int64_t n_embd, float * out);

} // namespace kvtool
