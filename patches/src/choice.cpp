#include "choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// queries whose logits are held at the same time, at most
static constexpr int n_together = 16;

int64_t choice::turn_of(int64_t i, int64_t rot) const {
    const int64_t base = all.base_of(i);
    // from i - base to rot less the distance, which is rot + (base of the cache) - i, or n_near
    return i < all.far_end() ? rot - all.n_near - (i - base) : base - all.base();
}

choice::choice(const archive & all, size_t i, int64_t rot, choice_work & work, int ith, int nth)
    : all(all), l(all[i]), rope(all.turns_of(i)), work(work), ith(ith), nth(nth) {
    for (const auto & s : all.stretches(all.far_end(), all.n_near - rot)) {
        stretches.push_back({ s, {}, {} });
    }
    for (const auto & s : stretches) {
        for (int64_t i = s.of.begin; i < s.of.end; i += tiles.back().n) {
            tiles.push_back({ &s, i, (int) (std::min({ s.of.end, archived_layer::block_end(i), i + n_tile - i % n_side }) - i) });
        }
    }
}

void choice::make_room(int n_query) {
    const size_t n = std::min(n_query, n_together)*tiles.size();

    for (auto & parts : work.parts) {
        parts.resize(n);
    }
    work.powers.resize(n*n_tile);
    work.score .resize(l.n_head*all.size());
}

void choice::turn(const std::vector<float> & queries) {
    const int n_query = queries.size()/l.n_embd_k;

    for (auto & s : stretches) {
        s.queries = queries;
        s.small.resize(l.n_bit > 0 ? n_query : 0);
        for (int q = 0; q < n_query; ++q) {
            rope.turn_query(s.queries.data() + q*l.n_embd_k, s.of.delta);
            if (l.n_bit > 0) {
                s.small[q].set(s.queries.data() + q*l.n_embd_k, l.n_embd_k);
            }
        }
    }
}

float * choice::multiply(int head, const tile & t, int q, float * out) const {
    if (l.n_bit > 0) {
        const int skip = t.begin % n_side;
        kvtool::multiply(l.side(head, t.begin), (skip + t.n + n_side - 1)/n_side, t.from->small[q], l.n_embd_k, l.n_bit, out);
        return out + skip;
    }
    const float * query = t.from->queries.data() + q*l.n_embd_k;
    for (int j = 0; j < t.n; ++j) {
        out[j] = std::inner_product(query, query + l.n_embd_k, keys.data() + j*l.n_embd_k, 0.0f);
    }
    return out;
}

void choice::set_scores(int head, const std::vector<float> & queries, const std::vector<float> & live, float scale) {
    turn(queries);

    const int n_query = live.size();
    const int n_tiles = tiles.size();

    // this thread's
    const int begin = (int64_t) n_tiles*ith/nth;
    const int end   = (int64_t) n_tiles*(ith + 1)/nth;

    float * score = work.score.data() + head*all.size();

    // with groups of 16 at the end, and sides at both
    float out[n_tile + 2*n_side];

    for (int q0 = 0; q0 < n_query; q0 += n_together) {
        const int n = std::min(n_together, n_query - q0);

        auto * parts = work.parts[n_round++ % 2].data();

        const auto powers = [&](int q, int i) { return work.powers.data() + ((size_t) q*n_tiles + i)*n_tile; };

        for (int i = begin; i < end; ++i) {
            const auto & t = tiles[i];
            if (l.n_bit == 0) {
                keys.resize(n_tile*l.n_embd_k);
                l.keys(head, t.begin, t.n, keys.data());
                for (int64_t j = 0; j < t.n && t.begin < all.far_end(); ++j) {
                    rope.turn(keys.data() + j*l.n_embd_k, all.base_of(t.begin + j) - (t.begin + j));
                }
            }
            for (int q = 0; q < n; ++q) {
                float * x = multiply(head, t, q0 + q, out);
                parts[q*n_tiles + i] = exponentials(x, t.n, scale, powers(q, i));
            }
        }
        work.meet(nth);

        for (int i = begin; i < end && q0 == 0; ++i) {
            std::fill_n(score + (tiles[i].begin - all.begin()), tiles[i].n, 0.0f);
        }
        for (int q = 0; q < n; ++q) {
            const softmax_part * own = parts + q*n_tiles;

            float most = live[q0 + q];
            for (int i = 0; i < n_tiles; ++i) {
                most = std::max(most, own[i].most);
            }
            double sum = std::exp(live[q0 + q] - most);
            for (int i = 0; i < n_tiles; ++i) {
                sum += own[i].sum*std::exp(own[i].most - most);
            }
            if (!std::isfinite(sum)) {
                // keys or a query that are no numbers choose nothing
                continue;
            }
            for (int i = begin; i < end; ++i) {
                const int64_t at = tiles[i].begin - all.begin();
                add(score + at, powers(q, i), tiles[i].n, std::exp(own[i].most - most)/sum);
            }
        }
    }
}

const std::vector<int64_t> & choice::choose(int head, int k) {
    if (all.size() <= k) {
        chosen.resize(all.size());
        std::iota(chosen.begin(), chosen.end(), all.begin());
    } else {
        select(work.score.data() + head*all.size(), k);
    }
    return chosen;
}

void choice::select(const float * score, int k) {
    const int64_t n = all.size();

    // of some scores a bound that more than k of all will reach
    const int64_t step = std::max<int64_t>(1, n/512);
    some.clear();
    for (int64_t i = step/2; i < n; i += step) {
        some.push_back(score[i]);
    }
    const size_t at = std::min<size_t>(some.size() - 1, k/step*5/4 + 16);
    std::nth_element(some.begin(), some.begin() + at, some.end(), std::greater<float>());

    const auto reach = [&](float bound) {
        chosen.resize(n);
        int64_t m = 0;
        for (int64_t i = 0; i < n; ++i) {
            // without a branch, since few are reached
            chosen[m] = i;
            m += score[i] >= bound;
        }
        chosen.resize(m);
    };
    reach(some[at]);
    if ((int64_t) chosen.size() < k) {
        reach(0.0f);
    }

    // the k-th highest score, and how many of those that have it are left out: the older ones
    some.clear();
    for (const int64_t i : chosen) {
        some.push_back(score[i]);
    }
    std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<float>());
    const float least = some[k - 1];

    int64_t n_out = -k;
    for (const int64_t i : chosen) {
        n_out += score[i] >= least;
    }

    size_t m = 0;
    for (const int64_t i : chosen) {
        if (score[i] > least || (score[i] == least && n_out-- <= 0)) {
            chosen[m++] = i + all.begin();
        }
    }
    chosen.resize(k);
}

} // namespace kvtool
