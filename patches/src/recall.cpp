// Recall in the decode's graph: each layer chooses, with its own queries, the archived tokens of each row that they attend
// to most, and puts them into the row's last cells, where attention finds them.

#include "convert.h"
#include "hooks.h"
#include "input.h"
#include "softmax.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace kvtool {

// queries whose logits are held at the same time, at most
static constexpr int n_together = 16;

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

    // The k tokens with the highest scores, the oldest first. A token's score is the sum over the queries of its probability,
    // in a softmax over the archived tokens and the live cells. Among equal scores the newer token is chosen.
    // queries: [n_query][n_embd]; live[n_query]: the log of the sum of the live cells' exponentials; scale: of the products
    const std::vector<int64_t> & choose(
            int head, const std::vector<float> & queries, const std::vector<float> & live, int64_t rot, float scale, int k);

    // how far a chosen token's key turns, to have its distance from the first query, whose key is rotated to rot
    int64_t turn_of(int64_t i, int64_t rot) const;

private:
    // tokens of one stretch and one block
    struct tile {
        const stretch * from;
        int64_t begin;
        int     n;
    };

    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    std::vector<stretch>      stretches;
    std::vector<tile>         tiles;
    std::vector<float>        keys;   // of a tile
    std::vector<softmax_part> parts;  // [n_together] queries, of each the tiles
    std::vector<float>        powers; // [n_together] queries, of each the tokens and room for a side
    std::vector<float>        score;
    std::vector<float>        some;
    std::vector<int64_t>      chosen;

    void prepare(const std::vector<float> & queries, int64_t rot);

    // out[n]: the products of a query with the tile's keys; out has room for two more sides
    float * multiply(int head, const tile & t, int q, float * out) const;

    void select(int k);
};

int64_t choice::turn_of(int64_t i, int64_t rot) const {
    const int64_t base = all.base_of(i);
    // from i - base to rot less the distance, which is rot + (base of the cache) - i, or n_near
    return i < all.far_end() ? rot - all.n_near - (i - base) : base - all.base();
}

void choice::prepare(const std::vector<float> & queries, int64_t rot) {
    const int n_query = queries.size()/l.n_embd_k;

    stretches.clear();

    const auto add = [&](int64_t begin, int64_t end, int64_t delta) {
        if (begin < end) {
            stretches.push_back({ begin, end, delta, queries, {} });
        }
    };

    // the index has far keys as they were before RoPE
    add(all.begin(), all.far_end(), all.n_near - rot);
    for (size_t j = 0; j < all.frames.size(); ++j) {
        const auto & f = all.frames[j];
        const int64_t end = j + 1 < all.frames.size() ? all.frames[j + 1].first : all.end();
        add(std::max(f.first, all.far_end()), end, all.base() - f.base);
    }

    tiles.clear();
    for (auto & s : stretches) {
        s.small.resize(l.n_bit > 0 ? n_query : 0);
        for (int q = 0; q < n_query; ++q) {
            rope.turn(s.queries.data() + q*l.n_embd_k, s.delta);
            if (l.n_bit > 0) {
                s.small[q].set(s.queries.data() + q*l.n_embd_k, l.n_embd_k);
            }
        }
        for (int64_t i = s.begin; i < s.end; i += tiles.back().n) {
            tiles.push_back({ &s, i, (int) (std::min({ s.end, archived_layer::block_end(i), i + n_tile - i % n_side }) - i) });
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

const std::vector<int64_t> & choice::choose(
        int head, const std::vector<float> & queries, const std::vector<float> & live, int64_t rot, float scale, int k) {
    if (all.size() <= k) {
        chosen.resize(all.size());
        std::iota(chosen.begin(), chosen.end(), all.begin());
        return chosen;
    }

    prepare(queries, rot);

    const int     n_query = live.size();
    const int64_t n_power = all.size() + n_side;

    score .assign(all.size(), 0.0f);
    parts .resize(std::min(n_query, n_together)*tiles.size());
    powers.resize(std::min(n_query, n_together)*n_power);

    // with groups of 16 at the end, and sides at both
    float out[n_tile + 2*n_side];

    for (int q0 = 0; q0 < n_query; q0 += n_together) {
        const int n = std::min(n_together, n_query - q0);

        for (size_t i = 0; i < tiles.size(); ++i) {
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
                parts[q*tiles.size() + i] = exponentials(x, t.n, scale, powers.data() + q*n_power + (t.begin - all.begin()));
            }
        }

        for (int q = 0; q < n; ++q) {
            const softmax_part * own = parts.data() + q*tiles.size();

            float most = live[q0 + q];
            for (size_t i = 0; i < tiles.size(); ++i) {
                most = std::max(most, own[i].most);
            }
            double sum = std::exp(live[q0 + q] - most);
            for (size_t i = 0; i < tiles.size(); ++i) {
                sum += own[i].sum*std::exp(own[i].most - most);
            }
            if (!std::isfinite(sum)) {
                // keys or a query that are no numbers choose nothing
                continue;
            }
            for (size_t i = 0; i < tiles.size(); ++i) {
                const int64_t at = tiles[i].begin - all.begin();
                add(score.data() + at, powers.data() + q*n_power + at, tiles[i].n, std::exp(own[i].most - most)/sum);
            }
        }
    }

    select(k);
    return chosen;
}

void choice::select(int k) {
    const int64_t n = score.size();

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

// how chosen tokens are given to the cache
template <typename T>
struct gathering {
    const archived_layer & l;
    const turns          & rope;

    const int  k;
    const bool v_trans;

    T * to_k; // [k][n_head][n_embd_k]
    T * to_v; // [k][n_head][n_embd_v], or [n_head][n_embd_v][k]

    std::vector<float> key    = {};
    std::vector<T>     values = {}; // of n_side tokens

    static void from(ggml_type type, const uint8_t * x, ggml_fp16_t * y, int64_t n) { to_half(type, x, y, n); }
    static void from(ggml_type type, const uint8_t * x, float       * y, int64_t n) { to_float(type, x, y, n); }

    static void from(const float * x, ggml_fp16_t * y, int64_t n) { to_half(x, y, n); }
    static void from(const float * x, float       * y, int64_t n) { std::copy_n(x, n, y); }

    // a head's; zeros where there are less than k
    void copy(int head, const choice & one, const std::vector<int64_t> & chosen, int64_t rot) {
        const int n = chosen.size();

        key.resize(l.n_embd_k);
        for (int i = 0; i < k; ++i) {
            T * to = to_k + ((size_t) i*l.n_head + head)*l.n_embd_k;
            const int64_t delta = i < n ? one.turn_of(chosen[i], rot) : 0;
            if (i >= n) {
                std::fill_n(to, l.n_embd_k, T {});
            } else if (delta == 0) {
                from(l.type_k, l.raw_key(head, chosen[i]), to, l.n_embd_k);
            } else {
                l.keys(head, chosen[i], 1, key.data());
                rope.turn(key.data(), delta);
                from(key.data(), to, l.n_embd_k);
            }
        }

        values.resize(n_side*l.n_embd_v);
        for (int i = 0; i < k; ++i) {
            T * to = v_trans ? values.data() + i % n_side*l.n_embd_v : to_v + ((size_t) i*l.n_head + head)*l.n_embd_v;
            if (i < n) {
                from(l.type_v, l.raw_value(head, chosen[i]), to, l.n_embd_v);
            } else {
                std::fill_n(to, l.n_embd_v, T {});
            }
            if (v_trans && (i % n_side == n_side - 1 || i == k - 1)) {
                const int first = i - i % n_side;
                for (int64_t e = 0; e < l.n_embd_v; ++e) {
                    for (int j = first; j <= i; ++j) {
                        to_v[(head*l.n_embd_v + e)*k + j] = values[j % n_side*l.n_embd_v + e];
                    }
                }
            }
        }
    }
};

// dst: K [k][n_head][n_embd_k], then V [k][n_head][n_embd_v] or transposed; src: the queries [n_embd_k, n_head_q, n_tokens],
// where the first of them is rotated to, and of their logits with the live cells the highest one and its probability,
// both [n_head_q][n_tokens]
template <typename T>
static void recall(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto & layer = *(recalled_layer *) userdata;

    const auto & kvtool = *layer.kvtool;
    const auto & l      = kvtool.archive[layer.i];

    const ggml_tensor * q = dst->src[0];

    const int64_t rot = *(const int32_t *) dst->src[1]->data;

    const auto * most = (const float *) dst->src[2]->data;
    const auto * prob = (const float *) dst->src[3]->data;

    const int k     = kvtool.params.n_recall;
    const int n_gqa = q->ne[1]/l.n_head;

    T * to_k = (T *) dst->data;
    T * to_v = to_k + (size_t) k*l.n_head*l.n_embd_k;

    choice       one(kvtool.archive, layer.i);
    gathering<T> all { l, kvtool.archive.turns_of(layer.i), k, kvtool.v_trans, to_k, to_v };

    std::vector<float> queries;
    std::vector<float> live;

    for (int head = ith; head < l.n_head; head += nth) {
        queries.clear();
        live   .clear();
        for (int64_t t = 0; t < q->ne[2]; ++t) {
            for (int g = head*n_gqa; g < (head + 1)*n_gqa; ++g) {
                const auto * from = (const float *) ((const char *) q->data + g*q->nb[1] + t*q->nb[2]);
                queries.insert(queries.end(), from, from + l.n_embd_k);

                const size_t at = g*q->ne[2] + t;
                live.push_back(layer.scale*most[at] - std::log(prob[at]));
            }
        }
        const auto & chosen = one.choose(head, queries, live, rot, layer.scale, k);
        std::fill_n(std::copy(chosen.begin(), chosen.end(), layer.chosen.begin() + head*k), k - chosen.size(), -1);
        all.copy(head, one, chosen, rot);
    }
}

// of each query's products with the live cells the highest one, and its probability: both [1, 1, n_tokens*n_head]
static std::pair<ggml_tensor *, ggml_tensor *> live_logits(
        const llm_graph_context & graph, const llama_kvtool & kvtool, const layer & l, ggml_tensor * q, ggml_tensor * mask, float scale) {
    ggml_context * ctx = graph.ctx0;

    auto & input = graph_input(graph);

    const int64_t n_live = std::min<int64_t>(mask->ne[0], l.n_cell - kvtool.params.n_recall);
    if (!input.live) {
        input.live = ggml_cont(ctx, ggml_view_2d(ctx, mask, n_live, mask->ne[1], mask->nb[1], 0));
    }

    const int64_t n_embd = q->ne[0];
    const int64_t n_row  = q->ne[1]*q->ne[2];

    ggml_tensor * k = ggml_view_3d(ctx, l.k, n_embd, n_live, l.n_head, l.k->nb[1], ggml_row_size(l.k->type, n_embd), 0);

    ggml_tensor * kq = ggml_mul_mat(ctx, k, ggml_permute(ctx, q, 0, 2, 1, 3));
    ggml_tensor * p  = ggml_soft_max_ext(ctx, kq, input.live, scale, 0.0f);
    ggml_tensor * at = ggml_reshape_2d(ctx, ggml_argmax(ctx, ggml_reshape_2d(ctx, p, n_live, n_row)), 1, n_row);

    const auto highest = [&](ggml_tensor * t) { return ggml_get_rows(ctx, ggml_reshape_3d(ctx, t, 1, n_live, n_row), at); };

    return { highest(kq), highest(p) };
}

} // namespace kvtool

using namespace kvtool;

void llama_kvtool_recall(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * mask, float scale, int il) {
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
    if (!input.rot) {
        input.rot = new_input(ctx, GGML_TYPE_I32, 1, 1, 1);
    }

    const auto live = live_logits(graph, *kvtool, l, q, mask, scale);

    auto * layer = const_cast<recalled_layer *>(&kvtool->recalled[i]);
    layer->scale = scale;

    // devices copy to a cache in half precision from the same, and to others from floats
    const bool is_half = l.k->type == GGML_TYPE_F16 && l.v->type == GGML_TYPE_F16;
    const auto type    = is_half ? GGML_TYPE_F16 : GGML_TYPE_F32;

    ggml_tensor * args[] = { q, input.rot, live.first, live.second };
    ggml_tensor * t = ggml_custom_4d(ctx, type, k*(n_embd_k + n_embd_v), 1, 1, 1, args, 4, is_half ? recall<ggml_fp16_t> : recall<float>,
            GGML_N_TASKS_MAX, layer);
    // what another machine's device says it can do, it may not
    ggml_backend_sched_set_tensor_backend(graph.sched, t, graph.backend_cpu);
    ggml_build_forward_expand(graph.gf, t);

    // the last k cells
    const auto write = [&](ggml_tensor * cache, int64_t n_embd, int64_t first) {
        ggml_tensor * from = ggml_view_2d(ctx, t, n_embd, k, ggml_row_size(type, n_embd), first*ggml_type_size(type));
        ggml_tensor * to   = ggml_view_2d(ctx, cache, n_embd, k, cache->nb[1], (l.n_cell - k)*cache->nb[1]);
        ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, from, to));
    };

    write(l.k, n_embd_k, 0);
    if (!kvtool->v_trans) {
        write(l.v, n_embd_v, k*n_embd_k);
        return;
    }

    const size_t one = ggml_type_size(l.v->type);

    ggml_tensor * from = ggml_view_2d(ctx, t,   k, n_embd_v, ggml_row_size(type, k), k*n_embd_k*ggml_type_size(type));
    ggml_tensor * to   = ggml_view_2d(ctx, l.v, k, n_embd_v, l.n_cell*one, (l.n_cell - k)*one);
    ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, from, to));
}
