#include "resident-row.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

ggml_fp16_t mask_of(int n_token) {
    return ggml_fp32_to_fp16(n_token > 0 ? std::log((float) n_token) : -INFINITY);
}

static const ggml_fp16_t unseen = mask_of(0);

resident_row::resident_row(const resident_sizes & n, int64_t base) : n(n), base(base) {
    mask    .assign(n.n_cell(), unseen);
    pages   .resize(n.n_mean/n_cluster);
    score   .assign(n.n_mean, 0.0f);
    sizes   .assign(n.n_mean, 0);
    wanted  .assign(n.n_mean, 0);
    next    .assign(n.n_mean, 0);
    is_here .assign(n.n_mean, 0);
    heads   .assign(n.n_mean, -1);
    sets    .resize(n.n_mean_set/n_set);
    set_logs.assign(n.n_mean_set, unseen);
    slots   .resize(n.n_token);
    free    .resize(n.n_token);
    index_of.assign(std::max<int>(pages.size(), n.n_mean_set), -1);
    std::iota(free.rbegin(), free.rend(), 0); // the first slots are used first
}

int resident_row::find(const row_clusters & own, int64_t number) const {
    const int at = index_of[number % index_of.size()];
    return at >= 0 && pages[at].number == number && pages[at].is_set == own.is_grouped(number) ? at : -1;
}

void resident_row::show_set(int64_t number, bool is_shown) {
    if (!sets.empty() && sets[number/n_set % sets.size()].group == number/n_set) {
        const int c = number % n.n_mean_set;
        mask[n.n_mean + c] = is_shown ? set_logs[c] : unseen;
    }
}

void resident_row::drop_page(int at) {
    for (int i = at*n_cluster; i < (at + 1)*n_cluster; ++i) {
        remove(i);
        wanted[i] = 0;
        next  [i] = 0;
        sizes [i] = 0;
        score [i] = 0.0f;
        mask  [i] = unseen;
    }
    show_set(pages[at].number, true);
    pages[at] = {};
}

bool resident_row::admit(const row_clusters & own, int64_t number, int64_t last) {
    int at = -1;
    for (int i = 0; i < (int) pages.size() && (at < 0 || pages[at].number >= 0); ++i) {
        const bool is_replaceable = pages[i].is_set && !sets.empty() && pages[i].last <= last;
        if (pages[i].number < 0 || (is_replaceable && (at < 0 || pages[i].last < pages[at].last))) {
            at = i;
        }
    }
    if (at < 0) {
        return false;
    }
    if (pages[at].number >= 0) {
        drop_page(at);
    }
    pages[at].number = number;
    pages[at].is_set = own.is_grouped(number);
    pages[at].to     = own[number].to;
    pages[at].last   = n_choice;
    index_of[number % index_of.size()] = at;

    for (int c = 0; c < n_cluster; ++c) {
        sizes[at*n_cluster + c] = own.clusters.sizes[own.place(number) + c];
    }
    show_set(number, false);
    return true;
}

// true if a page, or the first page of a group, has the same clusters as when it got its cells
static bool is_same(const row_clusters & own, int64_t number, bool is_set, const bearing & to) {
    return number >= own.begin() && number < own.end() && own.is_grouped(number) == is_set && own[number].to == to;
}

void resident_row::drop_changed(const row_clusters & own) {
    for (size_t at = 0; at < sets.size(); ++at) {
        if (sets[at].group >= 0 && !is_same(own, sets[at].group*n_grouped, true, sets[at].to)) {
            std::fill_n(mask.begin() + n.n_mean + at*n_set, n_set, unseen);
            sets[at] = {};
        }
    }
    for (size_t at = 0; at < pages.size(); ++at) {
        if (pages[at].number >= 0 && !is_same(own, pages[at].number, pages[at].is_set, pages[at].to)) {
            drop_page(at);
        }
    }
}

int resident_row::add_token(int cluster, int64_t place, int64_t anchor) {
    const int s = free.back();
    free.pop_back();
    slots[s] = { place, anchor, heads[cluster] };
    heads[cluster] = s;
    mask[n.first_token() + s] = mask_of(1);
    return s;
}

void resident_row::remove(int cluster) {
    for (int s = heads[cluster]; s >= 0; s = slots[s].next) {
        slots[s].place = -1;
        free.push_back(s);
        mask[n.first_token() + s] = unseen;
    }
    heads  [cluster] = -1;
    is_here[cluster] = 0;
}

} // namespace kvtool
