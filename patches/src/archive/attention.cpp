// Attention of a step's queries to the archived tokens of one layer, on the host.
//
// hooks/recall.cpp adds one custom operation per layer to the graph. The operation (see recaller.cpp) runs after the
// layer's queries are computed and before attention over the cache. All threads of ggml's CPU backend run it together
// and meet at barriers. The operation's result is written to the last cells of the cache. Attention over the cache then
// includes the archive, with any kernel on any device.
//
// The code below computes two results for each query: the attention output over the archive (a value), and the
// logarithm of the softmax's denominator over the archive. The denominator says how much weight the value gets relative
// to the live cells. The steps are:
//
// 1. make_room: one thread allocates the buffers that all threads share.
//
// 2. find: for each row (KV head of the layer), one thread calls the search (search.cpp). The search chooses the tokens
//    that the row's queries attend to exactly. These are all tokens without clusters (the newest tokens), and about
//    n_exact tokens of the clusters with the highest attention per token. This attention is estimated from mean
//    keys, and from how much the keys of a cluster differ. The other clusters are represented by their mean keys and
//    mean values. Most attention is on few tokens, so n_exact tokens are enough even in a long archive.
//
// 3. attend: the tokens that a row attends to exactly are divided into n_span parts of equal size, and the parts of all
//    rows are distributed over the threads. read_part reads a part in batches of n_together tokens:
//    - `read` multiplies the keys of the batch with the queries. Stored keys still have the rotation (RoPE) that they
//      had in the cache, so the search has rotated the queries instead: once for each base. (The index of a rotation of
//      the queries is called a "way".) `read` also rotates keys if they are beyond n_near or if the base changes within
//      their block.
//      In a step of few queries (is_few), as when tokens are generated, keys are multiplied in their stored format if
//      possible, because this saves a converted copy. In a step of many queries (a chunk of a prompt), keys are
//      converted once and multiplied as a matrix.
//    - `add` computes the exponentials of the products and adds them to the sums of the part. This is the online
//      softmax: a part has the maximum logit, the sum of the exponentials relative to this maximum, and the sum of the
//      values weighted by the exponentials. When the maximum rises, the earlier sums are scaled down.
//    - add_values adds the values. It skips values whose exponential is at most `least`, because they would hardly
//      change the result.
//
// 4. result: after a barrier, the sums of a row's parts and the search's estimate are combined, relative to their
//    common maximum. synthetic-cells.cpp computes synthetic cells from these results.
//
// 5. weigh and most_attended, only if tokens are recalled or traced: set_sum receives the denominator over archive and
//    live cells. With this denominator, weigh computes the attention probability of each token that is attended to
//    exactly, and most_attended chooses the tokens with the most attention.
//
// The division into parts depends only on the numbers of rows and tokens, so that results do not depend on the number
// of threads.

#include "attention.h"

#include "convert.h"
#include "products.h"
#include "softmax.h"
#include "row-products.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// Approximate number of parts of a layer's work: enough for many threads, but so few that their sums take little memory
static constexpr int n_parts = 16;

// number of tokens in a batch
static constexpr int n_together = 64;

// number of token ranges to prefetch
static constexpr size_t n_ahead = 1;

attention::attention(
        const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work)
    : all(all), layer(i), l(all[i]), rope(all.rotations_of(i)), n_query(n_query), is_few(n_query <= n_few_columns), n_column(columns(n_query))
    , n_value(columns(l.n_embd_v)), n_span((n_parts + l.n_head - 1)/l.n_head), least(n_exact > 0 ? 1e-6f : 1e-9f), logits(logits)
    , work(work), looking(all, i, rot, n_query, logits, n_exact) {}

void attention::make_room() {
    work.rows .resize(l.n_head);
    work.parts.resize((size_t) l.n_head*(n_span + 1)*n_query*(2 + n_value));
    work.sums .resize(l.n_head*n_query);
    work.attn .resize(l.n_head);
}

void attention::clear(float * part) const {
    std::fill_n(part, 2 + n_value, 0.0f);
    part[0] = -INFINITY;
}

void attention::find(int head, const float * queries) {
    for (int q = 0; q < n_query; ++q) {
        clear(part_of(head, n_span, q));
    }
    looking.find(head, queries, work.rows[head], part_of(head, n_span, 0), 2 + n_value);
    work.attn[head].resize(work.rows[head].n_looked);
}

// The products of centered keys with the queries lack the products of the center: add them for n tokens. The keys of the
// range have the same base
void attention::add_center(int head, const token_range & range, int64_t begin, int n, const float * queries, float * to) {
    const int64_t   d     = l.n_embd_k;
    const int64_t   block = begin - begin % l.n_block;
    const int       size  = rope.n_rotated();
    const uint8_t * order = range.sealed ? range.sealed->order.data() + begin % l.n_block : nullptr;

    // A block's ranges can have different bases and ways. The products with the center are the same for all of them,
    // because a query and a key that is not far always have their true distance
    if (centered_block != block) {
        center.resize(d);
        query .resize(d);
        pairs .resize(n_query*size);

        // Far keys are multiplied at position 0, other keys at their position relative to their base
        const int64_t base = all.base_of(order ? block + order[0] : begin);
        to_float(GGML_TYPE_F16, l.center(block/l.n_block) + head*d, center.data(), d);
        rope.rotate(center.data(), range.is_far ? 0 : block - base);
        rope.undo_key(center.data());
        for (int q = 0; q < n_query; ++q) {
            std::copy_n(queries + q*d, d, query.data());
            rope.undo_query(query.data());
            unrotated[q] = rope.multiply_pairs(query.data(), center.data(), pairs.data() + q*size);
        }
        centered_block = block;
    }

    float products[n_few_columns*n_together];

    const float * rotations = rope.pair_rotations() + (order ? 0 : begin % l.n_block*size);
    multiply_rows(GGML_TYPE_F32, (const uint8_t *) rotations, range.is_far ? 0 : size*sizeof(float), n, size, pairs.data(), n_query, products, n_together, order);
    for (int q = 0; q < n_query; ++q) {
        for (int j = 0; j < n; ++j) {
            to[q*n_together + j] += products[q*n_together + j] + unrotated[q];
        }
    }
}

// Multiply the keys of n tokens with the queries. begin: place of the first token. at: its index in the batch
void attention::read(int head, const token_range & range, int64_t begin, int n, int at) {
    const int64_t d = l.n_embd_k;
    const auto & row = work.rows[head];

    // [query][token] for few queries, [token][query] for many
    float * to = powers.data() + (is_few ? at : at*n_column);

    const float * queries = row.rotated.data() + (size_t) range.way*n_query*d;
    const float * stored  = (l.n_map_k > 0 ? row.mapped : row.rotated).data() + (size_t) range.way*n_query*d;

    pieces.push_back({ begin, n, at });

    const int64_t block  = begin - begin % l.n_block;
    const auto    base   = [&](int i) { return all.base_of(block + i); };
    const bool    is_one = !range.sealed || base(range.sealed->first) == base(l.n_block - 1);
    const bool    rotates  = range.is_far || !is_one;

    if (is_few && !rotates) {
        if (looking.has_bytes()) {
            multiply_byte_rows(l.type_k, l.raw_key(head, begin), l.size, n, d, row.bytes, range.way*n_query, n_query, to, n_together);
        } else {
            multiply_rows(l.type_k, l.raw_key(head, begin), l.size, n, d, stored, n_query, to, n_together);
        }
        if (l.is_centered) {
            add_center(head, range, begin, n, queries, to);
        }
        return;
    }
    if (is_few && is_one && range.sealed && rope.is_plain() && can_rotate(l.type_k, d)) {
        // The key at position i must be rotated by base - i positions. With the block's last position `last`, this is
        // (base - last) + (last - i). The first term is the same for all keys, so the queries are rotated instead, by
        // last - base. multiply_rotated_rows rotates each key by the second term, which is less than a block
        if (rotated_block != block || rotated_way != range.way) {
            rotated.assign(queries, queries + n_query*d);
            for (int q = 0; q < n_query; ++q) {
                rope.rotate_query(rotated.data() + q*d, block + l.n_block - 1 - base(l.n_block - 1));
            }
            rotated_block = block;
            rotated_way   = range.way;
        }
        multiply_rotated_rows(l.type_k, l.n_map_k, l.raw_key(head, begin), l.size, n, d, rotated.data(), n_query,
                rope.small_rotations() + (l.n_block - 1)*2*d, rope.are_halves(), range.sealed->order.data() + begin % l.n_block, to, n_together);
        if (l.is_centered) {
            add_center(head, range, begin, n, queries, to);
        }
        return;
    }

    float * some = keys.data() + at*d;
    all.keys(layer, head, begin, n, range.sealed ? range.sealed->order.data() : nullptr, some);
    for (int j = 0; j < n && rotates; ++j) {
        rope.rotate(some + j*d, looking.rotation_of(range, begin + j));
    }
    if (is_few) {
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) some, d*sizeof(float), n, d, queries, n_query, to, n_together);
        return;
    }
    std::fill_n(to, n*n_column, 0.0f);
    multiply_add(to, n_column, some, d, 1, row.columns.data() + (size_t) range.way*d*n_column, n_column, n, d, n_column);
}

void attention::add_values(int head, float * to) {
    if (n_value == 0) {
        // values are a part of the keys
        return;
    }
    for (const auto & p : pieces) {
        if (is_few) {
            add_rows(l.type_v, l.raw_value(head, p.begin), l.size, p.n, l.n_embd_v, powers.data() + p.at, n_together, n_query, to, 2 + n_value);
            continue;
        }
        float * own = powers.data() + p.at*n_column;
        int m = 0;
        for (int j = 0; j < p.n; ++j) {
            const float * one = own + j*n_column;
            if (*std::max_element(one, one + n_query) > least) {
                to_float(l.type_v, l.raw_value(head, p.begin + j), values.data() + m*n_value, l.n_embd_v);
                std::copy_n(one, n_column, own + m++*n_column);
            }
        }
        multiply_add(to, 2 + n_value, own, 1, n_column, values.data(), n_value, n_query, m, n_value);
    }
}

// If there is a soft cap, replace n products by scaled and capped logits. Returns the scale that the softmax still has
// to apply, which is 1 after a soft cap.
static float softened(float * x, int n, const logit_params & logits) {
    if (!(logits.cap > 0.0f)) {
        return logits.scale;
    }
    for (int j = 0; j < n; ++j) {
        x[j] = logits.cap*std::tanh(x[j]*logits.scale/logits.cap);
    }
    return 1.0f;
}

// `add` for steps with few queries, whose products are stored query by query
void attention::add_few(int head, int span, int n) {
    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(head, span, q);
        float * x   = powers.data() + q*n_together;

        const float scale = softened(x, n, logits);
        const auto  part  = exponentials(x, n, scale, x);
        if (!(part.most > -INFINITY)) {
            std::fill_n(x, n, 0.0f);
            continue;
        }
        const float most = std::max(own[0], part.most);
        const float old  = std::exp(own[0] - most);
        const float now  = std::exp(part.most - most);

        own[0] = most;
        own[1] = own[1]*old + part.sum*now;
        for (int e = 0; e < n_value && old != 1.0f; ++e) {
            own[2 + e] *= old;
        }
        keep_above(x, n, least/std::max(now, 1e-30f));
        for (int j = 0; j < n && now != 1.0f; ++j) {
            x[j] *= now;
        }
    }
    add_values(head, part_of(head, span, 0) + 2);
}

// add a batch of n tokens to the sums of a part
void attention::add(int head, int span, int n) {
    if (is_few) {
        return add_few(head, span, n);
    }
    const float scale = softened(powers.data(), n*n_column, logits);

    most  .resize(n_column);
    factor.resize(n_column);
    sum   .resize(n_column);
    for (int q = 0; q < n_column; ++q) {
        most[q] = q < n_query ? part_of(head, span, q)[0] : 0.0f;
    }
    exponential_columns(powers.data(), n, n_column, scale, most.data(), factor.data(), sum.data());

    for (int q = 0; q < n_query; ++q) {
        float * own = part_of(head, span, q);
        own[0] = most[q];
        own[1] = own[1]*factor[q] + sum[q];
        for (int e = 0; e < n_value && factor[q] != 1.0f; ++e) {
            own[2 + e] *= factor[q];
        }
    }
    add_values(head, part_of(head, span, 0) + 2);
}

template <typename F>
void attention::read_part(int head, int span, F && done) {
    rotated_block   = -1;
    centered_block = -1;

    keys  .resize(n_together*l.n_embd_k);
    values.resize(n_together*n_value, 0.0f);
    // [token][n_column] for many queries. This is enough for [query][n_together], because n_query <= n_column
    powers.resize(n_together*n_column);

    const auto & row = work.rows[head];

    const int64_t begin = row.n_looked*span/n_span;
    const int64_t end   = row.n_looked*(span + 1)/n_span;

    // prefetch a range, because clusters are far apart in memory
    const auto ask = [&](size_t r) {
        if (r < row.looked.size()) {
            prefetch(l.raw_key(head, row.looked[r].begin), row.looked[r].n*l.size);
        }
    };

    int     n  = 0;
    int64_t at = 0;
    bool    is_first = true;
    for (size_t r = 0; r < row.looked.size() && at < end; ++r) {
        const auto & range = row.looked[r];

        const int64_t stop = std::min(end, at + range.n);
        if (at + range.n > begin) {
            for (size_t i = is_first ? 0 : n_ahead; i <= n_ahead; ++i) {
                ask(r + i);
            }
            is_first = false;
        }
        for (int64_t i = std::max(begin, at); i < stop;) {
            const int m = std::min<int64_t>(n_together - n, stop - i);
            read(head, range, range.begin + i - at, m, n);
            n += m;
            i += m;
            if (n == n_together) {
                done(n);
                pieces.clear();
                n = 0;
            }
        }
        at += range.n;
    }
    if (n > 0) {
        done(n);
        pieces.clear();
    }
}

void attention::attend(int part) {
    const int head = part/n_span;
    const int span = part % n_span;

    for (int q = 0; q < n_query; ++q) {
        clear(part_of(head, span, q));
    }
    read_part(head, span, [&](int n) { add(head, span, n); });
}

double attention::result(int head, int query, float * value) const {
    const auto part = [&](int i) { return part_of(head, i, query); };

    float most = -INFINITY;
    for (int i = 0; i <= n_span; ++i) {
        most = std::max(most, part(i)[0]);
    }
    double sum = 0.0;
    std::fill_n(value, l.n_embd_v, 0.0f);
    for (int i = 0; i <= n_span; ++i) {
        if (part(i)[0] > -INFINITY) {
            const float w = std::exp(part(i)[0] - most);
            sum += (double) w*part(i)[1];
            kvtool::add(value, part(i) + 2, l.n_embd_v, w);
        }
    }
    // If n_map_v > 0, stored values and mean values are multiplied by a Hadamard matrix, and so is their sum. The
    // matrix is its own inverse, so a second multiplication removes it
    hadamard(value, l.n_embd_v, l.n_map_v);
    bool is_number = std::isfinite(most) && std::isfinite(sum) && sum > 0.0;
    for (int64_t e = 0; e < l.n_embd_v; ++e) {
        value[e]  /= sum;
        is_number &= std::isfinite(value[e]);
    }
    if (!is_number) {
        std::fill_n(value, l.n_embd_v, 0.0f);
        return -INFINITY;
    }
    return most + std::log(sum);
}

void attention::weigh(int part) {
    const int head = part/n_span;
    const int span = part % n_span;

    float * to = work.attn[head].data() + work.rows[head].n_looked*span/n_span;

    read_part(head, span, [&](int n) {
        const float scale = is_few ? 0.0f : softened(powers.data(), n*n_column, logits);

        std::fill_n(to, n, 0.0f);
        for (int q = 0; q < n_query; ++q) {
            const double sum = work.sums[head*n_query + q];
            if (!std::isfinite(sum)) {
                continue;
            }
            float * own = powers.data() + (is_few ? q*n_together : q);

            const int   step = is_few ? 1 : n_column;
            const float by   = is_few ? softened(own, n, logits) : scale;
            for (int j = 0; j < n; ++j) {
                to[j] += std::exp(by*own[j*step] - (float) sum);
            }
        }
        for (int j = 0; j < n; ++j) {
            // replace NaN, which comes from keys that are not finite, by 0
            to[j] = to[j] > 0.0f ? to[j] : 0.0f;
        }
        to += n;
    });
}

std::vector<attended_token> attention::most_attended(int head, int k) const {
    const auto & row = work.rows[head];
    const auto & own = work.attn[head];

    std::vector<attended_token> res;
    res.reserve(row.n_looked);
    for (const auto & range : row.looked) {
        for (int64_t place = range.begin; place < range.begin + range.n; ++place) {
            const int64_t pos = looking.pos_of(range, place);
            res.push_back({ pos, place, looking.rotation_back(range, pos), own[res.size()] });
        }
    }

    const auto is_before = [](const attended_token & a, const attended_token & b) {
        return a.attn != b.attn ? a.attn > b.attn : a.pos > b.pos;
    };
    const auto end = res.begin() + std::min<size_t>(k, res.size());
    std::nth_element(res.begin(), end - (end != res.begin()), res.end(), is_before);
    res.erase(end, res.end());
    std::sort(res.begin(), res.end(), [](const attended_token & a, const attended_token & b) { return a.pos < b.pos; });

    return res;
}

} // namespace kvtool
