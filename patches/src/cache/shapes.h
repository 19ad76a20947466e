// Lengths of the lists in an edit's graph. A cached graph can be used for every edit whose lists fit into the graph's
// lists.

#pragma once

#include "layer.h"
#include "hooks/llama-kvtool.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvtool {

struct layer_edit;

// The graph adds the terms of a merge level by level. Level 0 has the first two terms, level 1 the next two, level 2
// the next four, level 3 the next eight, and so on
constexpr int n_level = 30;

constexpr int64_t level_first(int level) { return level == 0 ? 0 : int64_t(1) << level; }
constexpr int64_t level_width(int level) { return level == 0 ? 2 : int64_t(1) << level; }

// terms of a list that are merged into one cell: index of the first term, and number of terms
struct merge {
    size_t  first;
    int64_t n_term;
};

// Split the list into merges: neighbouring terms with the same row and dst are one merge. Merges with more terms come
// first; those with equally many terms stay in order
std::vector<merge> merges_of(const std::vector<llama_kvtool_term> & terms);

// lengths of a layer's lists
struct layer_shape {
    int64_t n_moves = 0; // Number of keys that move without rotation.
    int64_t n_rotated = 0; // Number of keys that are rotated, with or without a move.
    int64_t n_moved = 0; // Number of values that move.

    std::array<int64_t, n_level> n_merged = {}; // for each level, the number of merged values with terms on it

    bool shared = false; // true if keys and values use the same list of moves
};

layer_shape shape_of(const layer_edit & edit, bool with_k, bool with_v, bool v_trans);

// true if an edit of this shape fits into lists with the lengths of `capacity`; longer lists are filled up by repeating
// the edit's last entries
bool holds(const layer_shape & capacity, const layer_shape & shape);

// Return lengths for the lists of a new graph. old_shapes: lengths in the previous graph, or null. No list becomes
// shorter than in the previous graph
std::vector<layer_shape> capacities(std::vector<layer_shape> shapes, const std::vector<layer_shape> * old_shapes);

// bytes of the lists that an edit of this layer sends to the device
int64_t list_bytes(const layer & l, const layer_shape & shape, bool v_trans);

} // namespace kvtool
