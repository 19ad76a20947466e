// Exponentials of many logits, and their sums.

#pragma once

namespace kvtool {

// part of a softmax
struct softmax_part {
    float most; // maximum logit
    float sum;  // sum of e^(logit - most)
};

// e[n] = e^(scale*x - most). Both arrays have room for a multiple of 16 numbers, and x is overwritten from x[n] on.
// scale > 0
softmax_part exponentials(float * x, int n, float scale, float * e);

// Replace x[n][n_column] by e^(scale*x - most), column by column. most[n_column]: running maximum of the logits,
// raised where this x is higher; factor[n_column]: factor that converts earlier sums to the new maximum;
// sum[n_column]: sum of each column. n_column: a multiple of 8; scale > 0
void exponential_columns(float * x, int n, int n_column, float scale, float * most, float * factor, float * sum);

// Set numbers that are not above `least` to 0; returns the sum of the remaining numbers. x has room for a multiple of
// 16 numbers and is overwritten from x[n] on
float keep_above(float * x, int n, float least);

// y[n] += w*x[n]
void add(float * y, const float * x, int n, float w);

} // namespace kvtool
