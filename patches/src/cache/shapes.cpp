#include "shapes.h"

#include "layer-edit.h"

#include <algorithm>

namespace kvtool {

std::vector<merge> merges_of(const std::vector<llama_kvtool_term> & terms) {
    std::vector<merge> res;
    for (size_t t = 0; t < terms.size(); ++t) {
        if (t > 0 && terms[t - 1].row == terms[t].row && terms[t - 1].dst == terms[t].dst) {
            ++res.back().n_term;
        } else {
            res.push_back({ t, 1 });
        }
    }
    std::stable_sort(res.begin(), res.end(), [](const merge & a, const merge & b) { return a.n_term > b.n_term; });
    return res;
}

layer_shape shape_of(const layer_edit & e, bool with_k, bool with_v, bool v_trans) {
    layer_shape res;

    if (with_k) {
        res.n_moves   = e.moves.size();
        res.n_rotated = e.rotated.size();
    }
    if (with_v) {
        res.n_moved = values_moved(e).size();
        for (const auto & m : merges_of(e.terms)) {
            for (int i = 0; i < n_level && m.n_term > level_first(i); ++i) {
                ++res.n_merged[i];
            }
        }
    }
    // Values use the keys' list of moves, with two exceptions. Transposed values need other indices. Rotated keys are
    // not in the list of moves, although their values may have to move
    res.shared = with_k && with_v && !v_trans && res.n_rotated == 0;

    return res;
}

// round up, so that the next edit can use the same graph even if its lists are slightly longer
static int64_t rounded_up(int64_t n) {
    int64_t step = 16;
    while (step*16 <= n) {
        step *= 2;
    }
    return GGML_PAD(n, step);
}

int64_t list_bytes(const layer & l, const layer_shape & s, bool v_trans) {
    const int64_t n_part = v_trans && l.v ? l.n_embd_v : 1;

    int64_t res = 8*s.n_moves + 12*s.n_rotated + (s.shared ? 0 : 8*n_part*s.n_moved) + 4*n_part*s.n_merged[0];
    for (int i = 0; i < n_level; ++i) {
        res += (4*n_part + 4)*level_width(i)*s.n_merged[i];
    }
    return res;
}

static constexpr int64_t layer_shape::* list_lengths[] = { &layer_shape::n_moves, &layer_shape::n_rotated, &layer_shape::n_moved };

// True if a list of n entries fits into a list of length `capacity`. The rest of the longer list is filled with copies
// of the last entry. An empty list has no entry that could be copied, so it fits only if `capacity` is 0
static bool holds(int64_t capacity, int64_t n) {
    return n == 0 ? capacity == 0 : n <= capacity;
}

// Return the number of merges with terms on this level after the list of merges is filled up to n_all entries. The list
// is filled up with copies of its last merge, which has the fewest terms. If the last merge has terms on this level,
// all n_all merges have terms on it. Otherwise no copy has terms on it
static int64_t merged_on(const layer_shape & s, int level, int64_t n_all) {
    return s.n_merged[level] == s.n_merged[0] ? n_all : s.n_merged[level];
}

bool holds(const layer_shape & capacity, const layer_shape & s) {
    bool res = holds(capacity.n_merged[0], s.n_merged[0]);
    for (const auto n : list_lengths) {
        res = res && holds(capacity.*n, s.*n);
    }
    for (int i = 1; i < n_level; ++i) {
        res = res && merged_on(s, i, capacity.n_merged[0]) <= capacity.n_merged[i];
    }
    return res;
}

// Round n up to 4, 8, 16, ... n: number of merges with terms on a level above 0. Only few merges are so long, but their
// number varies from edit to edit. Rounding up lets more edits use the same graph
static int64_t merge_capacity(int64_t n) {
    int64_t res = n > 0 ? 4 : 0;
    while (res < n) {
        res *= 2;
    }
    return res;
}

std::vector<layer_shape> capacities(std::vector<layer_shape> shapes, const std::vector<layer_shape> * old_shapes) {
    std::array<int64_t, n_level> n_merged = {};

    for (size_t i = 0; i < shapes.size(); ++i) {
        auto & s = shapes[i];

        const layer_shape old_shape = old_shapes ? (*old_shapes)[i] : layer_shape();

        for (const auto n : list_lengths) {
            s.*n = s.*n == 0 ? 0 : std::max(rounded_up(s.*n), old_shape.*n);
        }
        if (s.shared) {
            s.n_moved = s.n_moves;
        }

        const int64_t n_all = s.n_merged[0] == 0 ? 0 : std::max(rounded_up(s.n_merged[0]), old_shape.n_merged[0]);
        for (int j = n_level - 1; j >= 0; --j) {
            s.n_merged[j] = merged_on(s, j, n_all);
            n_merged[j] = std::max({ n_merged[j], s.n_merged[j], old_shape.n_merged[j] });
        }
    }
    // give all layers the same room, because in the next edit the long merges may be in another layer
    for (auto & s : shapes) {
        for (int j = 1; j < n_level; ++j) {
            s.n_merged[j] = std::min(s.n_merged[0], merge_capacity(n_merged[j]));
        }
    }

    return shapes;
}

} // namespace kvtool
