#include "resident-row.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

ggml_fp16_t mask_of(int n_token) {
    return ggml_fp32_to_fp16(n_token > 0 ? std::log((float) n_token) : -INFINITY);
}

static const ggml_fp16_t masked = mask_of(0);

resident_row::resident_row(const resident_sizes & n, int64_t base) : n(n), base(base) {
    mask           .assign(n.n_cell(), masked);
    pages          .resize(n.n_mean/n_cluster);
    scores         .assign(n.n_mean, 0.0f);
    sizes          .assign(n.n_mean, 0);
    repeat_resident.assign(n.n_mean, 0);
    next_resident  .assign(n.n_mean, 0);
    is_resident    .assign(n.n_mean, 0);
    first_cells    .assign(n.n_mean, -1);
    sets           .resize(n.n_mean_set/n_set);
    set_logs       .assign(n.n_mean_set, masked);
    token_cells    .resize(n.n_token);
    free_cells     .resize(n.n_token);
    index_of       .assign(std::max<int>(pages.size(), n.n_mean_set), -1);
    std::iota(free_cells.rbegin(), free_cells.rend(), 0); // the first cells are used first
}

int resident_row::find(const row_clusters & row, int64_t number) const {
    const int i = index_of[number % index_of.size()];
    return i >= 0 && pages[i].number == number && pages[i].is_set == row.is_grouped(number) ? i : -1;
}

void resident_row::show_set(int64_t number, bool is_shown) {
    if (!sets.empty() && sets[number/n_set % sets.size()].group == number/n_set) {
        const int c = number % n.n_mean_set;
        mask[n.n_mean + c] = is_shown ? set_logs[c] : masked;
    }
}

void resident_row::drop_page(int i_page) {
    for (int i = i_page*n_cluster; i < (i_page + 1)*n_cluster; ++i) {
        remove(i);
        repeat_resident[i] = 0;
        next_resident  [i] = 0;
        sizes          [i] = 0;
        scores         [i] = 0.0f;
        mask           [i] = masked;
    }
    show_set(pages[i_page].number, true);
    pages[i_page] = {};
}

bool resident_row::admit(const row_clusters & row, int64_t number, int64_t i_choice) {
    int i_page = -1;
    for (int i = 0; i < (int) pages.size() && (i_page < 0 || pages[i_page].number >= 0); ++i) {
        const bool is_replaceable = pages[i].is_set && !sets.empty() && pages[i].last_choice <= i_choice;
        if (pages[i].number < 0 || (is_replaceable && (i_page < 0 || pages[i].last_choice < pages[i_page].last_choice))) {
            i_page = i;
        }
    }
    if (i_page < 0) {
        return false;
    }
    if (pages[i_page].number >= 0) {
        drop_page(i_page);
    }
    pages[i_page].number      = number;
    pages[i_page].is_set      = row.is_grouped(number);
    pages[i_page].origin      = row[number].origin;
    pages[i_page].last_choice = n_choice;
    index_of[number % index_of.size()] = i_page;

    for (int c = 0; c < n_cluster; ++c) {
        sizes[i_page*n_cluster + c] = row.clusters.sizes[row.first_cluster(number) + c];
    }
    show_set(number, false);
    return true;
}

// true if a page, or the first page of a group, has the same clusters as when it got its cells
static bool is_same(const row_clusters & row, int64_t number, bool is_set, const key_origin & origin) {
    return number >= row.begin() && number < row.end() && row.is_grouped(number) == is_set && row[number].origin == origin;
}

void resident_row::drop_changed(const row_clusters & row) {
    for (size_t i = 0; i < sets.size(); ++i) {
        if (sets[i].group >= 0 && !is_same(row, sets[i].group*n_grouped, true, sets[i].origin)) {
            std::fill_n(mask.begin() + n.n_mean + i*n_set, n_set, masked);
            sets[i] = {};
        }
    }
    for (size_t i = 0; i < pages.size(); ++i) {
        if (pages[i].number >= 0 && !is_same(row, pages[i].number, pages[i].is_set, pages[i].origin)) {
            drop_page(i);
        }
    }
}

int resident_row::add_token(int cluster, int64_t slot, int64_t anchor) {
    const int i = free_cells.back();
    free_cells.pop_back();
    token_cells[i] = { slot, anchor, first_cells[cluster] };
    first_cells[cluster] = i;
    mask[n.first_token() + i] = mask_of(1);
    return i;
}

void resident_row::remove(int cluster) {
    for (int i = first_cells[cluster]; i >= 0; i = token_cells[i].next) {
        token_cells[i].slot = -1;
        free_cells.push_back(i);
        mask[n.first_token() + i] = masked;
    }
    first_cells[cluster] = -1;
    is_resident[cluster] = 0;
}

} // namespace kvtool
