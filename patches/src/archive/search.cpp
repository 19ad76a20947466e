#include "search.h"

#include "choice.h"
#include "convert.h"
#include "products.h"
#include "row-products.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// minimum share of the softmax sum for which the mean value of a cluster or set is added to the estimate
static constexpr float min_share = 3e-4f;

// Single clusters are ranked only in the best sets, which together hold about n_ranked_per_exact*n_exact tokens
static constexpr int n_ranked_per_exact = 16;

// logarithm and inverse of each possible number of tokens of a cluster or set
struct size_tables {
    std::vector<float> logs;
    std::vector<float> inverses;
};

static const size_tables & tables() {
    static const auto res = [] {
        size_tables by_size { { -INFINITY }, { 0.0f } };
        for (int n = 1; n <= n_grouped*store::n_block; ++n) {
            by_size.logs    .push_back(std::log((float) n));
            by_size.inverses.push_back(1.0f/n);
        }
        return by_size;
    }();
    return res;
}

search::search(const archive & tokens, size_t i_layer, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact)
    : tokens(tokens), i_layer(i_layer), l(tokens[i_layer]), rope(tokens.rotations_of(i_layer)), rot(rot), n_query(n_query)
    , is_few(n_query <= n_few_columns), logits(logits), n_exact(n_exact) {}

int search::rotation_index(int64_t delta) {
    const auto it = std::find(deltas.begin(), deltas.end(), delta);
    if (it == deltas.end()) {
        deltas.push_back(delta);
        return deltas.size() - 1;
    }
    return it - deltas.begin();
}

void search::add_run(size_t first_run, const means & means, size_t first, int n, int i_rotation, bool is_set) {
    if (runs.size() > first_run && runs.back().is_set == is_set && runs.back().i_rotation == i_rotation && runs.back().first + runs.back().n == first) {
        runs.back().n += n;
    } else {
        runs.push_back({ &means, first, n, i_rotation, is_set });
    }
    n_item += n;
}

// attend exactly to all tokens without clusters
void search::add_unsealed(int head, searched_row & searched) {
    int64_t begin = tokens.begin();
    if (n_exact > 0) {
        begin = std::max(begin, tokens.clusters_of(i_layer, head).end()*l.n_block);
    }
    for (const auto & s : tokens.stretches(n_exact > 0 ? begin : tokens.far_end(), tokens.far_rotation(rot))) {
        const bool is_far = n_exact == 0 && s.begin < tokens.far_end();
        for (int64_t i = std::max(begin, s.begin), end; i < s.end; i = end) {
            end = std::min(s.end, archived_layer::block_end(i));
            searched.exact.push_back({ i, (int) (end - i), rotation_index(s.delta), is_far, nullptr });
            searched.n_exact_token += end - i;
        }
    }
}

// Compute the logits of the items (clusters or sets) of runs[first_run] and all later runs. item: index of the first of
// these items
void search::multiply_runs(size_t first_run, size_t item) {
    const auto * logs     = tables().logs.data();
    const auto * inverses = tables().inverses.data();

    const size_t begin = item;
    for (size_t r = first_run; r < runs.size(); item += runs[r++].n) {
        const auto & run       = runs[r];
        const auto * run_sizes = run.means->sizes.data() + run.first;
        for (int i = 0; i < run.n; ++i) {
            // A set of fewer than n_pack tokens counts as n_pack tokens. This limits how many sets expand_sets
            // replaces. It adds their clusters as items, and there is room for only item_stride items
            const int n = run.is_set && run_sizes[i] > 0 ? std::max<int>(run_sizes[i], n_pack) : run_sizes[i];
            sizes        [item + i] = n;
            inverse_sizes[item + i] = inverses[n];
            size_logs    [item + i] = logs[run_sizes[i]];
        }
        for (int q = 0; q < n_query; ++q) {
            const size_t i_query = run.i_rotation*n_query + q;

            float * run_logits = mean_logits.data() + q*item_stride + item;
            multiply(run.means->packs.data() + run.first/n_pack*run.means->size_k, run.n/n_pack, byte_queries[i_query], l.n_embd_k, run_logits);
            for (int i = 0; i < run.n && logits.cap > 0.0f; ++i) {
                run_logits[i] = logits.capped(run_logits[i]);
            }
            const float   variance = variances[i_query];
            const float * spreads  = run.means->spreads.data() + run.first;
            float       * gains    = spread_logits.data() + q*item_stride + item;
            for (int i = 0; i < run.n; ++i) {
                gains[i] = spread_gain(variance*spreads[i]);
            }
        }
    }
    for (int q = 0; q < n_query; ++q) {
        float * query_logits = mean_logits.data() + q*item_stride + begin;
        add(query_logits, size_logs.data() + begin, item - begin, 1.0f);
        add(spread_logits.data() + q*item_stride + begin, query_logits, item - begin, 1.0f);
    }
}

// Set the score of each item: its share of the softmax sum, added over all queries and divided by its number of tokens.
// The number of exact tokens is limited, so choosing the items with the most attention per token covers the most
// attention. exps: receives the exponentials of spread_logits; may be spread_logits
void search::set_scores(std::vector<float> & exps) {
    std::fill_n(scores.begin(), n_item, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        const auto part = exponentials(spread_logits.data() + q*item_stride, n_item, 1.0f, exps.data() + q*item_stride);
        if (part.sum > 0.0f && std::isfinite(part.sum)) {
            add(scores.data(), exps.data() + q*item_stride, n_item, 1.0f/part.sum);
        }
    }
    for (size_t i = 0; i < n_item; ++i) {
        scores[i] *= inverse_sizes[i];
    }
}

// replace the best sets by their clusters; these sets have n or more tokens together
void search::expand_sets(const row_clusters & row, size_t n_sets, int64_t n) {
    if (n_sets == 0) {
        return;
    }

    exps.resize(mean_logits.size());
    set_scores(exps);
    choose(scores.data(), sizes.data(), n_sets, n, chosen.data());

    size_t item = 0;
    const size_t first_run = runs.size(), first_item = n_item;
    for (size_t r = 0; r < first_run && runs[r].is_set; ++r) {
        const auto run = runs[r];
        for (int i = 0; i < run.n; ++i, ++item) {
            if (!chosen[item]) {
                continue;
            }
            for (int q = 0; q < n_query; ++q) {
                mean_logits[q*item_stride + item] = spread_logits[q*item_stride + item] = -INFINITY;
            }
            const size_t i_cluster = row.first_in_set(run.first + i);
            prefetch(row.clusters.packs.data() + i_cluster/n_pack*row.clusters.size_k, row.clusters.size_k);
            add_run(first_run, row.clusters, i_cluster, n_pack, run.i_rotation, false);
        }
    }
    multiply_runs(first_run, first_item);
}

void search::add_clusters(const row_clusters & row, searched_row & searched) {
    size_t item = 0;
    auto next = exact_items.begin();
    for (const auto & run : runs) {
        for (; next != exact_items.end() && *next < (int) (item + run.n); ++next) {
            const size_t  i_cluster = run.first + *next - item;
            const int64_t block     = row.block_of(i_cluster);
            const auto  & s         = row[block];
            const int     c         = row.index_in_block(i_cluster);
            searched.exact.push_back({ block*l.n_block + s.start[c], s.start[c + 1] - s.start[c], run.i_rotation, s.origin.is_far, &s });
            searched.n_exact_token += searched.exact.back().n;
        }
        item += run.n;
    }
}

void search::estimate_others(const std::vector<softmax_part> & parts, float * estimate, int64_t stride) {
    // here, scores[i] > 0 marks an item that is added to the estimate of at least one query
    std::fill_n(scores.begin(), n_item, 0.0f);
    std::vector<float> factors(n_query, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        float * query_estimate = estimate + q*stride;
        float * query_exps     = mean_logits.data() + q*item_stride;

        if (!(parts[q].sum > 0.0f) || !std::isfinite(parts[q].max) || !std::isfinite(parts[q].sum)) {
            std::fill_n(query_exps, n_item, 0.0f);
            continue;
        }
        float sum = parts[q].sum;
        for (const int i : exact_items) {
            sum -= query_exps[i];
            query_exps[i] = 0.0f;
        }
        const float added_sum = keep_above(query_exps, n_item, min_share*parts[q].sum);
        if (added_sum > 0.0f) {
            query_estimate[0] = parts[q].max;
            query_estimate[1] = std::max(sum, added_sum);
            // scale up the added items, so that they include the weight of the items that are left out
            factors[q] = query_estimate[1]/added_sum;
            add(scores.data(), query_exps, n_item, 1.0f);
        }
    }

    if (l.n_embd_v == 0) {
        return;
    }

    added_values.clear();
    size_t item = 0;
    for (const auto & run : runs) {
        for (int i = 0; i < run.n; ++i, ++item) {
            if (scores[item] > 0.0f) {
                for (int q = 0; q < n_query && is_few; ++q) {
                    mean_logits[q*item_stride + item] *= factors[q];
                }
                added_values.push_back({ run.means->value(run.first + i), mean_logits.data() + item });
                prefetch(added_values.back().row, run.means->size_v);
            }
        }
    }
    const ggml_type type = tokens.clusters_of(i_layer, 0).clusters.type_v;

    const int n = added_values.size();
    if (is_few) {
        add_rows(type, added_values.data(), n, l.n_embd_v, item_stride, n_query, estimate + 2, stride);
        return;
    }
    const int n_value = columns(l.n_embd_v);
    values.resize((size_t) n*n_value);
    exps  .resize((size_t) n*n_query);
    for (int i = 0; i < n; ++i) {
        to_float(type, added_values[i].row, values.data() + i*n_value, l.n_embd_v);
        for (int q = 0; q < n_query; ++q) {
            exps[(size_t) q*n + i] = added_values[i].w[(size_t) q*item_stride]*factors[q];
        }
    }
    multiply_add(estimate + 2, stride, exps.data(), n, 1, values.data(), n_value, n_query, n, n_value);
}

void search::rotate(const float * queries, searched_row & searched) {
    const int64_t d = l.n_embd_k;

    searched.rotated.resize(deltas.size()*n_query*d);
    for (size_t i_rotation = 0; i_rotation < deltas.size(); ++i_rotation) {
        for (int q = 0; q < n_query; ++q) {
            float * rotated = searched.rotated.data() + (i_rotation*n_query + q)*d;
            std::copy_n(queries + q*d, d, rotated);
            rope.rotate_query(rotated, deltas[i_rotation]);
        }
    }
    if (is_few && l.n_map_k > 0) {
        searched.mapped = searched.rotated;
        hadamard(searched.mapped.data(), searched.mapped.size(), l.n_map_k);
    }
    if (has_bytes()) {
        searched.bytes.set((l.n_map_k > 0 ? searched.mapped : searched.rotated).data(), deltas.size()*n_query, d);
    }
    if (!is_few) {
        const int n_column = columns(n_query);
        searched.columns.assign(deltas.size()*d*n_column, 0.0f);
        for (size_t i_rotation = 0; i_rotation < deltas.size(); ++i_rotation) {
            for (int q = 0; q < n_query; ++q) {
                for (int64_t e = 0; e < d; ++e) {
                    searched.columns[(i_rotation*d + e)*n_column + q] = searched.rotated[(i_rotation*n_query + q)*d + e];
                }
            }
        }
    }
}

// Compute the logits of the best clusters, and of the sets of all other clusters. The sets are the first items. Returns
// the number of sets. n: number of tokens in the sets that are replaced by their clusters
size_t search::multiply_clusters(const row_clusters & row, const float * queries, int64_t n, searched_row & searched) {
    runs.clear();
    n_item = 0;

    const auto rotation_of_block = [&](int64_t block) { return rotation_index(tokens.query_rotation(row[block].origin, rot)); };
    size_t n_sets = 0;
    for (const bool is_set : { true, false }) {
        n_sets = n_item;
        for (int64_t block = row.begin(); block < row.end();) {
            const bool is_grouped = row.is_grouped(block);
            if (is_set && is_grouped) {
                add_run(0, row.sets, row.first_set(block), n_set, rotation_of_block(block), true);
            } else if (!is_set && !is_grouped) {
                add_run(0, row.clusters, row.first_cluster(block), n_cluster, rotation_of_block(block), false);
            }
            block += is_grouped ? n_grouped : 1;
        }
    }
    rotate(queries, searched);

    byte_queries.resize(deltas.size()*n_query);
    variances   .resize(deltas.size()*n_query);
    for (size_t i = 0; i < byte_queries.size(); ++i) {
        const float * query = searched.rotated.data() + i*l.n_embd_k;
        byte_queries[i].set(query, l.n_embd_k);
        byte_queries[i].scale *= logits.scale;
        variances[i] = logits.scale*logits.scale*row.variance(query);
    }

    // Make room for n_pack clusters per set that expand_sets will replace. Each set counts as n_pack tokens or more,
    // and expand_sets stops at n tokens
    item_stride = n_item + std::min<size_t>(n/n_pack + 1, n_sets)*n_pack + n_pack;
    item_stride = (item_stride + n_pack - 1)/n_pack*n_pack;
    mean_logits  .resize(item_stride*n_query);
    spread_logits.resize(item_stride*n_query);
    size_logs    .resize(item_stride);
    inverse_sizes.resize(item_stride);
    scores       .resize(item_stride);
    sizes        .resize(item_stride);
    chosen       .assign(item_stride, 0);

    multiply_runs(0, 0);
    expand_sets(row, n_sets, n);
    return n_sets;
}

void search::find(int head, const float * queries, searched_row & searched, float * estimate, int64_t stride) {
    searched.exact.clear();
    searched.n_exact_token = 0;
    deltas.clear();

    add_unsealed(head, searched);

    if (n_exact == 0) {
        rotate(queries, searched);
        return;
    }

    const auto & row = tokens.clusters_of(i_layer, head);

    const size_t n_sets = multiply_clusters(row, queries, n_ranked_per_exact*n_exact, searched);

    std::vector<softmax_part> parts(n_query);
    for (int q = 0; q < n_query; ++q) {
        float * query_logits = mean_logits.data() + q*item_stride;
        parts[q] = exponentials(query_logits, n_item, 1.0f, query_logits);
    }
    set_scores(spread_logits);

    choose(scores.data() + n_sets, sizes.data() + n_sets, n_item - n_sets, n_exact, chosen.data() + n_sets);
    exact_items.clear();
    for (size_t i = n_sets; i < n_item; ++i) {
        if (chosen[i]) {
            exact_items.push_back(i);
        }
    }
    add_clusters(row, searched);
    estimate_others(parts, estimate, stride);
}

void search::rank(int head, const float * queries, const float * live, int64_t n, searched_row & searched, ranking & out) {
    deltas.clear();

    const auto & row = tokens.clusters_of(i_layer, head);

    const size_t n_sets = multiply_clusters(row, queries, n, searched);

    out.clusters.clear();
    for (const auto & run : runs) {
        for (int i = 0; i < run.n && !run.is_set; ++i) {
            out.clusters.push_back(run.first + i);
        }
    }
    const size_t n_ranked = out.clusters.size();
    out.missing.assign(n_ranked*n_query, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        float * differences = mean_logits.data() + q*item_stride; // first the logits of the mean keys

        const auto  part = exponential_differences(spread_logits.data() + q*item_stride, differences, n_item, differences);
        const float sum  = part.sum + std::exp(live[q] - part.max);
        if (part.sum > 0.0f && std::isfinite(sum)) {
            add(out.missing.data() + q*n_ranked, differences + n_sets, n_ranked, 1.0f/sum);
        }
    }
}

} // namespace kvtool
