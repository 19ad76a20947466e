#include "residents.h"

#include "choice.h"
#include "index.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// In each step, the score of a cluster is multiplied by this factor. With a larger factor, fewer residents change in a
// step, but they fit the next query worse
static constexpr float decay = 0.6f;

// Queries are compared with the clusters of the best sets, which have this many tokens for each resident token
static constexpr int n_compared = 3;

static const ggml_fp16_t unseen = ggml_fp32_to_fp16(-INFINITY);
static const ggml_fp16_t seen   = ggml_fp32_to_fp16(0.0f);

static ggml_fp16_t log_of(int n) {
    return n > 0 ? ggml_fp32_to_fp16(std::log((float) n)) : unseen;
}

residents::residents(const archive & tokens, int n_mean, int n_token)
    : tokens(tokens), n_mean(n_mean), n_token(n_token), n_ring(n_mean/n_cluster) {
    for (size_t i = 0; i < tokens.n_layer(); ++i) {
        rows .emplace_back(tokens[i].n_head);
        masks.emplace_back(tokens[i].n_head*n_cell());
    }
    drop();
}

std::string residents::unfit() const {
    if (!tokens.has_clusters()) {
        return "without clusters, all archived tokens are attended to exactly";
    }
    for (size_t i = 0; i < tokens.n_layer(); ++i) {
        for (int head = 0; head < tokens[i].n_head; ++head) {
            const auto & own = tokens.clusters_of(i, head);
            if (own.end() - own.begin() > n_ring) {
                return "more clusters than cells for means";
            }
            if (tokens.end() - std::max(tokens.begin(), own.end()*n_block) > n_tail) {
                return "too many tokens have no cluster yet";
            }
        }
    }
    return {};
}

void residents::clear(row & r, ggml_fp16_t * mask) {
    r = {};
    r.held    .assign(n_ring, -1);
    r.bearings.resize(n_ring);
    r.anchors .assign(n_ring, -1);
    r.score   .assign(n_mean, 0.0f);
    r.sizes   .assign(n_mean, 0);
    r.wanted  .assign(n_mean, 0);
    r.is_here .assign(n_mean, 0);
    r.is_new  .assign(n_mean, 0);
    r.slots   .resize(n_token);
    r.heads   .assign(n_mean, -1);
    r.free    .resize(n_token);
    std::iota(r.free.rbegin(), r.free.rend(), 0); // the first slots are used first
    r.base = tokens.base();
    std::fill_n(mask, n_cell(), unseen);
}

void residents::drop() {
    anchor = -1;
    for (size_t i = 0; i < rows.size(); ++i) {
        for (size_t head = 0; head < rows[i].size(); ++head) {
            clear(rows[i][head], masks[i].data() + head*n_cell());
        }
    }
}

//
// cells
//

void residents::put_mean(size_t layer, int head, size_t place, int cell, cells & out) const {
    const auto & l   = tokens[layer];
    const auto & own = tokens.clusters_of(layer, head);
    const auto & to  = own[own.block_at(place)].to;

    const size_t at_k = out.keys.size(), at_v = out.values.size();
    out.at    .push_back((int64_t) cell*l.n_head + head);
    out.keys  .resize(at_k + l.n_embd_k);
    out.values.resize(at_v + l.n_embd_v);

    get_key(own.clusters.sides.data() + place/n_side*own.side_size(), place % n_side, out.keys.data() + at_k, l.n_embd_k);
    own.clusters.get_value(place, out.values.data() + at_v);

    // query_turn rotates a query; here the mean is rotated instead, so it is rotated in the opposite direction
    tokens.turns_of(layer).turn(out.keys.data() + at_k, -tokens.query_turn(to, anchor));
}

void residents::put_token(size_t layer, int head, int64_t place, int64_t turn, int cell, cells & out) const {
    const auto & l = tokens[layer];

    const size_t at_k = out.keys.size(), at_v = out.values.size();
    out.at    .push_back((int64_t) cell*l.n_head + head);
    out.keys  .resize(at_k + l.n_embd_k);
    out.values.resize(at_v + l.n_embd_v);

    l.keys  (head, place, 1, out.keys  .data() + at_k);
    l.values(head, place, 1, out.values.data() + at_v);
    if (turn != 0) {
        tokens.turns_of(layer).turn(out.keys.data() + at_k, turn);
    }
}

void residents::begin(int64_t rot) {
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
            clear(r, masks[layer].data() + (size_t) head*n_cell());
        }
        update_means(r, layer, head, out);
        update_tail (r, layer, head, out);
        update_slots(r, layer, head, out);
    }
    return !is_full(out);
}

// remove a cluster's tokens from the residents
void residents::remove(row & r, int cluster, ggml_fp16_t * mask) const {
    for (int s = r.heads[cluster]; s >= 0; s = r.slots[s].next) {
        r.slots[s].place = -1;
        r.free.push_back(s);
        mask[n_mean + n_tail + s] = unseen;
    }
    r.heads  [cluster] = -1;
    r.is_here[cluster] = 0;
}

void residents::update_means(row & r, size_t layer, int head, cells & out) {
    const auto & own  = tokens.clusters_of(layer, head);
    auto       * mask = masks[layer].data() + (size_t) head*n_cell();

    for (int at = 0; at < n_ring; ++at) {
        const int64_t block = r.held[at];
        if (block < 0 || (block >= own.begin() && block < own.end() && own[block].to == r.bearings[at])) {
            continue;
        }
        r.held[at] = -1;
        for (int i = at*n_cluster; i < (at + 1)*n_cluster; ++i) {
            remove(r, i, mask);
            r.wanted[i] = 0;
            r.sizes [i] = 0;
            r.score [i] = 0.0f;
            mask[i]     = unseen;
        }
    }

    for (int64_t block = own.begin(); block < own.end() && !is_full(out); ++block) {
        const int  at     = block % n_ring;
        const bool is_new = r.held[at] != block;
        if (!is_new && !(own[block].to.is_far && r.anchors[at] != anchor)) {
            continue;
        }
        // Clusters of a group are ordered by set, so the block's clusters may be at any place of the group
        const bool   is_grouped = own.is_grouped(block);
        const size_t first      = own.place(is_grouped ? block/n_grouped*n_grouped : block);
        for (size_t place = first; place < first + (is_grouped ? n_grouped : 1)*n_cluster; ++place) {
            if (own.block_at(place) != block) {
                continue;
            }
            const int i = number_of(own, place);
            r.sizes[i] = own.clusters.sizes[place];
            if (r.sizes[i] > 0) {
                put_mean(layer, head, place, i, out);
            }
            if (is_new) {
                mask[i]     = log_of(r.sizes[i]);
                r.is_new[i] = 1;
            }
        }
        r.held    [at] = block;
        r.bearings[at] = own[block].to;
        r.anchors [at] = anchor;
    }
}

void residents::update_tail(row & r, size_t layer, int head, cells & out) {
    const int64_t first = std::max(tokens.begin(), tokens.clusters_of(layer, head).end()*n_block);

    for (r.tail = std::max(r.tail, first); r.tail < tokens.end() && !is_full(out); ++r.tail) {
        put_token(layer, head, r.tail, tokens.turn_back(r.tail, false, anchor), n_mean + r.tail % n_tail, out);
    }

    auto * mask = masks[layer].data() + (size_t) head*n_cell() + n_mean;
    std::fill_n(mask, n_tail, unseen);
    for (int64_t i = first; i < tokens.end(); ++i) {
        mask[i % n_tail] = seen;
    }
}

void residents::update_slots(row & r, size_t layer, int head, cells & out) {
    const auto & own  = tokens.clusters_of(layer, head);
    auto       * mask = masks[layer].data() + (size_t) head*n_cell();

    std::vector<int> arriving, leaving;
    int64_t n_arriving = 0;
    for (int at = 0; at < n_mean; at += n_cluster) {
        // most blocks do not change
        if (std::equal(r.wanted.begin() + at, r.wanted.begin() + at + n_cluster, r.is_here.begin() + at)) {
            continue;
        }
        for (int i = at; i < at + n_cluster; ++i) {
            if (r.wanted[i] && !r.is_here[i]) {
                arriving.push_back(i);
                n_arriving += r.sizes[i];
            } else if (r.is_here[i] && !r.wanted[i]) {
                leaving.push_back(i);
            }
        }
    }
    // remove the clusters with the lowest scores until there is room
    std::sort(leaving.begin(), leaving.end(), [&](int a, int b) { return r.score[a] != r.score[b] ? r.score[a] > r.score[b] : a < b; });
    for (; !leaving.empty() && (int64_t) r.free.size() < n_arriving; leaving.pop_back()) {
        remove(r, leaving.back(), mask);
        mask[leaving.back()] = log_of(r.sizes[leaving.back()]);
    }

    // number of positions by which the key of the token at a place is rotated
    const auto turn_of = [&](int64_t place) {
        const auto &  block = own[place/n_block];
        const int64_t i     = place - place % n_block + block.order[place % n_block];
        return tokens.turn_back(i, block.to.is_far, anchor);
    };
    const int first = n_mean + n_tail;

    for (int s = 0; s < n_token && r.anchor != anchor && !is_full(out); ++s) {
        auto & slot = r.slots[s];
        if (slot.place >= 0 && slot.anchor != anchor && own[slot.place/n_block].to.is_far) {
            put_token(layer, head, slot.place, turn_of(slot.place), first + s, out);
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
        mask[i]      = unseen;

        const int64_t block = r.held[i/n_cluster];
        const auto  & start = own[block].start;
        for (int64_t place = block*n_block + start[i % n_cluster]; place < block*n_block + start[i % n_cluster + 1]; ++place) {
            const int s = r.free.back();
            r.free.pop_back();
            r.slots[s] = { place, anchor, r.heads[i] };
            r.heads[i] = s;
            mask[first + s] = seen;
            put_token(layer, head, place, turn_of(place), first + s, out);
        }
    }
}

//
// choice
//

struct choice_memory {
    searched_row       row;
    ranking            found;
    std::vector<float> sums;   // missing attention to each found cluster, added over all queries
    std::vector<int>   chosen; // indices of the chosen clusters
};

void residents::choose(
        size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed) {
    auto & r = rows[layer][head];

    const auto & own = tokens.clusters_of(layer, head);

    for (float & score : r.score) {
        score *= decay;
    }
    std::fill(r.wanted.begin(), r.wanted.end(), 0);
    std::fill_n(missed, n_query, 0.0f);
    if (own.begin() == own.end()) {
        return;
    }

    used_again<choice_memory> memory;
    auto & [searched, found, sums, chosen] = memory;

    search(tokens, layer, anchor, n_query, logits, 0).rank(head, queries, live, n_compared*n_token, searched, found);

    const size_t n = found.places.size();
    sums.assign(n, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        add(sums.data(), found.missing.data() + q*n, n, 1.0f);
    }
    for (size_t i = 0; i < n; ++i) {
        const int number = number_of(own, found.places[i]);
        // a block that was clustered after the last update has no cells yet
        if (r.held[number/n_cluster] == own.block_at(found.places[i]) && r.sizes[number] > 0) {
            // a new cluster gets the score that it would have if all earlier queries had been like those of this step
            r.score[number] += sums[i]/r.sizes[number]/(r.is_new[number] ? 1.0f - decay : 1.0f);
        }
    }
    std::fill(r.is_new.begin(), r.is_new.end(), 0);

    kvtool::choose(r.score.data(), r.sizes.data(), n_mean, n_token, r.wanted.data());

    chosen.clear();
    int64_t n_chosen = 0;
    for (auto it = r.wanted.begin(); (it = std::find(it, r.wanted.end(), 1)) != r.wanted.end(); ++it) {
        chosen.push_back(it - r.wanted.begin());
        n_chosen += r.sizes[chosen.back()];
    }
    // drop the chosen clusters with the lowest scores until the tokens of all chosen clusters fit
    while (n_chosen > n_token) {
        const auto last = std::min_element(chosen.begin(), chosen.end(), [&](int a, int b) { return r.score[a] < r.score[b]; });
        r.wanted[*last] = 0;
        n_chosen -= r.sizes[*last];
        chosen.erase(last);
    }

    for (size_t i = 0; i < n; ++i) {
        const int number = number_of(own, found.places[i]);
        if (r.wanted[number] && !r.is_here[number]) {
            for (int q = 0; q < n_query; ++q) {
                missed[q] += found.missing[q*n + i];
            }
        }
    }
}

} // namespace kvtool
