// Clustering of points: k-means, and splitting into sets of equal size.

#pragma once

#include <cstdint>
#include <vector>

namespace kvtool {

// Cluster the points x [n][d] with k-means (Lloyd's algorithm), and return the cluster of each point. n_cluster: a
// multiple of 16
std::vector<int> kmeans(const float * x, int n, int64_t d, int n_cluster);

// Split the points x [n][d] into two halves along the direction of their largest variance. Split the halves in the same
// way until there are n_set sets (a power of 2). weight: [n]. Returns the order of the points, set by set.
std::vector<int> halved(const float * x, const float * weight, int n, int64_t d, int n_set);

} // namespace kvtool
