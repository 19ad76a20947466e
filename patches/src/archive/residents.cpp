#include "residents.h"

#include "choice.h"
#include "index.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// In each step, the score of a cluster is multiplied by this factor. With a larger factor, fewer residents change in a
// step, but they fit the next query worse
static constexpr float decay = 0.6f;

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
        std::vector<uint8_t> gone(n_mean, 0); // resident clusters that are removed
        update_means(r, layer, head, gone, out);
        update_tail (r, layer, head, out);
        choose_slots(r, layer, head, gone, out);
    }
    return !is_full(out);
}

void residents::update_means(row & r, size_t layer, int head, std::vector<uint8_t> & gone, cells & out) {
    const auto & own  = tokens.clusters_of(layer, head);
    auto       * mask = masks[layer].data() + (size_t) head*n_cell();

    for (int at = 0; at < n_ring; ++at) {
        const int64_t block = r.held[at];
        if (block < 0 || (block >= own.begin() && block < own.end() && own[block].to == r.bearings[at])) {
            continue;
        }
        r.held[at] = -1;
        for (int i = at*n_cluster; i < (at + 1)*n_cluster; ++i) {
            gone[i]      = r.is_here[i];
            r.is_here[i] = r.wanted[i] = 0;
            r.score[i]   = 0.0f;
            mask[i]      = unseen;
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

void residents::choose_slots(row & r, size_t layer, int head, std::vector<uint8_t> & gone, cells & out) {
    const auto & own  = tokens.clusters_of(layer, head);
    auto       * mask = masks[layer].data() + (size_t) head*n_cell();

    int n_free = std::count_if(r.slots.begin(), r.slots.end(), [&](const row::slot & s) { return s.cluster < 0 || gone[s.cluster]; });

    std::vector<int> arriving, leaving;
    int n_arriving = 0;
    for (int i = 0; i < n_mean; ++i) {
        if (r.wanted[i] && !r.is_here[i]) {
            arriving.push_back(i);
            n_arriving += r.sizes[i];
        } else if (r.is_here[i] && !r.wanted[i]) {
            leaving.push_back(i);
        }
    }
    // remove the clusters with the lowest scores until there is room
    std::sort(leaving.begin(), leaving.end(), [&](int a, int b) { return r.score[a] != r.score[b] ? r.score[a] > r.score[b] : a < b; });
    for (; !leaving.empty() && n_free < n_arriving; leaving.pop_back()) {
        const int i = leaving.back();
        gone[i]      = 1;
        r.is_here[i] = 0;
        mask[i]      = log_of(r.sizes[i]);
        n_free += r.sizes[i];
    }

    const int first = n_mean + n_tail;
    for (int s = 0; s < n_token; ++s) {
        auto & slot = r.slots[s];
        if (slot.cluster >= 0 && gone[slot.cluster]) {
            slot.cluster    = -1;
            mask[first + s] = unseen;
        }
    }

    // number of positions by which the key of the token at a place is rotated
    const auto turn_of = [&](int64_t place) {
        const auto &  block = own[place/n_block];
        const int64_t i     = place - place % n_block + block.order[place % n_block];
        return tokens.turn_back(i, block.to.is_far, anchor);
    };

    for (int s = 0; s < n_token && !is_full(out); ++s) {
        auto & slot = r.slots[s];
        if (slot.cluster >= 0 && slot.anchor != anchor && own[slot.place/n_block].to.is_far) {
            put_token(layer, head, slot.place, turn_of(slot.place), first + s, out);
            slot.anchor = anchor;
        }
    }

    int s = 0;
    for (const int i : arriving) {
        if (is_full(out)) {
            break;
        }
        r.is_here[i] = 1;
        mask[i]      = unseen;

        const int64_t block = r.held[i/n_cluster];
        const auto  & start = own[block].start;
        for (int64_t place = block*n_block + start[i % n_cluster]; place < block*n_block + start[i % n_cluster + 1]; ++place) {
            for (; r.slots[s].cluster >= 0; ++s) {}
            r.slots[s] = { i, place, anchor };
            mask[first + s] = seen;
            put_token(layer, head, place, turn_of(place), first + s, out);
        }
    }
}

//
// choice
//

struct choice_memory {
    std::vector<float> power;  // [query][cluster]: attention to a cluster that its mean does not represent
    std::vector<float> gains;  // spread_gain of one query and each cluster
    std::vector<float> turned; // a rotated query
    small_query        small;  // the rotated query in 8 bits

    // arrays over the clusters
    std::vector<int>     number;
    std::vector<int>     size; // tokens
    std::vector<float>   score;
    std::vector<uint8_t> chosen;
};

void residents::choose(
        size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed) {
    auto & r = rows[layer][head];

    const auto & own  = tokens.clusters_of(layer, head);
    const auto & rope = tokens.turns_of(layer);

    const int64_t n_embd = tokens[layer].n_embd_k;
    const int     n      = (own.end() - own.begin())*n_cluster;

    for (float & score : r.score) {
        score *= decay;
    }
    std::fill(r.wanted.begin(), r.wanted.end(), 0);
    std::fill_n(missed, n_query, 0.0f);
    if (n == 0) {
        return;
    }

    used_again<choice_memory> memory;
    auto & [power, gains, turned, small, number, size, score, chosen] = memory;

    power .resize((size_t) n*n_query);
    gains .resize(n);
    turned.resize(n_embd);
    number.resize(n);
    size  .resize(n);
    score .resize(n);
    chosen.resize(n);

    for (int i = 0; i < n; ++i) {
        number[i] = number_of(own, i);
        size  [i] = own.clusters.sizes[i];
    }
    for (int q = 0; q < n_query; ++q) {
        float * x = power.data() + q*n;

        // find consecutive blocks whose keys have the same rotation
        for (int64_t block = own.begin(), end; block < own.end(); block = end) {
            for (end = block + 1; end < own.end() && own[end].to == own[block].to; ++end) {}

            std::copy_n(queries + q*n_embd, n_embd, turned.begin());
            rope.turn_query(turned.data(), tokens.query_turn(own[block].to, anchor));

            small.set(turned.data(), n_embd);
            small.scale *= logits.scale;

            const size_t first = own.place(block), last = own.place(end);
            multiply(own.clusters.sides.data() + first/n_side*own.side_size(), (last - first)/n_side, small, n_embd, x + first);

            const float variance = logits.scale*logits.scale*own.variance(turned.data());
            for (size_t i = first; i < last; ++i) {
                x[i]     = logits.cap > 0.0f ? logits.cap*std::tanh(x[i]/logits.cap) : x[i];
                gains[i] = spread_gain(variance*own.clusters.spreads[i]);
                x[i]     = size[i] > 0 ? x[i] + std::log((float) size[i]) + gains[i] : -INFINITY;
            }
        }
        const auto  part = exponentials(x, n, 1.0f, x);
        const float sum  = part.sum + std::exp(live[q] - part.most);
        for (int i = 0; i < n; ++i) {
            x[i] = part.sum > 0.0f && std::isfinite(sum) ? x[i]/sum*(1.0f - std::exp(-gains[i])) : 0.0f;
        }
    }

    for (int i = 0; i < n; ++i) {
        float sum = 0.0f;
        for (int q = 0; q < n_query && size[i] > 0; ++q) {
            sum += power[q*n + i]/size[i];
        }
        // a new cluster gets the score that it would have if all earlier queries had been like the queries of this step
        r.score[number[i]] += r.is_new[number[i]] ? sum/(1.0f - decay) : sum;
        r.is_new[number[i]] = 0;
        score[i] = r.score[number[i]];
    }
    kvtool::choose(score.data(), size.data(), n, n_token, chosen.data());

    // drop the chosen clusters with the lowest scores until the tokens of all chosen clusters fit
    int64_t n_chosen = 0;
    for (int i = 0; i < n; ++i) {
        n_chosen += chosen[i] ? size[i] : 0;
    }
    while (n_chosen > n_token) {
        int last = -1;
        for (int i = 0; i < n; ++i) {
            last = chosen[i] && (last < 0 || score[i] < score[last]) ? i : last;
        }
        chosen[last] = 0;
        n_chosen -= size[last];
    }

    for (int i = 0; i < n; ++i) {
        r.wanted[number[i]] = chosen[i];
    }
    for (int q = 0; q < n_query; ++q) {
        for (int i = 0; i < n; ++i) {
            missed[q] += chosen[i] && !r.is_here[number[i]] ? power[q*n + i] : 0.0f;
        }
    }
}

} // namespace kvtool
