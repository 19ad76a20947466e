// Points that lie near each other: in clusters of any size, and in sets of one size.

#pragma once

#include <cstdint>
#include <vector>

namespace kvtool {

// k-means. x: [n][d]; which of n_cluster clusters each point is in. n_cluster: a multiple of 16
std::vector<int> kmeans(const float * x, int n, int64_t d, int n_cluster);

// Halves the points where they are longest, and their halves, until there are n_set sets, a power of 2. weight: [n]. The points,
// set by set.
std::vector<int> halved(const float * x, const float * weight, int n, int64_t d, int n_set);

} // namespace kvtool
