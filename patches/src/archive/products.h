// Products of small matrices with the CPU's vector instructions.

#pragma once

namespace kvtool {

// Columns are computed in groups of this size. Rows of b and c are padded to a multiple of it
constexpr int n_column = 8;

inline int columns(int n) { return (n + n_column - 1)/n_column*n_column; }

// c[m][n] += a[m][k] b[k][n]. n is a multiple of n_column. as, bs, cs: distance between the rows of a, b and c. ak:
// distance between the elements of a row of a
void multiply_add(float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int m, int k, int n);

} // namespace kvtool
