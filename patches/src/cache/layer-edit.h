// One layer's share of an edit.

#pragma once

#include "hooks/llama-kvtool.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace kvtool {

struct layer_edit {
    std::vector<llama_kvtool_move> moves; // Moves to another cell without rotation of the key.
    std::vector<llama_kvtool_move> rotated; // Moves that rotate the key. src may be equal to dst.

    std::vector<llama_kvtool_term> terms;
};

// moves of values: all moves, except rotations of keys that stay in their cell
inline std::vector<llama_kvtool_move> values_moved(const layer_edit & edit) {
    auto res = edit.moves;
    std::copy_if(edit.rotated.begin(), edit.rotated.end(), std::back_inserter(res),
            [](const llama_kvtool_move & m) { return m.src != m.dst; });
    return res;
}

} // namespace kvtool
