#include "search.h"

#include "choice.h"
#include "convert.h"
#include "products.h"
#include "row-products.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// minimum share of the softmax sum for which the mean value of a cluster or set is added to the estimate
static constexpr float least_part = 3e-4f;

// Single clusters are ranked only in the best sets, which together hold about n_ranked*n_exact tokens
static constexpr int n_ranked = 16;

// logarithm and inverse of each possible number of tokens of a cluster or set
struct number_tables {
    std::vector<float> logs;
    std::vector<float> inverses;
};

static const number_tables & numbers() {
    static const auto tables = [] {
        number_tables res { { -INFINITY }, { 0.0f } };
        for (int n = 1; n <= n_grouped*store::n_block; ++n) {
            res.logs    .push_back(std::log((float) n));
            res.inverses.push_back(1.0f/n);
        }
        return res;
    }();
    return tables;
}

search::search(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact)
    : all(all), i_layer(i), l(all[i]), rope(all.rotations_of(i)), rot(rot), n_query(n_query), is_few(n_query <= n_few_columns), logits(logits)
    , n_exact(n_exact) {}

int search::way_of(int64_t delta) {
    const auto at = std::find(ways.begin(), ways.end(), delta);
    if (at == ways.end()) {
        ways.push_back(delta);
        return ways.size() - 1;
    }
    return at - ways.begin();
}

void search::add_run(const means & some, size_t place, int n, int way, bool is_set) {
    if (!runs.empty() && runs.back().is_set == is_set && runs.back().way == way && runs.back().place + runs.back().n == place) {
        runs.back().n += n;
    } else {
        runs.push_back({ &some, place, n, way, is_set });
    }
    n_item += n;
}

// attend exactly to all tokens without clusters
void search::look_into_unsealed(int head, searched_row & row) {
    int64_t begin = all.begin();
    if (n_exact > 0) {
        const auto & own = all.clusters_of(i_layer, head);
        begin = std::max(begin, own.end()*l.n_block);
    }
    for (const auto & s : all.stretches(n_exact > 0 ? begin : all.far_end(), all.far_rotation(rot))) {
        const bool is_far = n_exact == 0 && s.begin < all.far_end();
        for (int64_t i = std::max(begin, s.begin), end; i < s.end; i = end) {
            end = std::min(s.end, archived_layer::block_end(i));
            row.looked.push_back({ i, (int) (end - i), way_of(s.delta), is_far, nullptr });
            row.n_looked += end - i;
        }
    }
}

// Compute the logits of the items (clusters or sets) of runs[first] and all later runs. item: index of the first of
// these items
void search::multiply_runs(size_t first, size_t item) {
    const auto * own_logs = numbers().logs.data();
    const auto * inverses = numbers().inverses.data();

    const size_t begin = item;
    for (size_t r = first; r < runs.size(); item += runs[r++].n) {
        const auto & run = runs[r];
        const auto * sizes = run.all->sizes.data() + run.place;
        for (int i = 0; i < run.n; ++i) {
            // A set of fewer than n_pack tokens counts as n_pack tokens. This limits how many sets pick_sets picks. It
            // adds their clusters as items, and there is room for only n_room items
            const int n = run.is_set && sizes[i] > 0 ? std::max<int>(sizes[i], n_pack) : sizes[i];
            size   [item + i] = n;
            inverse[item + i] = inverses[n];
            logs   [item + i] = own_logs[sizes[i]];
        }
        for (int q = 0; q < n_query; ++q) {
            float * to = x.data() + q*n_room + item;
            multiply(run.all->packs.data() + run.place/n_pack*run.all->size_k, run.n/n_pack, small[run.way*n_query + q], l.n_embd_k, to);
            for (int i = 0; i < run.n && logits.cap > 0.0f; ++i) {
                to[i] = logits.cap*std::tanh(to[i]/logits.cap);
            }
            const float   variance = variances[run.way*n_query + q];
            const float * spreads  = run.all->spreads.data() + run.place;
            float       * gains    = ranks.data() + q*n_room + item;
            for (int i = 0; i < run.n; ++i) {
                gains[i] = spread_gain(variance*spreads[i]);
            }
        }
    }
    for (int q = 0; q < n_query; ++q) {
        add(x    .data() + q*n_room + begin, logs.data() + begin, item - begin, 1.0f);
        add(ranks.data() + q*n_room + begin, x.data() + q*n_room + begin, item - begin, 1.0f);
    }
}

// Set the score of each item: its share of the softmax sum, added over all queries and divided by its number of tokens.
// The number of exact tokens is limited, so choosing the items with the most attention per token covers the most
// attention. powers: receives the exponentials of `ranks`; may be `ranks`
void search::set_scores(std::vector<float> & powers) {
    std::fill_n(score.begin(), n_item, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        const auto part = exponentials(ranks.data() + q*n_room, n_item, 1.0f, powers.data() + q*n_room);
        if (part.sum > 0.0f && std::isfinite(part.sum)) {
            add(score.data(), powers.data() + q*n_room, n_item, 1.0f/part.sum);
        }
    }
    for (size_t i = 0; i < n_item; ++i) {
        score[i] *= inverse[i];
    }
}

// replace the best sets by their clusters; these sets have n or more tokens together
void search::pick_sets(const row_clusters & own, size_t n_sets, int64_t n) {
    if (n_sets == 0) {
        return;
    }

    powers.resize(x.size());
    set_scores(powers);
    choose(score.data(), size.data(), n_sets, n, chosen.data());

    size_t item = 0;
    const size_t first = runs.size(), first_item = n_item;
    for (size_t r = 0; r < first && runs[r].is_set; ++r) {
        const auto run = runs[r];
        for (int i = 0; i < run.n; ++i, ++item) {
            if (!chosen[item]) {
                continue;
            }
            for (int q = 0; q < n_query; ++q) {
                x[q*n_room + item] = ranks[q*n_room + item] = -INFINITY;
            }
            const size_t place = own.place_of_set(run.place + i);
            prefetch(own.clusters.packs.data() + place/n_pack*own.clusters.size_k, own.clusters.size_k);
            add_run(own.clusters, place, n_pack, run.way, false);
        }
    }
    multiply_runs(first, first_item);
}

void search::look_into_clusters(const row_clusters & own, searched_row & row) {
    size_t item = 0;
    auto next = looked.begin();
    for (const auto & run : runs) {
        for (; next != looked.end() && *next < (int) (item + run.n); ++next) {
            const size_t  place = run.place + *next - item;
            const int64_t block = own.block_at(place);
            const auto  & s     = own[block];
            const int     c     = own.cluster_at(place);
            row.looked.push_back({ block*l.n_block + s.start[c], s.start[c + 1] - s.start[c], run.way, s.to.is_far, &s });
            row.n_looked += row.looked.back().n;
        }
        item += run.n;
    }
}

void search::estimate_rest(const std::vector<softmax_part> & parts, float * estimate, int64_t stride) {
    // here, score[i] > 0 marks an item that is added to the estimate of at least one query
    std::fill_n(score.begin(), n_item, 0.0f);
    std::vector<float> by(n_query, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        float * own   = estimate + q*stride;
        float * own_x = x.data() + q*n_room;

        if (!(parts[q].sum > 0.0f) || !std::isfinite(parts[q].most) || !std::isfinite(parts[q].sum)) {
            std::fill_n(own_x, n_item, 0.0f);
            continue;
        }
        float sum = parts[q].sum;
        for (const int i : looked) {
            sum -= own_x[i];
            own_x[i] = 0.0f;
        }
        const float kept = keep_above(own_x, n_item, least_part*parts[q].sum);
        if (kept > 0.0f) {
            own[0] = parts[q].most;
            own[1] = std::max(sum, kept);
            // scale up the added items, so that they include the weight of the items that are left out
            by[q] = own[1]/kept;
            add(score.data(), own_x, n_item, 1.0f);
        }
    }

    if (l.n_embd_v == 0) {
        return;
    }

    some.clear();
    size_t item = 0;
    for (const auto & run : runs) {
        for (int i = 0; i < run.n; ++i, ++item) {
            if (score[item] > 0.0f) {
                for (int q = 0; q < n_query && is_few; ++q) {
                    x[q*n_room + item] *= by[q];
                }
                some.push_back({ run.all->value(run.place + i), x.data() + item });
                prefetch(some.back().row, run.all->size_v);
            }
        }
    }
    const ggml_type type = all.clusters_of(i_layer, 0).clusters.type_v;

    const int n = some.size();
    if (is_few) {
        add_rows(type, some.data(), n, l.n_embd_v, n_room, n_query, estimate + 2, stride);
        return;
    }
    const int n_value = columns(l.n_embd_v);
    values.resize((size_t) n*n_value);
    powers.resize((size_t) n*n_query);
    for (int i = 0; i < n; ++i) {
        to_float(type, some[i].row, values.data() + i*n_value, l.n_embd_v);
        for (int q = 0; q < n_query; ++q) {
            powers[q*n + i] = some[i].w[q*n_room]*by[q];
        }
    }
    multiply_add(estimate + 2, stride, powers.data(), n, 1, values.data(), n_value, n_query, n, n_value);
}

void search::rotate(const float * queries, searched_row & row) {
    const int64_t d = l.n_embd_k;

    row.rotated.resize(ways.size()*n_query*d);
    for (size_t way = 0; way < ways.size(); ++way) {
        for (int q = 0; q < n_query; ++q) {
            float * to = row.rotated.data() + (way*n_query + q)*d;
            std::copy_n(queries + q*d, d, to);
            rope.rotate_query(to, ways[way]);
        }
    }
    if (is_few && l.n_map_k > 0) {
        row.mapped = row.rotated;
        hadamard(row.mapped.data(), row.mapped.size(), l.n_map_k);
    }
    if (has_bytes()) {
        row.bytes.set((l.n_map_k > 0 ? row.mapped : row.rotated).data(), ways.size()*n_query, d);
    }
    if (!is_few) {
        const int n_column = columns(n_query);
        row.columns.assign(ways.size()*d*n_column, 0.0f);
        for (size_t way = 0; way < ways.size(); ++way) {
            for (int q = 0; q < n_query; ++q) {
                for (int64_t e = 0; e < d; ++e) {
                    row.columns[(way*d + e)*n_column + q] = row.rotated[(way*n_query + q)*d + e];
                }
            }
        }
    }
}

// Compute the logits of the best clusters, and of the sets of all other clusters. The sets are the first items. Returns
// the number of sets. n: number of tokens in the sets that are replaced by their clusters
size_t search::multiply_clusters(const row_clusters & own, const float * queries, int64_t n, searched_row & row) {
    runs.clear();
    n_item = 0;

    const auto way = [&](int64_t block) { return way_of(all.query_rotation(own[block].to, rot)); };
    size_t n_sets = 0;
    for (const bool is_set : { true, false }) {
        n_sets = n_item;
        for (int64_t block = own.begin(); block < own.end();) {
            const bool is_grouped = own.is_grouped(block);
            if (is_set && is_grouped) {
                add_run(own.sets, own.set_place(block), n_set, way(block), true);
            } else if (!is_set && !is_grouped) {
                add_run(own.clusters, own.place(block), n_cluster, way(block), false);
            }
            block += is_grouped ? n_grouped : 1;
        }
    }
    rotate(queries, row);

    small    .resize(ways.size()*n_query);
    variances.resize(ways.size()*n_query);
    for (size_t i = 0; i < small.size(); ++i) {
        const float * query = row.rotated.data() + i*l.n_embd_k;
        small[i].set(query, l.n_embd_k);
        small[i].scale *= logits.scale;
        variances[i] = logits.scale*logits.scale*own.variance(query);
    }

    // Make room for n_pack clusters per set that pick_sets will pick. Each set counts as n_pack tokens or more, and
    // pick_sets stops at n tokens
    n_room = n_item + std::min<size_t>(n/n_pack + 1, n_sets)*n_pack + n_pack;
    n_room = (n_room + n_pack - 1)/n_pack*n_pack;
    x     .resize(n_room*n_query);
    ranks .resize(n_room*n_query);
    logs  .resize(n_room);
    inverse.resize(n_room);
    score .resize(n_room);
    size  .resize(n_room);
    chosen.assign(n_room, 0);

    multiply_runs(0, 0);
    pick_sets(own, n_sets, n);
    return n_sets;
}

void search::find(int head, const float * queries, searched_row & row, float * estimate, int64_t stride) {
    row.looked.clear();
    row.n_looked = 0;
    ways.clear();

    look_into_unsealed(head, row);

    if (n_exact == 0) {
        rotate(queries, row);
        return;
    }

    const auto & own = all.clusters_of(i_layer, head);

    const size_t n_sets = multiply_clusters(own, queries, n_ranked*n_exact, row);

    std::vector<softmax_part> parts(n_query);
    for (int q = 0; q < n_query; ++q) {
        parts[q] = exponentials(x.data() + q*n_room, n_item, 1.0f, x.data() + q*n_room);
    }
    set_scores(ranks);

    choose(score.data() + n_sets, size.data() + n_sets, n_item - n_sets, n_exact, chosen.data() + n_sets);
    looked.clear();
    for (size_t i = n_sets; i < n_item; ++i) {
        if (chosen[i]) {
            looked.push_back(i);
        }
    }
    look_into_clusters(own, row);
    estimate_rest(parts, estimate, stride);
}

void search::rank(int head, const float * queries, const float * live, int64_t n, searched_row & row, ranking & out) {
    ways.clear();

    const auto & own = all.clusters_of(i_layer, head);

    const size_t n_sets = multiply_clusters(own, queries, n, row);

    out.places.clear();
    for (const auto & run : runs) {
        for (int i = 0; i < run.n && !run.is_set; ++i) {
            out.places.push_back(run.place + i);
        }
    }
    const size_t n_found = out.places.size();
    out.missing.assign(n_found*n_query, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        float * own_x = x.data() + q*n_room;

        const auto  part = exponential_differences(ranks.data() + q*n_room, own_x, n_item, own_x);
        const float sum  = part.sum + std::exp(live[q] - part.most);
        if (part.sum > 0.0f && std::isfinite(sum)) {
            add(out.missing.data() + q*n_found, own_x + n_sets, n_found, 1.0f/sum);
        }
    }
}

} // namespace kvtool
