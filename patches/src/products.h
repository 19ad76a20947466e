// Products of small matrices, row by row, on this CPU's vectors.

#pragma once

namespace kvtool {

// columns that are computed together: rows of b and c are padded to a multiple of it
constexpr int n_column = 8;

inline int columns(int n) { return (n + n_column - 1)/n_column*n_column; }

// c[m][n] += a[m][k] b[k][n]; n: a multiple of n_column; as, bs, cs: numbers from one row to the next; ak: from one number of
// a row of a to the next
void multiply_add(float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int m, int k, int n);

} // namespace kvtool
