// Multiplication by Hadamard matrices. It distributes large elements of keys and values over a block of elements. In
// formats of few bits, a block of elements shares a scale, so rounding then loses less.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvtool {

// Multiply every n_size consecutive elements of x by the Hadamard matrix of that size, which is a power of two. If
// n_size is 0, do nothing. The matrix is orthogonal and its own inverse
void hadamard(float * x, int64_t n, int n_size);

// Size of the matrix for heads of n_embd elements that are archived in a format. 0 for formats of 8 bits or more, which
// need no matrix
int hadamard_size(ggml_type type, int64_t n_embd);

} // namespace kvtool
