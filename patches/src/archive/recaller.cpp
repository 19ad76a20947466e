#include "recaller.h"

#include "convert.h"
#include "synthetic-cells.h"
#include "staging.h"
#include "parallel.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvtool {

// copies the keys and values of chosen archived tokens to the result of recall_into, in the cache's format
template <typename T>
struct gathering {
    const archive        & tokens;
    const size_t           layer;
    const archived_layer & l;

    const int  k;
    const bool v_trans;

    // keys [k][n_head][n_embd_k], and values [k][n_head][n_embd_v] or, if v_trans, [n_head][n_embd_v][k]
    T * to_k;
    T * to_v;

    std::vector<float> key    = {};
    std::vector<float> value  = {};
    std::vector<T>     values = {}; // values of up to n_pack tokens, which are transposed together

    static void from(ggml_type type, const uint8_t * x, ggml_fp16_t * y, int64_t n) { to_half(type, x, y, n); }
    static void from(ggml_type type, const uint8_t * x, float       * y, int64_t n) { to_float(type, x, y, n); }

    static void from(const float * x, ggml_fp16_t * y, int64_t n) { to_half(x, y, n); }
    static void from(const float * x, float       * y, int64_t n) { std::copy_n(x, n, y); }

    // write the tokens of a head; if there are fewer than k, fill the rest with zeros
    void copy(int head, const std::vector<attended_token> & some) {
        const int n = some.size();

        key.resize(l.n_embd_k);
        for (int i = 0; i < k; ++i) {
            T * to = to_k + ((size_t) i*l.n_head + head)*l.n_embd_k;
            if (i >= n) {
                std::fill_n(to, l.n_embd_k, T {});
            } else if (some[i].delta == 0 && l.n_map_k == 0 && !l.is_centered) {
                from(l.type_k, l.raw_key(head, some[i].place), to, l.n_embd_k);
            } else {
                tokens.key(layer, head, some[i].pos, some[i].place, key.data());
                if (some[i].delta != 0) {
                    tokens.rotations_of(layer).rotate(key.data(), some[i].delta);
                }
                from(key.data(), to, l.n_embd_k);
            }
        }

        value .resize(l.n_embd_v);
        values.resize(n_pack*l.n_embd_v);
        for (int i = 0; i < k; ++i) {
            T * to = v_trans ? values.data() + i % n_pack*l.n_embd_v : to_v + ((size_t) i*l.n_head + head)*l.n_embd_v;
            if (i < n && l.n_map_v == 0) {
                from(l.type_v, l.raw_value(head, some[i].place), to, l.n_embd_v);
            } else if (i < n) {
                l.values(head, some[i].place, 1, value.data());
                from(value.data(), to, l.n_embd_v);
            } else {
                std::fill_n(to, l.n_embd_v, T {});
            }
            if (v_trans && l.n_embd_v > 0 && (i % n_pack == n_pack - 1 || i == k - 1)) {
                const int first = i - i % n_pack;
                for (int64_t e = 0; e < l.n_embd_v; ++e) {
                    for (int j = first; j <= i; ++j) {
                        to_v[(head*l.n_embd_v + e)*k + j] = values[j % n_pack*l.n_embd_v + e];
                    }
                }
            }
        }
    }
};

// n tokens that share a search attend exactly to min(n, n_apart)*n_exact clustered tokens
static constexpr int n_apart = 5;

// If the archive has more tokens than this, steps of several tokens attend exactly to more tokens, because more
// archived tokens are similar to a query. The number grows with the fourth root of the archive's size. For steps of one
// token it stays the same, because more tokens would make these steps slower.
static constexpr double n_short = 8192.0;

static int64_t exact_of(const recaller & all, int n_tokens) {
    const double longer = n_tokens > 1 ? std::max(1.0, std::sqrt(std::sqrt(all.tokens.size()/n_short))) : 1.0;

    const int64_t n = (int64_t) (all.params.n_exact*longer)*std::min(n_tokens, n_apart);

    // the recalled tokens are chosen from the tokens that are attended to exactly
    return n > 0 && all.params.n_synthetic == 0 ? std::max<int64_t>(n, all.params.n_recall) : n;
}

// consecutive tokens of a step. They share one search, so they attend exactly to the same archived tokens
struct some_tokens {
    int first;
    int n;
};

// queries of a row, token by token, rounded in the same way as attention to the live cells rounds them
static std::vector<float> queries_of(const ggml_tensor * q, some_tokens some, int head, int n_gqa, ggml_type type_q) {
    std::vector<float> res;
    for (int64_t t = some.first; t < some.first + some.n; ++t) {
        for (int g = head*n_gqa; g < (head + 1)*n_gqa; ++g) {
            const auto * from = (const float *) ((const char *) q->data + g*q->nb[1] + t*q->nb[2]);
            res.insert(res.end(), from, from + q->ne[0]);
        }
    }
    if (type_q != GGML_TYPE_F32) {
        std::vector<uint8_t> bytes(ggml_row_size(type_q, res.size()));
        from_float(type_q, res.data(), bytes.data(), res.size());
        to_float  (type_q, bytes.data(), res.data(), res.size());
    }
    return res;
}

// create the attention of a layer. Each thread creates a separate object; the objects share layer.all->attending
static attention attention_of(const ggml_tensor * dst, some_tokens some, recalled_layer & layer) {
    const ggml_tensor * q = dst->src[0];

    const int64_t rot = *(const int32_t *) dst->src[1]->data + some.first;

    const int n_gqa = q->ne[1]/layer.all->tokens[layer.i].n_head;

    return attention(layer.all->tokens, layer.i, rot, n_gqa*some.n, layer.logits, exact_of(*layer.all, some.n), layer.all->attending);
}

// Call `make_room`, `find` and `attend` for a layer. All threads call this, each with its own `one`
static void attend(attention & one, const ggml_tensor * dst, some_tokens some, recalled_layer & layer, int ith, int nth) {
    const ggml_tensor * q = dst->src[0];

    const int n_head = layer.all->tokens[layer.i].n_head;

    auto & all = layer.all->attending;

    if (ith == 0) {
        one.make_room();
    }
    all.wait(nth);

    std::vector<float> queries;
    for (int head = ith; head < n_head; head += nth) {
        queries = queries_of(q, some, head, q->ne[1]/n_head, layer.type_q);
        one.find(head, queries.data());
    }
    all.wait(nth);
    for (int part = one.n_part()*ith/nth; part < one.n_part()*(ith + 1)/nth; ++part) {
        one.attend(part);
    }
    all.wait(nth);
}

// Compute the attention to each archived token that is attended to exactly, as a share of the attention to live cells
// and archive together. All threads call this after `attend`; each thread sets the sums of some rows.
static void weigh(attention & one, const ggml_tensor * dst, recalled_layer & layer, int ith, int nth) {
    const ggml_tensor * q = dst->src[0];

    const auto & l = layer.all->tokens[layer.i];

    const auto * most = (const float *) dst->src[2]->data;
    const auto * prob = (const float *) dst->src[3]->data;

    const int n_gqa    = q->ne[1]/l.n_head;
    const int n_tokens = q->ne[2];

    std::vector<float> value(l.n_embd_v);
    for (int head = ith; head < l.n_head; head += nth) {
        for (int i = 0; i < n_tokens*n_gqa; ++i) {
            const size_t at = (size_t) (head*n_gqa + i % n_gqa)*n_tokens + i/n_gqa;

            const double sum = (layer.logits.cap > 0.0f ? 1.0f : layer.logits.scale)*most[at] - std::log(prob[at]);
            const double own  = one.result(head, i, value.data());

            const double top = std::max(sum, own);
            one.set_sum(head, i, std::isfinite(own) && std::isfinite(sum) ? top + std::log(std::exp(sum - top) + std::exp(own - top)) : -INFINITY);
        }
    }
    layer.all->attending.wait(nth);
    for (int part = one.n_part()*ith/nth; part < one.n_part()*(ith + 1)/nth; ++part) {
        one.weigh(part);
    }
    layer.all->attending.wait(nth);
}

static const attended_token no_token = { -1, -1, 0, 0.0f };

static void note(recalled_layer & layer, int head, int n, const std::vector<attended_token> & some) {
    auto * to = layer.attended.data() + head*n;
    for (int i = 0; i < n; ++i) {
        to[i] = i < (int) some.size() ? some[i] : no_token;
    }
}

template <typename T>
static void recall(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(recalled_layer *) userdata;

    auto & tokens = layer.all->tokens;

    const auto & l = tokens[layer.i];

    const int k = layer.all->params.n_recall;

    T * to_k = (T *) dst->data;
    T * to_v = to_k + (size_t) k*l.n_head*l.n_embd_k;

    gathering<T> all { tokens, layer.i, l, k, layer.all->params.v_trans != 0, to_k, to_v };

    const some_tokens step = { 0, (int) dst->src[0]->ne[2] };

    auto one = attention_of(dst, step, layer);
    attend(one, dst, step, layer, ith, nth);
    weigh (one, dst, layer, ith, nth);

    for (int head = ith; head < l.n_head; head += nth) {
        const auto some = one.most_attended(head, k);
        note(layer, head, k, some);
        all.copy(head, some);
    }
}

void recall_into(ggml_tensor * dst, int ith, int nth, void * userdata) {
    if (dst->type == GGML_TYPE_F16) {
        recall<ggml_fp16_t>(dst, ith, nth, userdata);
    } else {
        recall<float>(dst, ith, nth, userdata);
    }
}

// synthetic cells of some tokens of a step
template <typename T>
static void make(ggml_tensor * dst, some_tokens some, recalled_layer & layer, int ith, int nth) {
    const auto & l = layer.all->tokens[layer.i];
    const auto & p = layer.all->params;

    const ggml_tensor * q = dst->src[0];

    const int n_gqa  = q->ne[1]/l.n_head;
    const int n_cell = q->ne[2]*p.n_synthetic;

    auto one = attention_of(dst, some, layer);
    attend(one, dst, some, layer, ith, nth);

    T * to_k = (T *) dst->data;
    T * to_v = to_k + (size_t) n_cell*l.n_head*l.n_embd_k;

    synthetic_cells cells(n_gqa, l.n_embd_k, l.n_embd_v, layer.type_k, layer.logits);

    std::vector<float>  queries;
    std::vector<double> sums(n_gqa);
    std::vector<float>  found(n_gqa*l.n_embd_v);
    std::vector<T>      value(l.n_embd_v);

    for (int i = ith; i < l.n_head*some.n; i += nth) {
        const int head = i/some.n;
        const int t    = i % some.n;

        // if t < nth, this is the thread's first token of a row: get the row's queries of all tokens
        if (t < nth) {
            queries = queries_of(q, some, head, n_gqa, layer.type_q);
        }
        for (int g = 0; g < n_gqa; ++g) {
            sums[g] = one.result(head, t*n_gqa + g, found.data() + g*l.n_embd_v);
        }
        cells.make(queries.data() + t*n_gqa*l.n_embd_k, sums.data(), found.data());

        for (int g = 0; g < p.n_synthetic; ++g) {
            const size_t cell = (some.first + t)*p.n_synthetic + g;

            T * k = to_k + (cell*l.n_head + head)*l.n_embd_k;
            if (g < n_gqa) {
                gathering<T>::from(cells.keys  .data() + g*l.n_embd_k, k, l.n_embd_k);
                gathering<T>::from(cells.values.data() + g*l.n_embd_v, value.data(), l.n_embd_v);
            } else {
                std::fill_n(k, l.n_embd_k, T {});
                std::fill(value.begin(), value.end(), T {});
            }
            for (int64_t e = 0; e < l.n_embd_v; ++e) {
                to_v[p.v_trans ? (head*l.n_embd_v + e)*n_cell + cell : (cell*l.n_head + head)*l.n_embd_v + e] = value[e];
            }
        }
    }

    if (dst->src[2]) {
        layer.all->attending.wait(nth);
        weigh(one, dst, layer, ith, nth);
        for (int head = ith; head < l.n_head; head += nth) {
            note(layer, head, layer.all->n_traced, one.most_attended(head, layer.all->n_traced));
        }
    }
}

void make_into(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(recalled_layer *) userdata;

    const int n_tokens = dst->src[0]->ne[2];

    const int n = layer.all->is_apart && !dst->src[2] ? 1 : n_tokens;

    for (int first = 0; first < n_tokens; first += n) {
        if (first > 0) {
            layer.all->attending.wait(nth);
        }
        if (dst->type == GGML_TYPE_F16) {
            make<ggml_fp16_t>(dst, { first, n }, layer, ith, nth);
        } else {
            make<float>(dst, { first, n }, layer, ith, nth);
        }
    }
}

recaller::recaller(const archive_params & params, const std::vector<archive_shape> & shapes) : params(params) {
    tokens.make(params, shapes);

    for (size_t i = 0; i < shapes.size(); ++i) {
        recalled.push_back({ this, i, {}, GGML_TYPE_F32, GGML_TYPE_F32, {} });
    }
    trace(params.n_synthetic > 0 ? 0 : params.n_recall);
}

void recaller::trace(int32_t n) {
    n_traced = n;
    for (auto & l : recalled) {
        l.attended.assign((size_t) tokens[l.i].n_head*n, no_token);
    }
}

void recaller::push(const gatherer & gather, const leaving & some, int n_thread, kvtool::staging * staging) {
    // Maximum number of cells that are copied to the host at once. A device first collects the copies of all its layers
    // in its memory
    static constexpr int32_t n_most = 128;

    if (some.n_cell <= n_most) {
        // storing few tokens takes less time than starting threads
        n_thread = 1;
    }

    if (staging && staging->push(some)) {
        return;
    }

    std::vector<gathered> found(recalled.size());

    tokens.reserve(some);
    const int64_t first = tokens.start(some);
    // skip tokens that the archive would delete immediately, because it keeps only the newest n_max tokens
    for (int32_t c = std::max<int64_t>(0, first - some.pos_0); c < some.n_cell; c += n_most) {
        const auto keep = [&](size_t i, gathered && cells) { found[i] = std::move(cells); };
        if (!gather(some.cells + c, std::min(n_most, some.n_cell - c), keep)) {
            throw std::runtime_error("a device failed to give its cells");
        }
        parallel_for(n_thread, found.size(), [&](int i) { tokens.put(i, some.pos_0 + c, found[i]); });
    }
    tokens.finish(some, first, n_thread);
}

void recaller::clear() {
    tokens.clear();
    trace(n_traced);
}

ggml_tensor * recaller::build(
        ggml_context * ctx, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n, const logit_params & logits) {
    recalled[i].logits = logits;
    recalled[i].type_k = k->type;
    // ggml converts queries to 8 bits for quantized keys
    recalled[i].type_q = ggml_is_quantized(k->type) ? GGML_TYPE_Q8_0 : GGML_TYPE_F32;

    const bool is_synthetic = params.n_synthetic > 0;

    return ggml_custom_4d(ctx, type, n, 1, 1, 1, args, n_traced > 0 ? 4 : 2, is_synthetic ? make_into : recall_into, GGML_N_TASKS_MAX, &recalled[i]);
}

} // namespace kvtool
