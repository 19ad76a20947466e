// ALiBi: attention falls with the distance between positions. Rows hold different tokens, so each of their cells has a position
// of its own, which llama.cpp's table does not know.

#pragma once

#include "layer.h"
#include "llama-kvtool.h"

#include <cstdint>
#include <vector>

namespace kvtool {

class places {
public:
    // from now on there are positions of these layers' cells, all 0
    void make(const std::vector<layer> & layers);

    bool is_on() const { return !of_layer.empty(); }

    // layer i has so many cells now
    void resize(size_t i, int n_cell);

    // does what an edit does to the cells
    void move(const std::vector<layer> & layers, const llama_kvtool_edit & edit);

    // the next token of a row lies in this cell
    void put(size_t i, int head, int cell, int32_t pos) { of_layer[i].at(head, cell) = pos; }

    // where a cell's key stands
    int32_t get(size_t i, int head, int cell) const { return of_layer[i].at(head, cell); }

private:
    struct table {
        int n_cell;

        std::vector<int32_t> pos; // [n_head][n_cell]

        int32_t &       at(int head, int cell)       { return pos[(size_t) head*n_cell + cell]; }
        const int32_t & at(int head, int cell) const { return pos[(size_t) head*n_cell + cell]; }
    };

    std::vector<table> of_layer;
};

} // namespace kvtool
