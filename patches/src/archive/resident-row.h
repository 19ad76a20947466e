// A row's cells for residents: which cluster, set or token each cell represents. See residents.h.

#pragma once

#include "clusters.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// Number of a row's cells for each kind of resident. The cells are in this order: means of clusters, means of sets,
// tokens without clusters, resident tokens
struct resident_sizes {
    int n_mean;     // Means of clusters; a multiple of n_cluster.
    int n_mean_set; // Means of sets; a multiple of n_set. 0 if all clusters have cells.
    int n_token;    // Resident tokens.

    // Cells for tokens without clusters: one and a half blocks. One block may be incomplete. A complete block may be
    // clustered up to a quarter of a block late. The last quarter is a reserve.
    static constexpr int n_tail = 3*store::n_block/2;

    int first_tail()  const { return n_mean + n_mean_set; }
    int first_token() const { return first_tail() + n_tail; }
    int n_cell()      const { return first_token() + n_token; }
};

// element of a mask for a cell that represents n_token tokens; see residents::mask
ggml_fp16_t mask_of(int n_token);

struct resident_row {
    resident_row(const resident_sizes & n, int64_t base);

    // n_cluster consecutive clusters of row_clusters. They have consecutive cells. A page is a set if its group is
    // ordered set by set, otherwise a block. Pages are numbered like blocks: page n_grouped*g + i is set i or block i
    // of group g. With n_grouped = 16, for example, group 2 has the pages 32 to 47
    struct page {
        int64_t    number = -1; // -1 if the cells are free
        bool       is_set = false;
        key_origin origin = {};

        bool    is_written  = false;
        int64_t anchor      = -1; // The value of residents::anchor when the cells were written.
        int64_t last_choice = 0;  // Number of the last choice that compared queries with the page's clusters.
    };

    // the means of a group's sets, which have consecutive cells
    struct set_cells {
        int64_t    group  = -1; // -1 if the cells are free
        key_origin origin = {};
        int64_t    anchor = -1;
    };

    // a cell for a resident token
    struct token_cell {
        int64_t slot   = -1; // The slot of the token in the archive; -1 if the cell is free.
        int64_t anchor = -1; // The value of residents::anchor when the cell was written.
        int32_t next   = -1; // The next token cell of the same cluster; -1 if there is none.
    };

    // index of a page in `pages`; -1 if its clusters have no cells
    int find(const row_clusters & row, int64_t number) const;

    // Give cells to the clusters of a page. If no cells are free, a set loses its cells: the set that was compared with
    // queries least recently. Sets that were compared after choice i_choice keep their cells. Returns false if no set
    // can lose its cells
    bool admit(const row_clusters & row, int64_t number, int64_t i_choice);

    // free the cells of pages and sets that have changed
    void drop_changed(const row_clusters & row);

    // show or hide the mean of a set, if it has a cell
    void show_set(int64_t number, bool is_shown);

    // Give a free cell to a token of a cluster. Returns the index in token_cells
    int add_token(int cluster, int64_t slot, int64_t anchor);

    // remove a cluster's tokens from the residents
    void remove(int cluster);

    resident_sizes n;

    int64_t base; // The value of archive::base() when the cells were written.

    std::vector<ggml_fp16_t> mask; // [n.n_cell()]

    // The clusters of page i have the indices n_cluster*i to n_cluster*i + n_cluster - 1. The cells of their means have
    // the same indices
    std::vector<page>    pages;
    std::vector<float>   scores;          // The missing attention per token, from the last choice.
    std::vector<int32_t> sizes;           // The number of tokens in each cluster.
    std::vector<uint8_t> repeat_resident; // True if the cluster should be resident when the last step is repeated.
    std::vector<uint8_t> next_resident;   // True if the cluster should be resident in the next step.
    std::vector<uint8_t> is_resident;     // True if the cluster is resident.
    std::vector<int32_t> first_cells;     // The first token cell of each cluster; -1 if it is not resident.

    std::vector<set_cells>   sets;     // Group g is at index g % sets.size().
    std::vector<ggml_fp16_t> set_logs; // For each cell of a set: its element in the mask while the cell is shown.

    std::vector<token_cell> token_cells; // [n.n_token]
    std::vector<int32_t>    free_cells;  // Token cells without a token.

    int64_t anchor = -1; // All token cells were written with this value of residents::anchor, or do not depend on it.
    int64_t tail   = 0;  // The tokens before this position have been written to cells.

    int64_t n_choice = 0; // number of choices so far

private:
    // Page number x is at index index_of[x % index_of.size()] of `pages`; -1 if no such page has cells
    std::vector<int32_t> index_of;

    void drop_page(int i_page);
};

} // namespace kvtool
