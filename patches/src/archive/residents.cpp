#include "residents.h"

#include "choice.h"
#include "index.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// Number of tokens, per resident token, in the sets whose clusters are compared with queries
static constexpr int n_compared = 3;

// Factor by which a resident cluster counts more than another one in the choice for the next step
static constexpr float resident_factor = 2.0f;

// maximum number of sets that get cells in a step
static constexpr size_t n_admitted = 4;

residents::residents(const archive & tokens, const resident_sizes & n) : n(n), tokens(tokens) {
    drop();
}

// number of a row's pages that must have cells, because no mean of a set can represent their clusters
static int64_t n_needed(const row_clusters & row, bool has_sets) {
    if (!has_sets) {
        return row.end() - row.begin();
    }
    int64_t res = 0;
    for (int64_t block = row.begin(); block < row.end(); block += row.is_grouped(block) ? n_grouped : 1) {
        res += !row.is_grouped(block);
    }
    return res;
}

std::string residents::unfit() const {
    if (!tokens.has_clusters()) {
        return "without clusters, all archived tokens are attended to exactly";
    }
    const bool has_sets = n.n_mean_set > 0;
    for (size_t i = 0; i < tokens.n_layer(); ++i) {
        for (int head = 0; head < tokens[i].n_head; ++head) {
            const auto & row = tokens.clusters_of(i, head);
            const int64_t n_group = (row.end() + n_grouped - 1)/n_grouped - row.begin()/n_grouped;
            if (n_needed(row, has_sets)*n_cluster > n.n_mean || (has_sets && n_group*n_set > n.n_mean_set)) {
                return "more clusters than cells for means";
            }
            if (tokens.end() - std::max(tokens.begin(), row.end()*n_block) > n.n_tail) {
                return "too many tokens have no cluster yet";
            }
        }
    }
    return {};
}

void residents::drop() {
    anchor = -1;
    rows.clear();
    for (size_t i = 0; i < tokens.n_layer(); ++i) {
        rows.emplace_back(tokens[i].n_head, resident_row(n, tokens.base()));
    }
}

//
// updating cells
//

// add a cell; returns where its key and its value must be written
static std::pair<float *, float *> add_cell(const archived_layer & l, int64_t dst_row, residents::cells & out) {
    const size_t i = out.dst_rows.size();
    out.dst_rows.push_back(dst_row);

    const auto extend = [i](std::vector<float> & x, size_t n) {
        if (x.size() < (i + 1)*n) {
            x.resize(2*(i + 1)*n);
        }
        return x.data() + i*n;
    };
    return { extend(out.keys, l.n_embd_k), extend(out.values, l.n_embd_v) };
}

void residents::put_mean(size_t layer, int head, const means & means, size_t i_mean, const key_origin & origin, int cell, cells & out) const {
    const auto & l = tokens[layer];
    const auto [key, value] = add_cell(l, (int64_t) cell*l.n_head + head, out);

    get_key(means.packs.data() + i_mean/n_pack*means.size_k, i_mean % n_pack, key, l.n_embd_k);
    means.get_value(i_mean, value);

    // query_rotation rotates a query; here the mean is rotated instead, so it is rotated in the opposite direction
    tokens.rotations_of(layer).rotate(key, -tokens.query_rotation(origin, anchor));
}

void residents::put_token(size_t layer, int head, int64_t i, int64_t slot, bool is_far, int cell, cells & out) const {
    const auto & l = tokens[layer];
    const auto [key, value] = add_cell(l, (int64_t) cell*l.n_head + head, out);

    tokens.key(layer, head, i, slot, key);
    l.values(head, slot, 1, value);
    tokens.rotations_of(layer).rotate(key, tokens.rotation_back(i, is_far, anchor));
}

void residents::begin(int64_t rot) {
    is_repeated = rot == this->rot;
    this->rot   = rot;

    // Keys beyond n_near should be at the distance n_near from the query. They are rotated again when their distance is
    // too large by n_near/64
    if (anchor < 0 || rot < anchor || 64*(rot - anchor) >= tokens.n_near) {
        anchor = rot;
    }
}

bool residents::update(size_t layer, cells & out) {
    for (int head = 0; head < tokens[layer].n_head; ++head) {
        auto & resident = rows[layer][head];
        if (resident.base != tokens.base()) {
            resident = resident_row(n, tokens.base());
        }
        resident.drop_changed(tokens.clusters_of(layer, head));
        update_sets  (resident, layer, head, out);
        update_means (resident, layer, head, out);
        update_tail  (resident, layer, head, out);
        update_tokens(resident, layer, head, out);
    }
    return !is_full(out);
}

void residents::update_sets(resident_row & resident, size_t layer, int head, cells & out) {
    const auto & row = tokens.clusters_of(layer, head);

    for (int64_t block = row.begin(); block < row.end() && !resident.sets.empty(); block = (block/n_grouped + 1)*n_grouped) {
        auto & group_cells = resident.sets[block/n_grouped % resident.sets.size()];
        if (is_full(out) || !row.is_grouped(block) || (group_cells.group == block/n_grouped && !(group_cells.origin.is_far && group_cells.anchor != anchor))) {
            continue;
        }
        group_cells = { block/n_grouped, row[block].origin, anchor };
        for (int64_t number = block; number < block + n_set; ++number) {
            const size_t i_set = row.first_set(block) + number - block;
            const int    cell  = n.n_mean + number % n.n_mean_set;
            if (row.sets.sizes[i_set] > 0) {
                put_mean(layer, head, row.sets, i_set, group_cells.origin, cell, out);
            }
            resident.set_logs[cell - n.n_mean] = mask_of(row.sets.sizes[i_set]);
            resident.show_set(number, resident.find(row, number) < 0);
        }
    }
}

void residents::update_means(resident_row & resident, size_t layer, int head, cells & out) {
    const auto & row = tokens.clusters_of(layer, head);

    // first give cells to the pages that need them, then to as many sets as there is room for
    int64_t n_free = std::count_if(resident.pages.begin(), resident.pages.end(), [](const auto & p) { return p.number < 0; });
    for (const bool is_needed : { true, false }) {
        for (int64_t number = row.end() - 1; number >= row.begin() && (is_needed || n_free > 0); --number) {
            if (is_needed == (resident.sets.empty() || !row.is_grouped(number)) && resident.find(row, number) < 0) {
                resident.admit(row, number, resident.n_choice);
                --n_free;
            }
        }
    }
    for (size_t i_page = 0; i_page < resident.pages.size() && !is_full(out); ++i_page) {
        auto & p = resident.pages[i_page];
        if (p.number < 0 || (p.is_written && !(p.origin.is_far && p.anchor != anchor))) {
            continue;
        }
        for (int c = 0; c < n_cluster; ++c) {
            const int cell = i_page*n_cluster + c;
            if (resident.sizes[cell] > 0) {
                put_mean(layer, head, row.clusters, row.first_cluster(p.number) + c, p.origin, cell, out);
            }
            resident.mask[cell] = mask_of(resident.is_resident[cell] ? 0 : resident.sizes[cell]);
        }
        p.is_written = true;
        p.anchor     = anchor;
    }
}

void residents::update_tail(resident_row & resident, size_t layer, int head, cells & out) {
    const int64_t first = std::max(tokens.begin(), tokens.clusters_of(layer, head).end()*n_block);

    for (resident.tail = std::max(resident.tail, first); resident.tail < tokens.end() && !is_full(out); ++resident.tail) {
        put_token(layer, head, resident.tail, resident.tail, false, n.first_tail() + resident.tail % n.n_tail, out);
    }

    const auto mask  = resident.mask.begin() + n.first_tail();
    const auto shown = mask_of(1);
    std::fill_n(mask, n.n_tail, mask_of(0));
    for (int64_t i = first; i < tokens.end(); ++i) {
        mask[i % n.n_tail] = shown;
    }
}

void residents::update_tokens(resident_row & resident, size_t layer, int head, cells & out) {
    const auto & row    = tokens.clusters_of(layer, head);
    const auto & chosen = is_repeated ? resident.repeat_resident : resident.next_resident;

    std::vector<int> arriving, leaving;
    int64_t n_arriving = 0;
    for (int first = 0; first < n.n_mean; first += n_cluster) {
        // skip pages that do not change, which are most pages
        if (std::equal(chosen.begin() + first, chosen.begin() + first + n_cluster, resident.is_resident.begin() + first)) {
            continue;
        }
        for (int i = first; i < first + n_cluster; ++i) {
            if (chosen[i] && !resident.is_resident[i]) {
                arriving.push_back(i);
                n_arriving += resident.sizes[i];
            } else if (resident.is_resident[i] && !chosen[i]) {
                leaving.push_back(i);
            }
        }
    }
    // remove the clusters with the lowest scores until there is room
    const auto & scores = resident.scores;
    std::sort(leaving.begin(), leaving.end(), [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    for (; !leaving.empty() && (int64_t) resident.free_cells.size() < n_arriving; leaving.pop_back()) {
        resident.remove(leaving.back());
        resident.mask[leaving.back()] = mask_of(resident.sizes[leaving.back()]);
    }

    const auto put = [&](int64_t slot, int i) {
        const auto & block = row[slot/n_block];
        put_token(layer, head, slot - slot % n_block + block.order[slot % n_block], slot, block.origin.is_far, n.first_token() + i, out);
    };
    for (int i = 0; i < n.n_token && resident.anchor != anchor && !is_full(out); ++i) {
        auto & cell = resident.token_cells[i];
        if (cell.slot >= 0 && cell.anchor != anchor && row[cell.slot/n_block].origin.is_far) {
            put(cell.slot, i);
            cell.anchor = anchor;
        }
    }
    if (!is_full(out)) {
        resident.anchor = anchor;
    }

    for (const int i : arriving) {
        if (is_full(out)) {
            break;
        }
        resident.is_resident[i] = 1;
        resident.mask       [i] = mask_of(0);

        const size_t  i_cluster = row.first_cluster(resident.pages[i/n_cluster].number) + i % n_cluster;
        const int64_t block     = row.block_of(i_cluster);
        const auto  * start     = row[block].start.data() + row.index_in_block(i_cluster);
        for (int64_t slot = block*n_block + start[0]; slot < block*n_block + start[1]; ++slot) {
            put(slot, resident.add_token(i, slot, anchor));
        }
    }
}

//
// choosing residents
//

struct choice_memory {
    searched_row       searched;
    ranking            ranked;
    std::vector<float> sums;       // Missing attention to each ranked cluster, added over all queries.
    std::vector<int>   mean_cells; // Cell of each ranked cluster's mean; -1 if it has no cell.
    std::vector<float> scores;     // `scores` of a row, multiplied by resident_factor for resident clusters.
};

// choose the clusters with the highest scores, as many as fit into n_token
static void choose_fitting(
        const std::vector<float> & scores, const std::vector<int32_t> & sizes, int n_token, std::vector<uint8_t> & out) {
    choose(scores.data(), sizes.data(), scores.size(), n_token, out.data());

    std::vector<int> chosen;
    int64_t n_chosen = 0;
    for (auto it = out.begin(); (it = std::find(it, out.end(), 1)) != out.end(); ++it) {
        chosen.push_back(it - out.begin());
        n_chosen += sizes[chosen.back()];
    }
    // drop the chosen clusters with the lowest scores until the tokens of all chosen clusters fit
    while (n_chosen > n_token) {
        const auto last = std::min_element(chosen.begin(), chosen.end(), [&](int a, int b) { return scores[a] < scores[b]; });
        out[*last] = 0;
        n_chosen -= sizes[*last];
        chosen.erase(last);
    }
}

// Give cells to the ranked sets that have none, first to those with the most missing attention. sums: see choice_memory
static void admit_sets(resident_row & resident, const row_clusters & row, const std::vector<size_t> & clusters, const std::vector<float> & sums) {
    std::vector<std::pair<float, int64_t>> absent; // for each page: its negative missing attention, and its number
    for (size_t i = 0; i < clusters.size() && !resident.sets.empty(); i += n_cluster) {
        const int64_t number = row.begin() + clusters[i]/n_cluster;
        if (const int i_page = resident.find(row, number); i_page >= 0) {
            resident.pages[i_page].last_choice = resident.n_choice;
        } else if (row.is_grouped(number)) {
            absent.emplace_back(-std::accumulate(sums.begin() + i, sums.begin() + i + n_cluster, 0.0f), number);
        }
    }
    std::sort(absent.begin(), absent.end());
    absent.resize(std::min(absent.size(), n_admitted));
    for (const auto & [missing, number] : absent) {
        resident.admit(row, number, resident.n_choice - 1);
    }
}

void residents::choose(
        size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed) {
    auto & resident = rows[layer][head];

    const auto & row = tokens.clusters_of(layer, head);

    std::fill(resident.scores         .begin(), resident.scores         .end(), 0.0f);
    std::fill(resident.repeat_resident.begin(), resident.repeat_resident.end(), 0);
    std::fill(resident.next_resident  .begin(), resident.next_resident  .end(), 0);
    std::fill_n(missed, n_query, 0.0f);
    if (row.begin() == row.end()) {
        return;
    }

    used_again<choice_memory> memory;
    auto & [searched, ranked, sums, mean_cells, scores] = memory;

    search(tokens, layer, anchor, n_query, logits, 0).rank(head, queries, live, n_compared*n.n_token, searched, ranked);

    const size_t n_ranked = ranked.clusters.size();
    sums.assign(n_ranked, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        add(sums.data(), ranked.missing.data() + q*n_ranked, n_ranked, 1.0f);
    }
    ++resident.n_choice;
    admit_sets(resident, row, ranked.clusters, sums);

    mean_cells.resize(n_ranked);
    for (size_t i = 0; i < n_ranked; ++i) {
        // a block that was clustered after the last update has no cells yet
        const int i_page = resident.find(row, row.begin() + ranked.clusters[i]/n_cluster);
        mean_cells[i] = i_page < 0 ? -1 : i_page*n_cluster + ranked.clusters[i] % n_cluster;
        if (i_page >= 0 && resident.sizes[mean_cells[i]] > 0) {
            resident.scores[mean_cells[i]] = sums[i]/resident.sizes[mean_cells[i]];
        }
    }

    choose_fitting(resident.scores, resident.sizes, n.n_token, resident.repeat_resident);

    scores.resize(n.n_mean);
    for (int i = 0; i < n.n_mean; ++i) {
        scores[i] = resident.is_resident[i] ? resident_factor*resident.scores[i] : resident.scores[i];
    }
    choose_fitting(scores, resident.sizes, n.n_token, resident.next_resident);

    for (size_t i = 0; i < n_ranked; ++i) {
        if (mean_cells[i] >= 0 && resident.repeat_resident[mean_cells[i]] && !resident.is_resident[mean_cells[i]]) {
            for (int q = 0; q < n_query; ++q) {
                missed[q] += ranked.missing[q*n_ranked + i];
            }
        }
    }
}

} // namespace kvtool
