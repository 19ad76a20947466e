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
// 1. allocate: one thread allocates the buffers that all threads share.
//
// 2. find: for each row (KV head of the layer), one thread calls the search (search.cpp). The search chooses the tokens
//    that the row's queries attend to exactly. These are all tokens without clusters (the newest tokens), and about
//    n_exact tokens of the clusters with the highest attention per token. This attention is estimated from mean
//    keys, and from how much the keys of a cluster differ. The other clusters are represented by their mean keys and
//    mean values. Most attention is on few tokens, so n_exact tokens are enough even in a long archive.
//
// 3. attend: the tokens that a row attends to exactly are divided into n_split parts of equal size, and the parts of all
//    rows are distributed over the threads. read_part reads a part in batches of n_batch tokens:
//    - `read` multiplies the keys of the batch with the queries. Stored keys still have the rotation (RoPE) that they
//      had in the cache, so the search has rotated the queries instead: once for each base. i_rotation is the index of
//      such a rotation. `read` also rotates keys if they are beyond n_near or if the base changes within their block.
//      In a step of few queries (is_few), as when tokens are generated, keys are multiplied in their stored format if
//      possible, because this saves a converted copy. In a step of many queries (a chunk of a prompt), keys are
//      converted once and multiplied as a matrix.
//    - `add` computes the exponentials of the products and adds them to the sums of the part. This is the online
//      softmax: a part has the maximum logit, the sum of the exponentials relative to this maximum, and the sum of the
//      values weighted by the exponentials. When the maximum rises, the earlier sums are scaled down.
//    - add_values adds the values. It skips values whose exponential is at most min_exp, because they would hardly
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
static constexpr int n_batch = 64;
static_assert(n_batch % 16 == 0, "the functions of softmax.h round up to 16 numbers");
static_assert(rotations::n_small >= store::n_block, "multiply_rotated_rows rotates by less than a block");

// number of token ranges to prefetch
static constexpr size_t n_ahead = 1;

attention::attention(
        const archive & tokens, size_t i_layer, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work)
    : tokens(tokens), i_layer(i_layer), l(tokens[i_layer]), rope(tokens.rotations_of(i_layer)), n_query(n_query)
    , is_few(n_query <= n_few_columns), n_column(columns(n_query)), n_value(columns(l.n_embd_v)), n_split((n_parts + l.n_head - 1)/l.n_head)
    , min_exp(n_exact > 0 ? 1e-6f : 1e-9f), logits(logits), work(work), searcher(tokens, i_layer, rot, n_query, logits, n_exact) {}

void attention::allocate() {
    work.searched.resize(l.n_head);
    work.parts.resize((size_t) l.n_head*(n_split + 1)*n_query*(2 + n_value));
    work.sums.resize(l.n_head*n_query);
    work.attn.resize(l.n_head);
}

void attention::clear(float * part) const {
    std::fill_n(part, 2 + n_value, 0.0f);
    part[0] = -INFINITY;
}

void attention::find(int head, const float * queries) {
    for (int q = 0; q < n_query; ++q) {
        clear(part_of(head, n_split, q));
    }
    searcher.find(head, queries, work.searched[head], part_of(head, n_split, 0), 2 + n_value);
    work.attn[head].resize(work.searched[head].n_exact_token);
}

// The products of centered keys with the queries lack the products of the center: add them for n tokens. The keys of
// the range have the same base
void attention::add_center(int head, const token_range & range, int64_t begin, int n, const float * queries, float * out) {
    const int64_t   d     = l.n_embd_k;
    const int64_t   block = begin - begin % l.n_block;
    const int       size  = rope.n_rotated();
    const uint8_t * order = range.sealed ? range.sealed->order.data() + begin % l.n_block : nullptr;

    // A block's ranges can have different bases and query rotations. The products with the center are the same for all
    // of them, because a query and a key that is not far always have their true distance
    if (centered_block != block) {
        center.resize(d);
        query .resize(d);
        pairs .resize(n_query*size);

        // Far keys are multiplied at position 0, other keys at their position relative to their base
        const int64_t base = tokens.base_of(order ? block + order[0] : begin);
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

    float products[n_few_columns*n_batch];

    const float * rotations = rope.pair_rotations() + (order ? 0 : begin % l.n_block*size);
    // all far keys are at position 0: with a stride of 0, each of them reads the same rotation
    multiply_rows(GGML_TYPE_F32, (const uint8_t *) rotations, range.is_far ? 0 : size*sizeof(float), n, size, pairs.data(), n_query, products, n_batch, order);
    for (int q = 0; q < n_query; ++q) {
        for (int j = 0; j < n; ++j) {
            out[q*n_batch + j] += products[q*n_batch + j] + unrotated[q];
        }
    }
}

// Multiply the keys of n tokens with the queries. begin: slot of the first token. i_batch: its index in the batch
void attention::read(int head, const token_range & range, int64_t begin, int n, int i_batch) {
    const int64_t d = l.n_embd_k;
    const auto & searched = work.searched[head];

    // [query][token] for few queries, [token][query] for many
    float * out = kq.data() + (is_few ? i_batch : i_batch*n_column);

    const float * queries = searched.rotated.data() + (size_t) range.i_rotation*n_query*d;
    const float * mapped  = (l.n_map_k > 0 ? searched.mapped : searched.rotated).data() + (size_t) range.i_rotation*n_query*d;

    pieces.push_back({ begin, n, i_batch });

    const int64_t block        = begin - begin % l.n_block;
    const auto    base         = [&](int i) { return tokens.base_of(block + i); };
    const bool    has_one_base = !range.sealed || base(range.sealed->first) == base(l.n_block - 1);
    const bool    rotates      = range.is_far || !has_one_base;

    if (is_few && !rotates) {
        if (searcher.has_bytes()) {
            multiply_byte_rows(l.type_k, l.raw_key(head, begin), l.size, n, d, searched.bytes, range.i_rotation*n_query, n_query, out, n_batch);
        } else {
            multiply_rows(l.type_k, l.raw_key(head, begin), l.size, n, d, mapped, n_query, out, n_batch);
        }
        if (l.is_centered) {
            add_center(head, range, begin, n, queries, out);
        }
        return;
    }
    if (is_few && has_one_base && range.sealed && rope.rotates_everything() && can_rotate(l.type_k, d)) {
        // The key at position i must be rotated by base - i positions. With the block's last position `last`, this is
        // (base - last) + (last - i). The first term is the same for all keys, so the queries are rotated instead, by
        // last - base. multiply_rotated_rows rotates each key by the second term, which is less than a block
        if (rotated_block != block || rotated_index != range.i_rotation) {
            rotated.assign(queries, queries + n_query*d);
            for (int q = 0; q < n_query; ++q) {
                rope.rotate_query(rotated.data() + q*d, block + l.n_block - 1 - base(l.n_block - 1));
            }
            rotated_block = block;
            rotated_index = range.i_rotation;
        }
        multiply_rotated_rows(l.type_k, l.n_map_k, l.raw_key(head, begin), l.size, n, d, rotated.data(), n_query,
                rope.small_rotations() + (l.n_block - 1)*2*d, rope.are_halves(), range.sealed->order.data() + begin % l.n_block, out, n_batch);
        if (l.is_centered) {
            add_center(head, range, begin, n, queries, out);
        }
        return;
    }

    float * batch_keys = keys.data() + i_batch*d;
    tokens.keys(i_layer, head, begin, n, range.sealed ? range.sealed->order.data() : nullptr, batch_keys);
    for (int j = 0; j < n && rotates; ++j) {
        rope.rotate(batch_keys + j*d, searcher.rotation_of(range, begin + j));
    }
    if (is_few) {
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) batch_keys, d*sizeof(float), n, d, queries, n_query, out, n_batch);
        return;
    }
    std::fill_n(out, n*n_column, 0.0f);
    multiply_add(out, n_column, batch_keys, d, 1, searched.columns.data() + (size_t) range.i_rotation*d*n_column, n_column, n, d, n_column);
}

void attention::add_values(int head, float * sums) {
    if (n_value == 0) {
        // values are a part of the keys
        return;
    }
    for (const auto & p : pieces) {
        if (is_few) {
            add_rows(l.type_v, l.raw_value(head, p.begin), l.size, p.n, l.n_embd_v, kq.data() + p.i_batch, n_batch, n_query, sums, 2 + n_value);
            continue;
        }
        float * weights = kq.data() + p.i_batch*n_column;
        int m = 0;
        for (int j = 0; j < p.n; ++j) {
            const float * token_weights = weights + j*n_column;
            if (*std::max_element(token_weights, token_weights + n_query) > min_exp) {
                to_float(l.type_v, l.raw_value(head, p.begin + j), values.data() + m*n_value, l.n_embd_v);
                std::copy_n(token_weights, n_column, weights + m++*n_column);
            }
        }
        multiply_add(sums, 2 + n_value, weights, 1, n_column, values.data(), n_value, n_query, m, n_value);
    }
}

// If there is a soft cap, replace n products by scaled and capped logits. Returns the scale that the softmax still has
// to apply, which is 1 after a soft cap.
static float softened(float * x, int n, const logit_params & logits) {
    if (!(logits.cap > 0.0f)) {
        return logits.scale;
    }
    for (int j = 0; j < n; ++j) {
        x[j] = logits.capped(x[j]*logits.scale);
    }
    return 1.0f;
}

// `add` for steps with few queries, whose products are stored query by query
void attention::add_few(int head, int split, int n) {
    for (int q = 0; q < n_query; ++q) {
        float * part = part_of(head, split, q);
        float * x    = kq.data() + q*n_batch;

        const float scale = softened(x, n, logits);
        const auto  batch = exponentials(x, n, scale, x);
        if (!(batch.max > -INFINITY)) {
            std::fill_n(x, n, 0.0f);
            continue;
        }
        const float new_max      = std::max(part[0], batch.max);
        const float part_factor  = std::exp(part[0] - new_max);
        const float batch_factor = std::exp(batch.max - new_max);

        part[0] = new_max;
        part[1] = part[1]*part_factor + batch.sum*batch_factor;
        for (int e = 0; e < n_value && part_factor != 1.0f; ++e) {
            part[2 + e] *= part_factor;
        }
        keep_above(x, n, min_exp/std::max(batch_factor, 1e-30f));
        for (int j = 0; j < n && batch_factor != 1.0f; ++j) {
            x[j] *= batch_factor;
        }
    }
    add_values(head, part_of(head, split, 0) + 2);
}

// add a batch of n tokens to the sums of a part
void attention::add(int head, int split, int n) {
    if (is_few) {
        return add_few(head, split, n);
    }
    const float scale = softened(kq.data(), n*n_column, logits);

    max   .resize(n_column);
    factor.resize(n_column);
    sum   .resize(n_column);
    for (int q = 0; q < n_column; ++q) {
        max[q] = q < n_query ? part_of(head, split, q)[0] : 0.0f;
    }
    exponential_columns(kq.data(), n, n_column, scale, max.data(), factor.data(), sum.data());

    for (int q = 0; q < n_query; ++q) {
        float * part = part_of(head, split, q);
        part[0] = max[q];
        part[1] = part[1]*factor[q] + sum[q];
        for (int e = 0; e < n_value && factor[q] != 1.0f; ++e) {
            part[2 + e] *= factor[q];
        }
    }
    add_values(head, part_of(head, split, 0) + 2);
}

template <typename F>
void attention::read_part(int head, int split, F && done) {
    rotated_block  = -1;
    centered_block = -1;

    keys  .resize(n_batch*l.n_embd_k);
    values.resize(n_batch*n_value, 0.0f);
    // [token][n_column] for many queries. This is enough for [query][n_batch], because n_query <= n_column
    kq.resize(n_batch*n_column);

    const auto & searched = work.searched[head];

    const int64_t begin = searched.n_exact_token*split/n_split;
    const int64_t end   = searched.n_exact_token*(split + 1)/n_split;

    // prefetch a range, because clusters are far apart in memory
    const auto prefetch_range = [&](size_t r) {
        if (r < searched.exact.size()) {
            prefetch(l.raw_key(head, searched.exact[r].begin), searched.exact[r].n*l.size);
        }
    };

    int     n           = 0; // number of tokens in the batch
    int64_t range_begin = 0; // number of exact tokens before the range
    bool    is_first    = true;
    for (size_t r = 0; r < searched.exact.size() && range_begin < end; ++r) {
        const auto & range = searched.exact[r];

        const int64_t range_end = std::min(end, range_begin + range.n);
        if (range_begin + range.n > begin) {
            for (size_t i = is_first ? 0 : n_ahead; i <= n_ahead; ++i) {
                prefetch_range(r + i);
            }
            is_first = false;
        }
        for (int64_t i = std::max(begin, range_begin); i < range_end;) {
            const int m = std::min<int64_t>(n_batch - n, range_end - i);
            read(head, range, range.begin + i - range_begin, m, n);
            n += m;
            i += m;
            if (n == n_batch) {
                done(n);
                pieces.clear();
                n = 0;
            }
        }
        range_begin += range.n;
    }
    if (n > 0) {
        done(n);
        pieces.clear();
    }
}

void attention::attend(int part) {
    const int head = part/n_split;
    const int split = part % n_split;

    for (int q = 0; q < n_query; ++q) {
        clear(part_of(head, split, q));
    }
    read_part(head, split, [&](int n) { add(head, split, n); });
}

double attention::result(int head, int query, float * value) const {
    const auto part = [&](int i) { return part_of(head, i, query); };

    float max = -INFINITY;
    for (int i = 0; i <= n_split; ++i) {
        max = std::max(max, part(i)[0]);
    }
    double sum = 0.0;
    std::fill_n(value, l.n_embd_v, 0.0f);
    for (int i = 0; i <= n_split; ++i) {
        if (part(i)[0] > -INFINITY) {
            const float w = std::exp(part(i)[0] - max);
            sum += (double) w*part(i)[1];
            kvtool::add(value, part(i) + 2, l.n_embd_v, w);
        }
    }
    // If n_map_v > 0, stored values and mean values are multiplied by a Hadamard matrix, and so is their sum. The
    // matrix is its own inverse, so a second multiplication removes it
    hadamard(value, l.n_embd_v, l.n_map_v);
    bool is_finite = std::isfinite(max) && std::isfinite(sum) && sum > 0.0;
    for (int64_t e = 0; e < l.n_embd_v; ++e) {
        value[e]  /= sum;
        is_finite &= std::isfinite(value[e]);
    }
    if (!is_finite) {
        std::fill_n(value, l.n_embd_v, 0.0f);
        return -INFINITY;
    }
    return max + std::log(sum);
}

void attention::weigh(int part) {
    const int head = part/n_split;
    const int split = part % n_split;

    float * attn = work.attn[head].data() + work.searched[head].n_exact_token*split/n_split;

    read_part(head, split, [&](int n) {
        const float scale = is_few ? 0.0f : softened(kq.data(), n*n_column, logits);

        std::fill_n(attn, n, 0.0f);
        for (int q = 0; q < n_query; ++q) {
            const double sum = work.sums[head*n_query + q];
            if (!std::isfinite(sum)) {
                continue;
            }
            float * x = kq.data() + (is_few ? q*n_batch : q);

            const int   stride  = is_few ? 1 : n_column;
            const float scale_q = is_few ? softened(x, n, logits) : scale;
            for (int j = 0; j < n; ++j) {
                attn[j] += std::exp(scale_q*x[j*stride] - (float) sum);
            }
        }
        for (int j = 0; j < n; ++j) {
            // replace NaN, which comes from keys that are not finite, by 0
            attn[j] = attn[j] > 0.0f ? attn[j] : 0.0f;
        }
        attn += n;
    });
}

std::vector<attended_token> attention::most_attended(int head, int k) const {
    const auto & searched = work.searched[head];
    const auto & attn     = work.attn[head];

    std::vector<attended_token> res;
    res.reserve(searched.n_exact_token);
    for (const auto & range : searched.exact) {
        for (int64_t slot = range.begin; slot < range.begin + range.n; ++slot) {
            const int64_t pos = searcher.pos_of(range, slot);
            res.push_back({ pos, slot, searcher.rotation_back(range, pos), attn[res.size()] });
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
