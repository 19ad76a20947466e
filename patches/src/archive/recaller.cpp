#include "recaller.h"

#include "convert.h"
#include "synthetic-cells.h"
#include "staging.h"
#include "parallel.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvtool {

// copies the keys and values of chosen archived tokens to the result of recall_op, in the cache's format
template <typename T>
struct gathering {
    static constexpr int n_tile = 16; // number of values that are transposed together

    const archive        & tokens;
    const size_t           layer;
    const archived_layer & l;

    const int  k;
    const bool v_trans;

    // keys [k][n_head][n_embd_k], and values [k][n_head][n_embd_v] or, if v_trans, [n_head][n_embd_v][k]
    T * dst_k;
    T * dst_v;

    std::vector<float> key    = {};
    std::vector<float> value  = {};
    std::vector<T>     values = {}; // [n_tile][n_embd_v]

    static void convert(ggml_type type, const uint8_t * x, ggml_fp16_t * y, int64_t n) { to_half(type, x, y, n); }
    static void convert(ggml_type type, const uint8_t * x, float       * y, int64_t n) { to_float(type, x, y, n); }

    static void convert(const float * x, ggml_fp16_t * y, int64_t n) { to_half(x, y, n); }
    static void convert(const float * x, float       * y, int64_t n) { std::copy_n(x, n, y); }

    // write the tokens of a head; if there are fewer than k, fill the rest with zeros
    void copy(int head, const std::vector<attended_token> & attended) {
        const int n = attended.size();

        key.resize(l.n_embd_k);
        for (int i = 0; i < k; ++i) {
            T * dst = dst_k + ((size_t) i*l.n_head + head)*l.n_embd_k;
            if (i >= n) {
                std::fill_n(dst, l.n_embd_k, T {});
            } else if (attended[i].delta == 0 && l.n_map_k == 0 && !l.is_centered) {
                convert(l.type_k, l.raw_key(head, attended[i].slot), dst, l.n_embd_k);
            } else {
                tokens.key(layer, head, attended[i].pos, attended[i].slot, key.data());
                if (attended[i].delta != 0) {
                    tokens.rotations_of(layer).rotate(key.data(), attended[i].delta);
                }
                convert(key.data(), dst, l.n_embd_k);
            }
        }

        value .resize(l.n_embd_v);
        values.resize(n_tile*l.n_embd_v);
        for (int i = 0; i < k; ++i) {
            T * dst = v_trans ? values.data() + i % n_tile*l.n_embd_v : dst_v + ((size_t) i*l.n_head + head)*l.n_embd_v;
            if (i < n && l.n_map_v == 0) {
                convert(l.type_v, l.raw_value(head, attended[i].slot), dst, l.n_embd_v);
            } else if (i < n) {
                l.values(head, attended[i].slot, 1, value.data());
                convert(value.data(), dst, l.n_embd_v);
            } else {
                std::fill_n(dst, l.n_embd_v, T {});
            }
            if (v_trans && l.n_embd_v > 0 && (i % n_tile == n_tile - 1 || i == k - 1)) {
                const int first = i - i % n_tile;
                for (int64_t e = 0; e < l.n_embd_v; ++e) {
                    for (int j = first; j <= i; ++j) {
                        dst_v[(head*l.n_embd_v + e)*k + j] = values[j % n_tile*l.n_embd_v + e];
                    }
                }
            }
        }
    }
};

// n tokens that share a search attend exactly to min(n, n_max_shared)*n_exact clustered tokens
static constexpr int n_max_shared = 5;

// If the archive has more tokens than this, steps of several tokens attend exactly to more tokens, because more
// archived tokens are similar to a query. The number grows with the fourth root of the archive's size. For steps of one
// token it stays the same, because more tokens would make these steps slower.
static constexpr double n_short = 8192.0;

static int64_t n_exact_of(const recaller & recaller, int n_tokens) {
    const auto & params = recaller.params;

    const double growth = n_tokens > 1 ? std::max(1.0, std::sqrt(std::sqrt(recaller.tokens.size()/n_short))) : 1.0;

    const int64_t n = (int64_t) (params.n_exact*growth)*std::min(n_tokens, n_max_shared);

    // the recalled tokens are chosen from the tokens that are attended to exactly
    return n > 0 && params.n_synthetic == 0 ? std::max<int64_t>(n, params.n_recall) : n;
}

// consecutive tokens of a step. They share one search, so they attend exactly to the same archived tokens
struct query_tokens {
    int first;
    int n;
};

// queries of a row, token by token, rounded in the same way as attention to the live cells rounds them
static std::vector<float> queries_of(const ggml_tensor * q, query_tokens batch, int head, int n_gqa, ggml_type type_q) {
    std::vector<float> res;
    for (int64_t t = batch.first; t < batch.first + batch.n; ++t) {
        for (int g = head*n_gqa; g < (head + 1)*n_gqa; ++g) {
            const auto * query = (const float *) ((const char *) q->data + g*q->nb[1] + t*q->nb[2]);
            res.insert(res.end(), query, query + q->ne[0]);
        }
    }
    if (type_q != GGML_TYPE_F32) {
        std::vector<uint8_t> bytes(ggml_row_size(type_q, res.size()));
        from_float(type_q, res.data(), bytes.data(), res.size());
        to_float  (type_q, bytes.data(), res.data(), res.size());
    }
    return res;
}

// create the attention of a layer. Each thread creates a separate object; the objects share layer.recaller->work
static attention attention_of(const ggml_tensor * dst, query_tokens batch, recalled_layer & layer) {
    const ggml_tensor * q = dst->src[0];

    auto & recaller = *layer.recaller;

    const int64_t rot = *(const int32_t *) dst->src[1]->data + batch.first;

    const int n_gqa = q->ne[1]/recaller.tokens[layer.i].n_head;

    return attention(recaller.tokens, layer.i, rot, n_gqa*batch.n, layer.logits, n_exact_of(recaller, batch.n), recaller.work);
}

// Call `allocate`, `find` and `attend` for a layer. All threads call this, each with a separate `layer_attn`
static void attend(attention & layer_attn, const ggml_tensor * dst, query_tokens batch, recalled_layer & layer, int ith, int nth) {
    const ggml_tensor * q = dst->src[0];

    const int n_head = layer.recaller->tokens[layer.i].n_head;

    auto & work = layer.recaller->work;

    if (ith == 0) {
        layer_attn.allocate();
    }
    work.wait(nth);

    std::vector<float> queries;
    for (int head = ith; head < n_head; head += nth) {
        queries = queries_of(q, batch, head, q->ne[1]/n_head, layer.type_q);
        layer_attn.find(head, queries.data());
    }
    work.wait(nth);
    for (int part = layer_attn.n_part()*ith/nth; part < layer_attn.n_part()*(ith + 1)/nth; ++part) {
        layer_attn.attend(part);
    }
    work.wait(nth);
}

// Compute the attention to each archived token that is attended to exactly, as a share of the attention to live cells
// and archive together. All threads call this after `attend`; each thread sets the sums of some rows.
static void weigh(attention & layer_attn, const ggml_tensor * dst, recalled_layer & layer, int ith, int nth) {
    const ggml_tensor * q = dst->src[0];

    const auto & l = layer.recaller->tokens[layer.i];

    const auto * max_product = (const float *) dst->src[2]->data;
    const auto * prob        = (const float *) dst->src[3]->data;

    const int n_gqa    = q->ne[1]/l.n_head;
    const int n_tokens = q->ne[2];

    std::vector<float> value(l.n_embd_v);
    for (int head = ith; head < l.n_head; head += nth) {
        for (int i = 0; i < n_tokens*n_gqa; ++i) {
            const size_t i_query = (size_t) (head*n_gqa + i % n_gqa)*n_tokens + i/n_gqa;

            // logarithms of the softmax sums over the live cells and over the archive
            const double live     = (layer.logits.cap > 0.0f ? 1.0f : layer.logits.scale)*max_product[i_query] - std::log(prob[i_query]);
            const double archived = layer_attn.result(head, i, value.data());

            const double max = std::max(live, archived);
            const double sum = max + std::log(std::exp(live - max) + std::exp(archived - max));
            layer_attn.set_sum(head, i, std::isfinite(archived) && std::isfinite(live) ? sum : -INFINITY);
        }
    }
    layer.recaller->work.wait(nth);
    for (int part = layer_attn.n_part()*ith/nth; part < layer_attn.n_part()*(ith + 1)/nth; ++part) {
        layer_attn.weigh(part);
    }
    layer.recaller->work.wait(nth);
}

static const attended_token no_token = { -1, -1, 0, 0.0f };

static void record(recalled_layer & layer, int head, int n, const std::vector<attended_token> & attended) {
    auto * dst = layer.attended.data() + head*n;
    for (int i = 0; i < n; ++i) {
        dst[i] = i < (int) attended.size() ? attended[i] : no_token;
    }
}

template <typename T>
static void recall(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(recalled_layer *) userdata;

    auto & tokens = layer.recaller->tokens;

    const auto & l = tokens[layer.i];
    const auto & p = layer.recaller->params;

    const int k = p.n_recall;

    T * dst_k = (T *) dst->data;
    T * dst_v = dst_k + (size_t) k*l.n_head*l.n_embd_k;

    gathering<T> gathering { tokens, layer.i, l, k, p.v_trans != 0, dst_k, dst_v };

    const query_tokens step = { 0, (int) dst->src[0]->ne[2] };

    auto layer_attn = attention_of(dst, step, layer);
    attend(layer_attn, dst, step, layer, ith, nth);
    weigh (layer_attn, dst, layer, ith, nth);

    for (int head = ith; head < l.n_head; head += nth) {
        const auto attended = layer_attn.most_attended(head, k);
        record(layer, head, k, attended);
        gathering.copy(head, attended);
    }
}

void recall_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    if (dst->type == GGML_TYPE_F16) {
        recall<ggml_fp16_t>(dst, ith, nth, userdata);
    } else {
        recall<float>(dst, ith, nth, userdata);
    }
}

// synthetic cells of some tokens of a step
template <typename T>
static void make(ggml_tensor * dst, query_tokens batch, recalled_layer & layer, int ith, int nth) {
    const auto & l = layer.recaller->tokens[layer.i];
    const auto & p = layer.recaller->params;

    const ggml_tensor * q = dst->src[0];

    const int n_gqa  = q->ne[1]/l.n_head;
    const int n_cell = q->ne[2]*p.n_synthetic;

    auto layer_attn = attention_of(dst, batch, layer);
    attend(layer_attn, dst, batch, layer, ith, nth);

    T * dst_k = (T *) dst->data;
    T * dst_v = dst_k + (size_t) n_cell*l.n_head*l.n_embd_k;

    synthetic_cells cells(n_gqa, l.n_embd_k, l.n_embd_v, layer.type_k, layer.logits);

    std::vector<float>  queries;
    std::vector<double> sums(n_gqa);
    std::vector<float>  attn_out(n_gqa*l.n_embd_v);
    std::vector<T>      value(l.n_embd_v);

    for (int i = ith; i < l.n_head*batch.n; i += nth) {
        const int head = i/batch.n;
        const int t    = i % batch.n;

        // if t < nth, this is the thread's first token of a row: get the row's queries of all tokens
        if (t < nth) {
            queries = queries_of(q, batch, head, n_gqa, layer.type_q);
        }
        for (int g = 0; g < n_gqa; ++g) {
            sums[g] = layer_attn.result(head, t*n_gqa + g, attn_out.data() + g*l.n_embd_v);
        }
        cells.make(queries.data() + t*n_gqa*l.n_embd_k, sums.data(), attn_out.data());

        for (int g = 0; g < p.n_synthetic; ++g) {
            const size_t cell = (batch.first + t)*p.n_synthetic + g;

            T * k = dst_k + (cell*l.n_head + head)*l.n_embd_k;
            if (g < n_gqa) {
                gathering<T>::convert(cells.keys  .data() + g*l.n_embd_k, k, l.n_embd_k);
                gathering<T>::convert(cells.values.data() + g*l.n_embd_v, value.data(), l.n_embd_v);
            } else {
                std::fill_n(k, l.n_embd_k, T {});
                std::fill(value.begin(), value.end(), T {});
            }
            for (int64_t e = 0; e < l.n_embd_v; ++e) {
                dst_v[p.v_trans ? (head*l.n_embd_v + e)*n_cell + cell : (cell*l.n_head + head)*l.n_embd_v + e] = value[e];
            }
        }
    }

    if (dst->src[2]) {
        layer.recaller->work.wait(nth);
        weigh(layer_attn, dst, layer, ith, nth);
        for (int head = ith; head < l.n_head; head += nth) {
            record(layer, head, layer.recaller->n_traced, layer_attn.most_attended(head, layer.recaller->n_traced));
        }
    }
}

void synthesize_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(recalled_layer *) userdata;

    const int n_tokens = dst->src[0]->ne[2];

    const int n = layer.recaller->is_separate && !dst->src[2] ? 1 : n_tokens;

    for (int first = 0; first < n_tokens; first += n) {
        if (first > 0) {
            layer.recaller->work.wait(nth);
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

void recaller::push(const gatherer & gather, const evicted_tokens & evicted, int n_thread, kvtool::staging * staging) {
    // Maximum number of cells that are copied to the host at once. A device first collects the copies of all its layers
    // in its memory
    static constexpr int32_t n_copied_at_once = 128;

    if (evicted.n_cell <= n_copied_at_once) {
        // storing few tokens takes less time than starting threads
        n_thread = 1;
    }

    if (staging && staging->push(evicted)) {
        return;
    }

    std::vector<gathered> contents(recalled.size());

    tokens.reserve(evicted);
    const int64_t first = tokens.start(evicted);
    // skip tokens that the archive would delete immediately, because it keeps only the newest n_max tokens
    for (int32_t c = std::max<int64_t>(0, first - evicted.pos_0); c < evicted.n_cell; c += n_copied_at_once) {
        const auto keep = [&](size_t i, gathered && cells) { contents[i] = std::move(cells); };
        if (!gather(evicted.cells + c, std::min(n_copied_at_once, evicted.n_cell - c), keep)) {
            throw std::runtime_error("a device failed to give its cells");
        }
        parallel_for(n_thread, contents.size(), [&](int i) { tokens.put(i, evicted.pos_0 + c, contents[i]); });
    }
    tokens.finish(evicted, first, n_thread);
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

    return ggml_custom_4d(ctx, type, n, 1, 1, 1, args, n_traced > 0 ? 4 : 2, is_synthetic ? synthesize_op : recall_op, GGML_N_TASKS_MAX, &recalled[i]);
}

} // namespace kvtool
