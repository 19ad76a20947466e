// Exponentials of many logits, and their sums.

#pragma once

namespace kvtool {

// softmax sum over some of the logits
struct softmax_part {
    float max; // Maximum of the logits.
    float sum; // Sum of e^(logit - max) over the logits.
};

// Set e[i] to e^(scale*x[i] - max) for i < n. `max` is the maximum of the logits scale*x[i]. Returns `max` and the sum
// of e[i]. `scale` must be positive. Both arrays need room for a multiple of 16 numbers; x is overwritten from x[n]
// on. e may be x
softmax_part exponentials(float * x, int n, float scale, float * e);

// Set e[i] to e^(x[i] - max) - e^(lower[i] - max) for i < n, where max is the maximum of x[i], and lower[i] <= x[i].
// Returns max and the sum of e^(x[i] - max). All arrays need room for a multiple of 16 numbers; x and lower are
// overwritten from n on. e may be x or lower
softmax_part exponential_differences(float * x, float * lower, int n, float * e);

// Replace x[n][n_column] by e^(scale*x - max), column by column; n_column is a multiple of 8, and scale > 0. Each
// array below has n_column entries:
// - max: the maximum of all logits so far, which this call may raise
// - factor: receives the factor that converts earlier sums to the new maximum
// - sum: receives the sum of each column
void exponential_columns(float * x, int n, int n_column, float scale, float * max, float * factor, float * sum);

// Set the numbers in x that are at most `threshold` to 0, and return the sum of the other numbers. x needs room for a
// multiple of 16 numbers and is overwritten from x[n] on
float keep_above(float * x, int n, float threshold);

// y[n] += w*x[n]
void add(float * y, const float * x, int n, float w);

} // namespace kvtool
