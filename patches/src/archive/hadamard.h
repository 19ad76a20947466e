// Multiplication by Hadamard matrices. It distributes a large element of a key or value over many elements. In formats
// of few bits, the elements of a block share a scale. Without very large elements the scale is smaller, and rounding
// loses less.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvtool {

// Multiply every n_size consecutive elements of x by the Hadamard matrix of size n_size (a power of two). If n_size is
// 0, do nothing. The matrix is orthogonal and its own inverse
void hadamard(float * x, int64_t n, int n_size);

// Size of the Hadamard matrix for keys or values of n_embd elements that are archived in this format. 0 for formats of
// 8 bits or more, which need no matrix
int hadamard_size(ggml_type type, int64_t n_embd);

} // namespace kvtool
