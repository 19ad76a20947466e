// Positions of the keys, for models in which attention falls with distance (ALiBi). Rows hold different tokens, so each
// cell needs a separate position in each row. llama.cpp's table has only one position per cell.

#pragma once

#include "layer.h"
#include "hooks/llama-kvtool.h"

#include <cstdint>
#include <vector>

namespace kvtool {

class key_positions {
public:
    // create the positions of these layers' cells; all of them are 0
    void make(const std::vector<layer> & layers);

    bool is_on() const { return !tables.empty(); }

    // change layer i's number of cells to n_cell; cells that remain keep their positions
    void resize(size_t i, int n_cell);

    void move(const std::vector<layer> & layers, const llama_kvtool_edit & edit);

    void put(size_t i, int head, int cell, int32_t pos) { tables[i].at(head, cell) = pos; }

    int32_t get(size_t i, int head, int cell) const { return tables[i].at(head, cell); }

private:
    struct table {
        int n_cell;

        std::vector<int32_t> pos; // [n_head][n_cell]

        int32_t &       at(int head, int cell)       { return pos[(size_t) head*n_cell + cell]; }
        const int32_t & at(int head, int cell) const { return pos[(size_t) head*n_cell + cell]; }
    };

    std::vector<table> tables;
};

} // namespace kvtool
