// Products with rows of numbers where they lie, in the format that they are stored in. A row begins `size` bytes behind the one
// before.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvtool {

// columns that are multiplied at once, at most; for more, numbers are better converted first
constexpr int n_few_columns = 8;

// out[q*os + i] = row i . x[q*n_embd], for n rows and n_x columns, at most n_few_columns
void multiply_rows(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, float * out, int os);

// The same with rows that are turned first, row i by `from - by[i]` positions: turns is small_turns() from there. Only for the
// types and CPUs that can_turn says.
void multiply_turned_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * x, int n_x, const float * turns, bool are_halves,
        const uint8_t * by, float * out, int os);
bool can_turn(ggml_type type, int64_t n_embd);

// y[q*ys] += the sum of w[i*ws + q*wx] row i, for n rows and n_y sums, at most n_few_columns; rows whose weights are all 0 are not
// read
void add_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t n_embd, const float * w, int ws, int wx, int n_y, float * y, int64_t ys);

} // namespace kvtool
