// Choice of the clusters, or sets of clusters, with the highest scores.

#pragma once

#include <cstdint>

namespace kvtool {

// Set chosen[i] to 1 for the items with the highest scores until they have `wanted` tokens, and to 0 for all others.
// Scores that differ by less than 1/2000 count as equal; among these the last come first. score: not negative; size:
// tokens of each item
void choose(const float * score, const int32_t * size, int n, int64_t wanted, uint8_t * chosen);

} // namespace kvtool
