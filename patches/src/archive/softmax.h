// Exponentials of many logits, and their sums.

#pragma once

namespace kvtool {

// part of a softmax
struct softmax_part {
    float most; // maximum logit
    float sum;  // sum of e^(logit - most)
};

// e[n] = e^(scale*x - most), for scale > 0. Both arrays need room for a multiple of 16 numbers. x is overwritten from
// x[n] on
softmax_part exponentials(float * x, int n, float scale, float * e);

// Replace x[n][n_column] by e^(scale*x - most), column by column; n_column is a multiple of 8, and scale > 0. Each
// array below has n_column entries:
// - most: running maximum of the logits. It rises if a logit in x is higher
// - factor: receives the factor that converts earlier sums to the new maximum
// - sum: receives the sum of each column
void exponential_columns(float * x, int n, int n_column, float scale, float * most, float * factor, float * sum);

// Set numbers that are not above `least` to 0, and return the sum of the remaining numbers. x needs room for a multiple
// of 16 numbers and is overwritten from x[n] on
float keep_above(float * x, int n, float least);

// y[n] += w*x[n]
void add(float * y, const float * x, int n, float w);

} // namespace kvtool
