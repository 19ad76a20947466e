// Recall in the decode's graph: each layer chooses, with its own queries, the archived tokens of each row that they attend
// to most, and puts them into the row's last cells, where attention finds them.

#include "hooks.h"
#include "input.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// keys that are looked at together, at most
static constexpr int n_tile = 256;

// archived tokens that the same turned queries find
struct stretch {
    int64_t begin;
    int64_t end;

    int64_t delta; // how far the queries turn

    std::vector<float>       queries; // [n_query][n_embd]
    std::vector<small_query> small;   // with an index
};

// one row's choice among the archived tokens of its layer
class choice {
public:
    choice(const archive & all, size_t i) : all(all), l(all[i]), rope(all.turns_of(i)) {}

    // the k tokens with the highest scores, the oldest first. A token's score is the most that a query gives it: the product
    // less the highest product of that query. Among equal scores the newer token is chosen.
    const std::vector<int64_t> & choose(int head, const float * queries, int n_query, int64_t rot, int k);

    // how far a chosen token's key turns, to have its distance from the first query, whose key is rotated to rot
    int64_t turn_of(int64_t i, int64_t rot) const;

private:
    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    std::vector<stretch> stretches;
    std::vector<float>   keys;
    std::vector<float>   most;
    std::vector<float>   score;
    std::vector<float>   some;
    std::vector<int64_t> chosen;

    void prepare(const float * queries, int n_query, int64_t rot);

    // calls f(q, i, n, products of query q with the tokens i .. i + n - 1)
    template <typename F> void scan(int head, int n_query, F && f);

    void select(int k);
};

int64_t choice::turn_of(int64_t i, int64_t rot) const {
    const int64_t base = all.base_of(i);
    // from i - base to rot less the distance, which is rot + (base of the cache) - i, or n_near
    return i < all.far_end() ? rot - all.n_near - (i - base) : base - all.base();
}

void choice::prepare(const float * queries, int n_query, int64_t rot) {
    stretches.clear();

    const auto add = [&](int64_t begin, int64_t end, int64_t delta) {
        if (begin < end) {
            stretches.push_back({ begin, end, delta, {}, {} });
        }
    };

    // the index has far keys as they were before RoPE
    add(all.begin(), all.far_end(), all.n_near - rot);
    for (size_t j = 0; j < all.frames.size(); ++j) {
        const auto & f = all.frames[j];
        const int64_t end = j + 1 < all.frames.size() ? all.frames[j + 1].first : all.end();
        add(std::max(f.first, all.far_end()), end, all.base() - f.base);
    }

    for (auto & s : stretches) {
        s.queries.assign(queries, queries + n_query*l.n_embd_k);
        for (int q = 0; q < n_query; ++q) {
            rope.turn(s.queries.data() + q*l.n_embd_k, s.delta);
        }
        if (l.n_bit > 0) {
            s.small.resize(n_query);
            for (int q = 0; q < n_query; ++q) {
                s.small[q].set(s.queries.data() + q*l.n_embd_k, l.n_embd_k);
            }
        }
    }
}

template <typename F>
void choice::scan(int head, int n_query, F && f) {
    float out[n_tile + n_side];

    for (const auto & s : stretches) {
        for (int64_t i = s.begin; i < s.end; ) {
            const int n = std::min({ s.end, archived_layer::block_end(i), i + n_tile - i % n_side }) - i;

            if (l.n_bit > 0) {
                const int skip = i % n_side;
                for (int q = 0; q < n_query; ++q) {
                    multiply(l.side(head, i), (skip + n + n_side - 1)/n_side, s.small[q], l.n_embd_k, l.n_bit, out);
                    f(q, i, n, out + skip);
                }
                i += n;
                continue;
            }

            keys.resize(n_tile*l.n_embd_k);
            l.keys(head, i, n, keys.data());
            if (i < all.far_end()) {
                for (int j = 0; j < n; ++j) {
                    rope.turn(keys.data() + j*l.n_embd_k, all.base_of(i + j) - (i + j));
                }
            }
            for (int q = 0; q < n_query; ++q) {
                const float * query = s.queries.data() + q*l.n_embd_k;
                for (int j = 0; j < n; ++j) {
                    out[j] = std::inner_product(query, query + l.n_embd_k, keys.data() + j*l.n_embd_k, 0.0f);
                }
                f(q, i, n, out);
            }
            i += n;
        }
    }
}

const std::vector<int64_t> & choice::choose(int head, const float * queries, int n_query, int64_t rot, int k) {
    if (all.size() <= k) {
        chosen.resize(all.size());
        std::iota(chosen.begin(), chosen.end(), all.begin());
        return chosen;
    }

    prepare(queries, n_query, rot);

    const int64_t begin = all.begin();

    most .assign(n_query,    -INFINITY);
    score.assign(all.size(), -INFINITY);

    scan(head, n_query, [&](int q, int64_t, int n, const float * x) {
        float res = most[q];
        for (int j = 0; j < n; ++j) {
            res = std::max(res, x[j]);
        }
        most[q] = res;
    });
    scan(head, n_query, [&](int q, int64_t i, int n, const float * x) {
        float * to = score.data() + (i - begin);
        for (int j = 0; j < n; ++j) {
            to[j] = std::max(to[j], x[j] - most[q]);
        }
    });

    select(k);
    return chosen;
}

void choice::select(int k) {
    const int64_t n = score.size();

    // of some scores a bound that more than k of all will reach
    const int64_t step = std::max<int64_t>(1, n/4096);
    some.clear();
    for (int64_t i = step/2; i < n; i += step) {
        some.push_back(score[i]);
    }
    const size_t at = std::min<size_t>(some.size() - 1, 2*k/step + 8);
    std::nth_element(some.begin(), some.begin() + at, some.end(), std::greater<float>());
    const float bound = some[at];

    chosen.clear();
    for (int64_t i = 0; i < n; ++i) {
        if (score[i] >= bound) {
            chosen.push_back(i);
        }
    }
    if ((int64_t) chosen.size() < k) {
        chosen.resize(n);
        std::iota(chosen.begin(), chosen.end(), 0);
    }

    std::nth_element(chosen.begin(), chosen.begin() + k - 1, chosen.end(), [&](int64_t a, int64_t b) {
        return score[a] > score[b] || (score[a] == score[b] && a > b);
    });
    chosen.resize(k);
    std::sort(chosen.begin(), chosen.end());
    for (auto & i : chosen) {
        i += all.begin();
    }
}

// dst: K [k][n_head][n_embd_k], then V [k][n_head][n_embd_v] or transposed; src: the queries [n_embd_k, n_head_q, n_tokens],
// and where the first of them is rotated to
static void recall(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & layer  = *(const recalled_layer *) userdata;
    const auto & kvtool = *layer.kvtool;
    const auto & l      = kvtool.archive[layer.i];

    const ggml_tensor * q = dst->src[0];

    const int64_t rot = *(const int32_t *) dst->src[1]->data;

    const int k     = kvtool.params.n_recall;
    const int n_gqa = q->ne[1]/l.n_head;
    const int n_q   = n_gqa*q->ne[2];

    float * to_k = (float *) dst->data;
    float * to_v = to_k + (size_t) k*l.n_head*l.n_embd_k;

    choice one(kvtool.archive, layer.i);

    std::vector<float> queries(n_q*l.n_embd_k);
    std::vector<float> value  (l.n_embd_v);

    for (int head = ith; head < l.n_head; head += nth) {
        float * to = queries.data();
        for (int64_t t = 0; t < q->ne[2]; ++t) {
            for (int g = 0; g < n_gqa; ++g) {
                const auto * from = (const float *) ((const char *) q->data + (head*n_gqa + g)*q->nb[1] + t*q->nb[2]);
                to = std::copy(from, from + l.n_embd_k, to);
            }
        }

        const auto & chosen = one.choose(head, queries.data(), n_q, rot, k);

        const int n = chosen.size();
        for (int i = 0; i < k; ++i) {
            float * key = to_k + ((size_t) i*l.n_head + head)*l.n_embd_k;
            if (i < n) {
                l.keys (head, chosen[i], 1, key);
                l.value(head, chosen[i], value.data());
                kvtool.archive.turns_of(layer.i).turn(key, one.turn_of(chosen[i], rot));
            } else {
                std::fill_n(key, l.n_embd_k, 0.0f);
                std::fill(value.begin(), value.end(), 0.0f);
            }
            for (int64_t j = 0; j < l.n_embd_v; ++j) {
                const size_t at = (size_t) head*l.n_embd_v + j;
                to_v[kvtool.v_trans ? at*k + i : (size_t) i*l.n_head*l.n_embd_v + at] = value[j];
            }
        }
    }
}

} // namespace kvtool

using namespace kvtool;

void llama_kvtool_recall(const llm_graph_context & graph, ggml_tensor * q, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || kvtool->archive.size() == 0 || !kvtool->find(il)) {
        return;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const size_t  i = &l - kvtool->layers.data();
    const int64_t k = kvtool->params.n_recall;

    const int64_t n_embd_k = l.k->ne[0];
    const int64_t n_embd_v = l.v->ne[0];

    auto & input = graph_input(graph);
    auto & slots = input.recalled;
    if (!slots) {
        slots     = new_input(ctx, GGML_TYPE_I64, k, 1, 1);
        input.rot = new_input(ctx, GGML_TYPE_I32, 1, 1, 1);
    }

    // what another machine's device says it can do, it may not
    ggml_tensor * args[] = { q, input.rot };
    ggml_tensor * t = ggml_custom_4d(ctx, GGML_TYPE_F32, k*(n_embd_k + n_embd_v), 1, 1, 1, args, 2, recall, GGML_N_TASKS_MAX,
            (void *) &kvtool->recalled[i]);
    ggml_backend_sched_set_tensor_backend(graph.sched, t, graph.backend_cpu);
    ggml_build_forward_expand(graph.gf, t);

    const auto write = [&](ggml_tensor * cache, int64_t n_embd, size_t first) {
        ggml_tensor * rows = ggml_view_2d(ctx, t, n_embd, k, n_embd*sizeof(float), first*sizeof(float));
        ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, ggml_reshape_2d(ctx, cache, n_embd, l.n_cell), rows, slots));
    };

    write(l.k, n_embd_k, 0);
    if (!kvtool->v_trans) {
        write(l.v, n_embd_v, k*n_embd_k);
        return;
    }

    const size_t one = ggml_type_size(l.v->type);

    ggml_tensor * from = ggml_view_2d(ctx, t,   k, n_embd_v, k*sizeof(float), k*n_embd_k*sizeof(float));
    ggml_tensor * to   = ggml_view_2d(ctx, l.v, k, n_embd_v, l.n_cell*one, (l.n_cell - k)*one);
    ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, from, to));
}
