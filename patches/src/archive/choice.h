// Choice of the clusters, or sets of clusters, with the highest scores.

#pragma once

#include <cstdint>

namespace kvtool {

// Choose the items with the highest scores until they have at least n_token tokens together. chosen[i] becomes 1 for a
// chosen item, else 0. Items of size 0 are never chosen. Scores are compared as integers without their low 12 bits, so
// close scores count as equal. Of equal items, the last are chosen first.
// score: finite and not negative; size: number of tokens of each item; n_token: above 0
void choose(const float * score, const int32_t * size, int n, int64_t n_token, uint8_t * chosen);

} // namespace kvtool
