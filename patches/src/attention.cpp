#include "attention.h"

#include "convert.h"
#include "products.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// queries whose logits are held at the same time, at most
static constexpr int n_together = 32;

// parts that a layer's work is cut into, about: enough for many threads, and few enough that their sums take little memory
static constexpr int n_parts = 32;

attention::attention(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, attention_work & work)
    : all(all), l(all[i]), rope(all.turns_of(i)), n_query(n_query), n_value(kvtool::columns(l.n_embd_v)), logits(logits), work(work) {
    for (const auto & s : all.stretches(rot)) {
        for (int64_t i = s.begin; i < s.end; i += tiles.back().n) {
            tiles.push_back({ s, i, (int) (std::min(s.end, archived_layer::block_end(i)) - i) });
        }
    }
    n_span = std::clamp((n_parts + l.n_head - 1)/l.n_head, 1, std::max<int>(tiles.size(), 1));
}

void attention::make_room() {
    work.parts.resize((size_t) n_part()*n_query*(2 + n_value));
}

void attention::read(int head, const tile & t) {
    const int64_t d = l.n_embd_k;

    keys.resize(n_tile*d);
    l.keys(head, t.begin, t.n, keys.data());
    for (int64_t j = 0; j < t.n && t.begin < all.far_end(); ++j) {
        rope.turn(keys.data() + j*d, all.base_of(t.begin + j) - (t.begin + j));
    }
    columns.resize(d*n_tile);
    for (int64_t e = 0; e < d; ++e) {
        for (int j = 0; j < t.n; ++j) {
            columns[e*n_tile + j] = keys[j*d + e];
        }
    }

    values.assign(n_tile*n_value, 0.0f);
    if (n_value == l.n_embd_v) {
        to_float(l.type_v, l.raw_value(head, t.begin), values.data(), t.n*l.n_embd_v);
    }
    for (int j = 0; j < t.n && n_value != l.n_embd_v; ++j) {
        to_float(l.type_v, l.raw_value(head, t.begin + j), values.data() + j*n_value, l.n_embd_v);
    }
}

void attention::attend(int part, const std::vector<float> & queries) {
    const int64_t d = l.n_embd_k;

    const int head  = head_of(part);
    const int nth   = part % n_span;
    const int begin = (int64_t) tiles.size()*nth/n_span;
    const int end   = (int64_t) tiles.size()*(nth + 1)/n_span;

    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(part, q);
        std::fill_n(own, 2 + n_value, 0.0f);
        own[0] = -INFINITY;
    }

    powers.resize(n_together*n_tile);
    for (int i = begin; i < end; ++i) {
        const auto & t = tiles[i];
        if (i == begin || t.from.delta != tiles[i - 1].from.delta) {
            turned = queries;
            for (int q = 0; q < n_query; ++q) {
                rope.turn_query(turned.data() + q*d, t.from.delta);
            }
        }
        read(head, t);

        for (int q0 = 0; q0 < n_query; q0 += n_together) {
            const int m = std::min(n_together, n_query - q0);

            std::fill_n(powers.data(), m*n_tile, 0.0f);
            multiply_add(powers.data(), n_tile, turned.data() + q0*d, d, columns.data(), n_tile, m, d, kvtool::columns(t.n));

            for (int q = 0; q < m; ++q) {
                float * x   = powers.data() + q*n_tile;
                float * own = part_of(part, q0 + q);

                float scale = logits.scale;
                for (int j = 0; j < t.n && logits.cap > 0.0f; ++j) {
                    x[j]  = logits.cap*std::tanh(scale*x[j]/logits.cap);
                }
                if (logits.cap > 0.0f) {
                    scale = 1.0f;
                }

                const auto p = exponentials(x, t.n, scale, x);
                if (!(p.most > -INFINITY)) {
                    // none of the keys is a number
                    std::fill_n(x, t.n, 0.0f);
                    continue;
                }
                const float most = std::max(own[0], p.most);
                const float old  = std::exp(own[0] - most);
                const float now  = std::exp(p.most - most);

                own[0] = most;
                own[1] = own[1]*old + p.sum*now;
                for (int e = 0; e < n_value; ++e) {
                    own[2 + e] *= old;
                }
                for (int j = 0; j < t.n; ++j) {
                    x[j] *= now;
                }
            }
            multiply_add(part_of(part, q0) + 2, 2 + n_value, powers.data(), n_tile, values.data(), n_value, m, t.n, n_value);
        }
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
