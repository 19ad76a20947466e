// Conversions of rows of numbers between formats.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace kvtool {

void to_float  (ggml_type type, const void  * x, float * y, int64_t n);
void from_float(ggml_type type, const float * x, void  * y, int64_t n);

void to_half(const float * x, ggml_fp16_t * y, int64_t n);
void to_half(ggml_type type, const void * x, ggml_fp16_t * y, int64_t n);

// transpose [n_row][n_column] to [n_column][n_row]. elem_size: bytes of an element
void transpose(const uint8_t * src, uint8_t * dst, int64_t n_row, int64_t n_column, size_t elem_size);

} // namespace kvtool
