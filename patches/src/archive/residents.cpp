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
static constexpr float stay = 2.0f;

// maximum number of sets that get cells in a step
static constexpr size_t n_admitted = 4;

residents::residents(const archive & tokens, const resident_sizes & n) : n(n), tokens(tokens) {
    drop();
}

// number of a row's pages that must have cells, because no mean of a set can represent their clusters
static int64_t n_needed(const row_clusters & own, bool has_sets) {
    if (!has_sets) {
        return own.end() - own.begin();
    }
    int64_t res = 0;
    for (int64_t block = own.begin(); block < own.end(); block += own.is_grouped(block) ? n_grouped : 1) {
        res += !own.is_grouped(block);
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
            const auto & own = tokens.clusters_of(i, head);
            const int64_t n_group = (own.end() + n_grouped - 1)/n_grouped - own.begin()/n_grouped;
            if (n_needed(own, has_sets)*n_cluster > n.n_mean || (has_sets && n_group*n_set > n.n_mean_set)) {
                return "more clusters than cells for means";
            }
            if (tokens.end() - std::max(tokens.begin(), own.end()*n_block) > n.n_tail) {
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
static std::pair<float *, float *> add_cell(const archived_layer & l, int64_t at, residents::cells & out) {
    const size_t i = out.at.size();
    out.at.push_back(at);

    const auto room_for = [i](std::vector<float> & x, size_t n) {
        if (x.size() < (i + 1)*n) {
            x.resize(2*(i + 1)*n);
        }
        return x.data() + i*n;
    };
    return { room_for(out.keys, l.n_embd_k), room_for(out.values, l.n_embd_v) };
}

void residents::put_mean(size_t layer, int head, const means & all, size_t place, const bearing & to, int cell, cells & out) const {
    const auto & l = tokens[layer];
    const auto [key, value] = add_cell(l, (int64_t) cell*l.n_head + head, out);

    get_key(all.packs.data() + place/n_pack*all.size_k, place % n_pack, key, l.n_embd_k);
    all.get_value(place, value);

    // query_rotation rotates a query; here the mean is rotated instead, so it is rotated in the opposite direction
    tokens.rotations_of(layer).rotate(key, -tokens.query_rotation(to, anchor));
}

void residents::put_token(size_t layer, int head, int64_t i, int64_t place, bool is_far, int cell, cells & out) const {
    const auto & l = tokens[layer];
    const auto [key, value] = add_cell(l, (int64_t) cell*l.n_head + head, out);

    tokens.key(layer, head, i, place, key);
    l.values(head, place, 1, value);
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
        auto & r = rows[layer][head];
        if (r.base != tokens.base()) {
            r = resident_row(n, tokens.base());
        }
        r.drop_changed(tokens.clusters_of(layer, head));
        update_sets (r, layer, head, out);
        update_means(r, layer, head, out);
        update_tail (r, layer, head, out);
        update_slots(r, layer, head, out);
    }
    return !is_full(out);
}

void residents::update_sets(resident_row & r, size_t layer, int head, cells & out) {
    const auto & own = tokens.clusters_of(layer, head);

    for (int64_t block = own.begin(); block < own.end() && !r.sets.empty(); block = (block/n_grouped + 1)*n_grouped) {
        auto & s = r.sets[block/n_grouped % r.sets.size()];
        if (is_full(out) || !own.is_grouped(block) || (s.group == block/n_grouped && !(s.to.is_far && s.anchor != anchor))) {
            continue;
        }
        s = { block/n_grouped, own[block].to, anchor };
        for (int64_t number = block; number < block + n_set; ++number) {
            const size_t place = own.set_place(block) + number - block;
            const int    cell  = n.n_mean + number % n.n_mean_set;
            if (own.sets.sizes[place] > 0) {
                put_mean(layer, head, own.sets, place, s.to, cell, out);
            }
            r.set_logs[cell - n.n_mean] = mask_of(own.sets.sizes[place]);
            r.show_set(number, r.find(own, number) < 0);
        }
    }
}

void residents::update_means(resident_row & r, size_t layer, int head, cells & out) {
    const auto & own = tokens.clusters_of(layer, head);

    // first give cells to the pages that need them, then to as many sets as there is room for
    int64_t n_free = std::count_if(r.pages.begin(), r.pages.end(), [](const auto & p) { return p.number < 0; });
    for (const bool is_needed : { true, false }) {
        for (int64_t number = own.end() - 1; number >= own.begin() && (is_needed || n_free > 0); --number) {
            if (is_needed == (r.sets.empty() || !own.is_grouped(number)) && r.find(own, number) < 0) {
                r.admit(own, number, r.n_choice);
                --n_free;
            }
        }
    }
    for (size_t at = 0; at < r.pages.size() && !is_full(out); ++at) {
        auto & p = r.pages[at];
        if (p.number < 0 || (p.is_written && !(p.to.is_far && p.anchor != anchor))) {
            continue;
        }
        for (int c = 0; c < n_cluster; ++c) {
            const int i = at*n_cluster + c;
            if (r.sizes[i] > 0) {
                put_mean(layer, head, own.clusters, own.place(p.number) + c, p.to, i, out);
            }
            r.mask[i] = mask_of(r.is_here[i] ? 0 : r.sizes[i]);
        }
        p.is_written = true;
        p.anchor     = anchor;
    }
}

void residents::update_tail(resident_row & r, size_t layer, int head, cells & out) {
    const int64_t first = std::max(tokens.begin(), tokens.clusters_of(layer, head).end()*n_block);

    for (r.tail = std::max(r.tail, first); r.tail < tokens.end() && !is_full(out); ++r.tail) {
        put_token(layer, head, r.tail, r.tail, false, n.first_tail() + r.tail % n.n_tail, out);
    }

    const auto mask = r.mask.begin() + n.first_tail();
    const auto seen = mask_of(1);
    std::fill_n(mask, n.n_tail, mask_of(0));
    for (int64_t i = first; i < tokens.end(); ++i) {
        mask[i % n.n_tail] = seen;
    }
}

void residents::update_slots(resident_row & r, size_t layer, int head, cells & out) {
    const auto & own    = tokens.clusters_of(layer, head);
    const auto & wanted = is_repeated ? r.wanted : r.next;

    std::vector<int> arriving, leaving;
    int64_t n_arriving = 0;
    for (int at = 0; at < n.n_mean; at += n_cluster) {
        // skip pages that do not change, which are most pages
        if (std::equal(wanted.begin() + at, wanted.begin() + at + n_cluster, r.is_here.begin() + at)) {
            continue;
        }
        for (int i = at; i < at + n_cluster; ++i) {
            if (wanted[i] && !r.is_here[i]) {
                arriving.push_back(i);
                n_arriving += r.sizes[i];
            } else if (r.is_here[i] && !wanted[i]) {
                leaving.push_back(i);
            }
        }
    }
    // remove the clusters with the lowest scores until there is room
    std::sort(leaving.begin(), leaving.end(), [&](int a, int b) { return r.score[a] != r.score[b] ? r.score[a] > r.score[b] : a < b; });
    for (; !leaving.empty() && (int64_t) r.free.size() < n_arriving; leaving.pop_back()) {
        r.remove(leaving.back());
        r.mask[leaving.back()] = mask_of(r.sizes[leaving.back()]);
    }

    const auto put = [&](int64_t place, int s) {
        const auto & block = own[place/n_block];
        put_token(layer, head, place - place % n_block + block.order[place % n_block], place, block.to.is_far, n.first_token() + s, out);
    };
    for (int s = 0; s < n.n_token && r.anchor != anchor && !is_full(out); ++s) {
        auto & slot = r.slots[s];
        if (slot.place >= 0 && slot.anchor != anchor && own[slot.place/n_block].to.is_far) {
            put(slot.place, s);
            slot.anchor = anchor;
        }
    }
    if (!is_full(out)) {
        r.anchor = anchor;
    }

    for (const int i : arriving) {
        if (is_full(out)) {
            break;
        }
        r.is_here[i] = 1;
        r.mask   [i] = mask_of(0);

        const size_t  at    = own.place(r.pages[i/n_cluster].number) + i % n_cluster;
        const int64_t block = own.block_at(at);
        const auto  * start = own[block].start.data() + own.cluster_at(at);
        for (int64_t place = block*n_block + start[0]; place < block*n_block + start[1]; ++place) {
            put(place, r.add_token(i, place, anchor));
        }
    }
}

//
// choosing residents
//

struct choice_memory {
    searched_row       row;
    ranking            found;
    std::vector<float> sums;   // Missing attention to each found cluster, added over all queries.
    std::vector<int>   index;  // Index of each found cluster in its row; -1 if it has no cell.
    std::vector<float> scores; // `score` of a row, multiplied by `stay` for resident clusters.
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

// Give cells to the found sets that have none, first to those with the most missing attention. sums: see choice_memory
static void admit_sets(resident_row & r, const row_clusters & own, const std::vector<size_t> & places, const std::vector<float> & sums) {
    std::vector<std::pair<float, int64_t>> absent; // for each page: its negative missing attention, and its number
    for (size_t i = 0; i < places.size() && !r.sets.empty(); i += n_cluster) {
        const int64_t number = own.begin() + places[i]/n_cluster;
        if (const int at = r.find(own, number); at >= 0) {
            r.pages[at].last = r.n_choice;
        } else if (own.is_grouped(number)) {
            absent.emplace_back(-std::accumulate(sums.begin() + i, sums.begin() + i + n_cluster, 0.0f), number);
        }
    }
    std::sort(absent.begin(), absent.end());
    absent.resize(std::min(absent.size(), n_admitted));
    for (const auto & [missing, number] : absent) {
        r.admit(own, number, r.n_choice - 1);
    }
}

void residents::choose(
        size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed) {
    auto & r = rows[layer][head];

    const auto & own = tokens.clusters_of(layer, head);

    std::fill(r.score .begin(), r.score .end(), 0.0f);
    std::fill(r.wanted.begin(), r.wanted.end(), 0);
    std::fill(r.next  .begin(), r.next  .end(), 0);
    std::fill_n(missed, n_query, 0.0f);
    if (own.begin() == own.end()) {
        return;
    }

    used_again<choice_memory> memory;
    auto & [searched, found, sums, index, scores] = memory;

    search(tokens, layer, anchor, n_query, logits, 0).rank(head, queries, live, n_compared*n.n_token, searched, found);

    const size_t n_found = found.places.size();
    sums.assign(n_found, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        add(sums.data(), found.missing.data() + q*n_found, n_found, 1.0f);
    }
    ++r.n_choice;
    admit_sets(r, own, found.places, sums);

    index.resize(n_found);
    for (size_t i = 0; i < n_found; ++i) {
        // a block that was clustered after the last update has no cells yet
        const int at = r.find(own, own.begin() + found.places[i]/n_cluster);
        index[i] = at < 0 ? -1 : at*n_cluster + found.places[i] % n_cluster;
        if (at >= 0 && r.sizes[index[i]] > 0) {
            r.score[index[i]] = sums[i]/r.sizes[index[i]];
        }
    }

    choose_fitting(r.score, r.sizes, n.n_token, r.wanted);

    scores.resize(n.n_mean);
    for (int i = 0; i < n.n_mean; ++i) {
        scores[i] = r.is_here[i] ? stay*r.score[i] : r.score[i];
    }
    choose_fitting(scores, r.sizes, n.n_token, r.next);

    for (size_t i = 0; i < n_found; ++i) {
        if (index[i] >= 0 && r.wanted[index[i]] && !r.is_here[index[i]]) {
            for (int q = 0; q < n_query; ++q) {
                missed[q] += found.missing[q*n_found + i];
            }
        }
    }
}

} // namespace kvtool
