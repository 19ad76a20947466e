// Multiplication by Hadamard matrices. It spreads large elements of keys and values over a block of elements, so that a
// format of few bits, whose elements share a scale, loses less.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvtool {

// multiply each n_size consecutive elements of x by the Hadamard matrix of that size, a power of two; 0: do nothing. The
// matrix is orthogonal and its own inverse
void hadamard(float * x, int64_t n, int n_size);

// size of the matrix for heads of n_embd elements archived in a format; 0: none. Formats of 8 bits or more need none
int hadamard_size(ggml_type type, int64_t n_embd);

} // namespace kvtool
