// Products with rows of numbers where they lie, in the format that they are stored in.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvtool {

// columns that are multiplied at once, at most; for more, numbers are better converted first
constexpr int n_few_columns = 8;

// out[i*os + q] = row i . x[q*n_embd], for n rows and n_x columns, at most n_few_columns
void multiply_rows(ggml_type type, const uint8_t * rows, int n, int64_t n_embd, const float * x, int n_x, float * out, int os);

// y[q*ys] += the sum of w[i*ws + q*wx] row i, for n rows and n_y sums, at most n_few_columns; rows whose weights are all 0 are not
// read
void add_rows(
        ggml_type type, const uint8_t * rows, int n, int64_t n_embd, const float * w, int ws, int wx, int n_y, float * y, int64_t ys);

} // namespace kvtool
