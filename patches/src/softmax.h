// Sums of exponentials over many logits.

#pragma once

namespace kvtool {

// part of a softmax
struct softmax_part {
    float most; // the highest logit
    float sum;  // of e^(logit - most)
};

// e[n] = e^(scale*x - most). Both have room for whole groups of 16, and what follows x[n] is overwritten. scale > 0
softmax_part exponentials(float * x, int n, float scale, float * e);

// x[n][n_column] becomes e^(scale*x - most), column by column: most[n_column] is the highest logit so far before, and with these
// afterwards; factor[n_column]: what sums so far are multiplied by; sum[n_column]: of the column. n_column: a multiple of 8;
// scale > 0
void exponential_columns(float * x, int n, int n_column, float scale, float * most, float * factor, float * sum);

// what is not above becomes 0; returns the sum of the rest. x has room for whole groups of 16, and what follows x[n] is overwritten
float keep_above(float * x, int n, float least);

// y[n] += w*x[n]
void add(float * y, const float * x, int n, float w);

} // namespace kvtool
