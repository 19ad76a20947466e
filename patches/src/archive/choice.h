// Choice of the clusters, or sets of clusters, with the highest scores.

#pragma once

#include <cstdint>

namespace kvtool {

// Choose the items with the highest scores until they have at least n_token tokens together. chosen[i] becomes 1 for a
// chosen item, else 0. Only the first 11 bits of a score's mantissa are compared. If scores are equal, the last items
// are chosen first. score: not negative; size: number of tokens of each item
void choose(const float * score, const int32_t * size, int n, int64_t n_token, uint8_t * chosen);

} // namespace kvtool
