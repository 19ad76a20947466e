// Products with rows of numbers where they lie, in the format that they are stored in. A row begins `size` bytes behind the one
// before.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// columns that are multiplied at once, at most; for more, numbers are better converted first
constexpr int n_few_columns = 8;

// asks for memory that will be read
void prefetch(const uint8_t * rows, size_t n_bytes);

// out[q*os + i] = row i . x[q*n_embd], for n rows and n_x columns, at most n_few_columns
void multiply_rows(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, float * out, int os);

// The same with rows that are turned first, row i by `from - by[i]` positions: turns is small_turns() from there. Only for the
// types and CPUs that can_turn says.
void multiply_turned_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, const float * turns, bool are_halves,
        const uint8_t * by, float * out, int os);
bool can_turn(ggml_type type, int64_t n_embd);

// columns in 8 bits, each group of 32 numbers with its scale
struct byte_columns {
    std::vector<int8_t> x;      // [column][n_embd]
    std::vector<float>  scales; // [column][n_embd/32]

    void set(const float * x, int n_x, int64_t n_embd);
};

// as multiply_rows with rows in q8_0; only on CPUs that can_multiply_bytes says
void multiply_byte_rows(const uint8_t * rows, size_t size, int n, int64_t n_embd, const byte_columns & x, int first_x, int n_x, float * out, int os);
bool can_multiply_bytes(ggml_type type, int64_t n_embd);

// a row and its weights, w[q*wx] in sum q
struct weighted_row {
    const uint8_t * row;
    const float   * w;
};

// y[q*ys] += the sum of w[q*wx] row, for n rows and n_y sums, at most n_few_columns
void add_rows(ggml_type type, const weighted_row * rows, int n, int64_t n_embd, int64_t wx, int n_y, float * y, int64_t ys);

// the same of n rows that lie side by side, as do their weights: w[i + q*wx]; those whose weights are all 0 are not read
void add_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * w, int64_t wx, int n_y, float * y, int64_t ys);

} // namespace kvtool
