#include "search.h"

#include "convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kvtool {

// what a cluster's part of a sum has to be for its value to count
static constexpr float least_part = 1e-6f;

search::search(
        const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, int n_part,
        search_work & work)
    : all(all), i_layer(i), l(all[i]), rope(all.turns_of(i)), n_query(n_query), logits(logits), n_exact(n_exact), n_part(n_part)
    , work(work), stretches(all.stretches(rot)), places(l.n_head) {
    for (int head = 0; head < l.n_head && n_exact > 0; ++head) {
        const auto & own = clusters_of(head);
        for (const auto & s : stretches) {
            const bool    is_far = s.begin < all.far_end();
            const int64_t begin  = std::max(own.begin(), (s.begin + l.n_block - 1)/l.n_block);
            const int64_t end    = std::min(own.end(), s.end/l.n_block);
            for (int64_t block = begin; block < end; ++block) {
                if (own.is_far(block) == is_far) {
                    places[head].push_back({ block, s.delta });
                }
            }
        }
    }
}

void search::make_room() {
    work.rows.resize(l.n_head);
    for (int head = 0; head < l.n_head; ++head) {
        auto & row = work.rows[head];
        const size_t n = places[head].size()*n_cluster;
        row.seen  .assign(n, 0);
        row.powers.resize(n*n_query);
        row.parts .resize((size_t) n_query*n_part);
        row.score .resize(n);
    }
}

void search::rank(int head, int part, const std::vector<float> & queries) {
    auto & row = work.rows[head];

    const auto & own  = clusters_of(head);
    const auto & some = places[head];

    const size_t n     = row.seen.size();
    const size_t begin = begin_of(head, part)/n_cluster;
    const size_t end   = begin_of(head, part + 1)/n_cluster;

    std::vector<float> turned(l.n_embd_k);
    small_query        small;

    for (int q = 0; q < n_query; ++q) {
        float * x = row.powers.data() + q*n;

        for (size_t i = begin, j; i < end; i = j) {
            for (j = i + 1; j < end && some[j].delta == some[i].delta && some[j].block == some[i].block + (int64_t) (j - i);) {
                ++j;
            }
            if (i == begin || some[i].delta != some[i - 1].delta) {
                std::copy_n(queries.data() + q*l.n_embd_k, l.n_embd_k, turned.data());
                rope.turn_query(turned.data(), some[i].delta);
                small.set(turned.data(), l.n_embd_k);
            }
            multiply(own.sides(some[i].block), j - i, small, l.n_embd_k, 8, x + i*n_cluster);

            const float * size = own.sizes(some[i].block);
            for (size_t c = 0; c < (j - i)*n_cluster; ++c) {
                float & to = x[i*n_cluster + c];
                to *= logits.scale;
                if (logits.cap > 0.0f) {
                    to = logits.cap*std::tanh(to/logits.cap);
                }
                to += size[c];
            }
        }
        float * mine = x + begin*n_cluster;
        row.parts[q*n_part + part] = begin < end ? exponentials(mine, (end - begin)*n_cluster, 1.0f, mine) : softmax_part { -INFINITY, 0.0f };
    }
}

token_range search::range_of(int head, size_t nth) const {
    const auto & own = clusters_of(head);
    const auto & p   = places[head][nth/n_cluster];

    const uint16_t * start = own.start(p.block) + nth % n_cluster;
    return { p.block*l.n_block, start[1] - start[0], p.delta, own.order(p.block) + start[0] };
}

void search::choose(int head) {
    auto & row = work.rows[head];

    const auto & some = places[head];
    const size_t n    = row.seen.size();

    row.looked.clear();
    row.n_looked = 0;
    const auto look = [&](const token_range & range) {
        row.looked.push_back(range);
        row.n_looked += range.n;
    };

    // the tokens that are in no cluster of use
    size_t nth = 0;
    for (const auto & s : stretches) {
        for (int64_t i = s.begin, end; i < s.end; i = end) {
            end = std::min(s.end, archived_layer::block_end(i));
            if (nth < some.size() && some[nth].block == i/l.n_block) {
                ++nth;
            } else {
                look({ i, (int) (end - i), s.delta, nullptr });
            }
        }
    }
    if (n == 0) {
        return;
    }

    std::fill(row.score.begin(), row.score.end(), 0.0f);
    for (int q = 0; q < n_query; ++q) {
        const auto * parts = row.parts.data() + q*n_part;

        float most = -INFINITY;
        for (int i = 0; i < n_part; ++i) {
            most = std::max(most, parts[i].most);
        }
        double sum = 0.0;
        for (int i = 0; i < n_part && most > -INFINITY; ++i) {
            sum += parts[i].sum*std::exp(parts[i].most - most);
        }
        for (int i = 0; i < n_part && std::isfinite(sum) && sum > 0.0; ++i) {
            const size_t begin = begin_of(head, i);
            add(row.score.data() + begin, row.powers.data() + q*n + begin, begin_of(head, i + 1) - begin, std::exp(parts[i].most - most)/sum);
        }
    }

    // more than are needed unless they are small, so that few are sorted
    std::vector<int> best(n);
    std::iota(best.begin(), best.end(), 0);
    const auto before = [&](int a, int b) { return row.score[a] > row.score[b] || (row.score[a] == row.score[b] && a > b); };
    const size_t n_sorted = std::min<size_t>(n, 2*n_exact*n_cluster/l.n_block + n_cluster);
    if (n_sorted < n) {
        std::nth_element(best.begin(), best.begin() + n_sorted, best.end(), before);
    }
    std::sort(best.begin(), best.begin() + n_sorted, before);

    int64_t n_left = n_exact;
    for (size_t i = 0; i < n_sorted && n_left > 0; ++i) {
        const auto range = range_of(head, best[i]);
        row.seen[best[i]] = 1;
        if (range.n > 0) {
            look(range);
            n_left -= range.n;
        }
    }
    // those that are rotated alike together
    std::stable_sort(row.looked.begin(), row.looked.end(), [](const token_range & a, const token_range & b) { return a.delta < b.delta; });
}

void search::estimate(int head, int part, int query, float & most, float & sum, float * value) const {
    const auto & row = work.rows[head];

    const auto & own = clusters_of(head);
    const size_t n   = row.seen.size();

    const auto & p = row.parts[query*n_part + part];
    if (!(p.sum > 0.0f) || !std::isfinite(p.most)) {
        return;
    }
    const float higher = std::max(most, p.most);
    const float old    = std::exp(most - higher);
    const float now    = std::exp(p.most - higher);

    for (int64_t e = 0; e < l.n_embd_v; ++e) {
        value[e] *= old;
    }
    sum *= old;

    const float * x = row.powers.data() + query*n;

    std::vector<float> mean(l.n_embd_v);
    const float least = least_part*(sum + p.sum*now);
    for (size_t c = begin_of(head, part); c < begin_of(head, part + 1); ++c) {
        const float w = row.seen[c] ? 0.0f : x[c]*now;
        sum += w;
        if (w > least) {
            const auto & place = places[head][c/n_cluster];
            to_float(GGML_TYPE_F16, own.value(place.block, c % n_cluster), mean.data(), l.n_embd_v);
            add(value, mean.data(), l.n_embd_v, w);
        }
    }
    most = higher;
}

} // namespace kvtool
