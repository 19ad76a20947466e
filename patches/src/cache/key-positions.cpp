#include "key-positions.h"

#include <algorithm>

namespace kvtool {

void key_positions::make(const std::vector<layer> & layers) {
    tables.clear();
    for (const auto & l : layers) {
        tables.push_back({ l.n_cell, std::vector<int32_t>((size_t) l.n_head*l.n_cell) });
    }
}

void key_positions::resize(size_t i, int n_cell) {
    if (!is_on()) {
        return;
    }
    auto & old_table = tables[i];

    const int n_head = old_table.pos.size()/old_table.n_cell;

    table res = { n_cell, std::vector<int32_t>((size_t) n_head*n_cell) };
    for (int head = 0; head < n_head; ++head) {
        std::copy_n(&old_table.at(head, 0), std::min(n_cell, old_table.n_cell), &res.at(head, 0));
    }
    old_table = std::move(res);
}

void key_positions::move(const std::vector<layer> & layers, const llama_kvtool_edit & edit) {
    if (!is_on()) {
        return;
    }

    const auto layer_of = [&](int row) {
        const auto after = std::upper_bound(layers.begin(), layers.end(), row, [](int r, const layer & l) { return r < l.row_0; });
        return after - layers.begin() - 1;
    };

    // read all sources first, because a move may read a cell that another move writes
    std::vector<int32_t> res;
    for (int i = 0; i < edit.n_move; ++i) {
        const auto & m       = edit.moves[i];
        const auto   i_layer = layer_of(m.row);
        res.push_back(get(i_layer, m.row - layers[i_layer].row_0, m.src) + m.delta);
    }
    for (int i = 0; i < edit.n_move; ++i) {
        const auto & m       = edit.moves[i];
        const auto   i_layer = layer_of(m.row);
        put(i_layer, m.row - layers[i_layer].row_0, m.dst, res[i]);
    }
}

} // namespace kvtool
