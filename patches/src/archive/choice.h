// Choice of the clusters, or sets of clusters, with the highest scores.

#pragma once

#include <cstdint>

namespace kvtool {

// Choose the items with the highest scores until the chosen items have `wanted` tokens: chosen[i] becomes 1 for a
// chosen item, else 0. Scores that differ by less than 1/2000 are treated as equal; of equal items, the last ones are
// chosen first. score: not negative; size: number of tokens of each item
void choose(const float * score, const int32_t * size, int n, int64_t wanted, uint8_t * chosen);

} // namespace kvtool
