// Products with rows of numbers that are read in their stored format, without a converted copy. Consecutive rows are
// `size` bytes apart.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// maximum number of columns that are multiplied at once. With more columns it is faster to convert the rows first
constexpr int n_few_columns = 8;

void prefetch(const uint8_t * rows, size_t n_bytes);

// Multiply n rows with n_x columns (at most n_few_columns): out[q*os + i] is the product of row i and x[q*n_embd ...].
// If `indices` is not null, row indices[i] is multiplied instead of row i
void multiply_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, float * out, int os,
        const uint8_t * indices = nullptr);

// Rotate rows (RoPE) and multiply them with columns. Row i is multiplied by the Hadamard matrix of size n_map (unless
// n_map is 0), then rotated by delta - offsets[i] positions, and then multiplied as in multiply_rows. `rotations`
// points to the rotation by `delta` positions in the table rotations::small_rotations(). Call this only if can_rotate
// is true, which depends on the type and the CPU.
void multiply_rotated_rows(
        ggml_type type, int n_map, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, const float * rotations, bool are_halves,
        const uint8_t * offsets, float * out, int os);
bool can_rotate(ggml_type type, int64_t n_embd);

// columns in 8 bits, with one scale per group of 32 numbers
struct byte_columns {
    std::vector<int8_t> x;      // Numbers without their scale: [column][n_embd].
    std::vector<float>  scales; // Scale of each group: [column][n_embd/32].
    std::vector<float>  sums;   // Sum of each group's numbers, multiplied by its scale: [column][n_embd/32].

    void set(const float * columns, int n_x, int64_t n_embd);
};

// Multiply as in multiply_rows, but with columns in 8 bits: the columns first_x .. first_x + n_x - 1 of x. Call this
// only if can_multiply_bytes is true, which depends on the type and the CPU
void multiply_byte_rows(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const byte_columns & x, int first_x, int n_x, float * out, int os);
bool can_multiply_bytes(ggml_type type, int64_t n_embd);

// a row that add_rows adds to several sums; w[q*wx] is the row's weight in sum q
struct weighted_row {
    const uint8_t * row;
    const float   * w;
};

// add n weighted rows to each of n_y sums (at most n_few_columns): y[q*ys] += sum of w[q*wx]*row
void add_rows(ggml_type type, const weighted_row * rows, int n, int64_t n_embd, int64_t wx, int n_y, float * y, int64_t ys);

// Add n consecutive rows to each of n_y sums: y[q*ys] += sum of w[i + q*wx]*(row i). Rows whose weights are 0 in all
// sums are not read
void add_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * w, int64_t wx, int n_y, float * y, int64_t ys);

} // namespace kvtool
