#include "attention.h"

#include "convert.h"
#include "products.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// parts that a layer's work is cut into, about: enough for many threads, and few enough that their sums take little memory
static constexpr int n_parts = 16;

// tokens that are attended to at once
static constexpr int n_together = 64;

attention::attention(
        const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work)
    : all(all), l(all[i]), rope(all.turns_of(i)), n_query(n_query), n_column(columns(n_query)), n_value(columns(l.n_embd_v))
    , n_span((n_parts + l.n_head - 1)/l.n_head), least(n_exact > 0 ? 1e-5f : 1e-9f), logits(logits), work(work)
    , looking(all, i, rot, n_query, logits, n_exact, n_span, work.search) {}

void attention::make_room() {
    work.parts.resize((size_t) n_part()*n_query*(2 + n_value));
    looking.make_room();
}

void attention::turn(const std::vector<float> & queries, int64_t delta) {
    const int64_t d = l.n_embd_k;

    std::vector<float> one(d);
    turned.assign(d*n_column, 0.0f);
    for (int q = 0; q < n_query; ++q) {
        std::copy_n(queries.data() + q*d, d, one.data());
        rope.turn_query(one.data(), delta);
        for (int64_t e = 0; e < d; ++e) {
            turned[e*n_column + q] = one[e];
        }
    }
}

void attention::read(int head, const token_range & range, int first, int n, int at) {
    const int64_t d = l.n_embd_k;

    // a cluster's tokens lie apart: their memory is asked for at once
    for (int j = 0; j < n && range.order; ++j) {
        l.prefetch(head, range.at(first + j));
    }
    if (!range.order) {
        l.keys(head, range.begin + first, n, keys.data() + at*d);
    }
    for (int j = 0; j < n; ++j) {
        const int64_t i = range.at(first + j);

        float * key = keys.data() + (at + j)*d;
        if (range.order) {
            l.keys(head, i, 1, key);
        }
        if (i < all.far_end()) {
            rope.turn(key, all.base_of(i) - i);
        }
        tokens[at + j] = i;
    }
}

int attention::read_values(int head, int n) {
    int m = 0;
    for (int j = 0; j < n; ++j) {
        const float * own = powers.data() + j*n_column;
        if (*std::max_element(own, own + n_query) > least) {
            l.values(head, tokens[j], 1, values.data() + m*n_value);
            std::copy_n(own, n_column, powers.data() + m++*n_column);
        }
    }
    return m;
}

// of the first n tokens that are read
void attention::add(int part, int n) {
    const int64_t d = l.n_embd_k;

    std::fill_n(powers.data(), n*n_column, 0.0f);
    multiply_add(powers.data(), n_column, keys.data(), d, 1, turned.data(), n_column, n, d, n_column);

    if (logits.cap > 0.0f) {
        for (int j = 0; j < n*n_column; ++j) {
            powers[j] = logits.cap*std::tanh(powers[j]*logits.scale/logits.cap);
        }
    }
    most  .resize(n_column);
    factor.resize(n_column);
    sum   .resize(n_column);
    for (int q = 0; q < n_column; ++q) {
        most[q] = q < n_query ? part_of(part, q)[0] : 0.0f;
    }
    exponential_columns(powers.data(), n, n_column, logits.cap > 0.0f ? 1.0f : logits.scale, most.data(), factor.data(), sum.data());

    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(part, q);
        own[0] = most[q];
        own[1] = own[1]*factor[q] + sum[q];
        for (int e = 0; e < n_value && factor[q] != 1.0f; ++e) {
            own[2 + e] *= factor[q];
        }
    }
    const int m = read_values(head_of(part), n);
    multiply_add(part_of(part, 0) + 2, 2 + n_value, powers.data(), 1, n_column, values.data(), n_value, n_query, m, n_value);
}

void attention::attend(int part, const std::vector<float> & queries) {
    const int head = head_of(part);
    const int nth  = part % n_span;

    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(part, q);
        std::fill_n(own, 2 + n_value, 0.0f);
        own[0] = -INFINITY;
    }

    tokens.resize(n_together);
    keys  .resize(n_together*l.n_embd_k);
    values.assign(n_together*n_value, 0.0f);
    powers.resize(n_together*n_column);

    const auto & row = work.search.rows[head];

    const int64_t begin = row.n_looked*nth/n_span;
    const int64_t end   = row.n_looked*(nth + 1)/n_span;

    int     n     = 0;
    int64_t delta = 0;
    bool    any   = false;

    const auto flush = [&]() {
        if (n > 0) {
            add(part, n);
            n = 0;
        }
    };

    int64_t at = 0;
    for (const auto & range : row.looked) {
        for (int64_t i = std::max(begin, at); i < std::min(end, at + range.n);) {
            if (!any || range.delta != delta) {
                flush();
                turn(queries, range.delta);
                delta = range.delta;
                any   = true;
            }
            const int m = std::min<int64_t>(n_together - n, std::min(end, at + range.n) - i);
            read(head, range, i - at, m, n);
            n += m;
            i += m;
            if (n == n_together) {
                flush();
            }
        }
        at += range.n;
    }
    flush();

    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(part, q);
        looking.estimate(head, nth, q, own[0], own[1], own + 2);
    }
}

double attention::result(int head, int query, float * value) const {
    const auto part = [&](int i) { return part_of(head*n_span + i, query); };

    float most = -INFINITY;
    for (int i = 0; i < n_span; ++i) {
        most = std::max(most, part(i)[0]);
    }
    double sum = 0.0;
    std::vector<double> v(l.n_embd_v, 0.0);
    for (int i = 0; i < n_span; ++i) {
        if (!(part(i)[0] > -INFINITY)) {
            continue;
        }
        const double w = std::exp((double) part(i)[0] - most);
        sum += w*part(i)[1];
        for (int64_t e = 0; e < l.n_embd_v; ++e) {
            v[e] += w*part(i)[2 + e];
        }
    }
    bool is_number = std::isfinite(most) && std::isfinite(sum) && sum > 0.0;
    for (int64_t e = 0; e < l.n_embd_v; ++e) {
        value[e]   = v[e]/sum;
        is_number &= std::isfinite(value[e]);
    }
    if (!is_number) {
        std::fill_n(value, l.n_embd_v, 0.0f);
        return -INFINITY;
    }
    return most + std::log(sum);
}

} // namespace kvtool
