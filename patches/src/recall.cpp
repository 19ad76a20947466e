// Recall in the decode's graph: each layer chooses, with its own queries, the archived tokens of each row that they attend
// to most, and puts them into the row's last cells, where attention finds them.

#include "choice.h"
#include "convert.h"
#include "hooks.h"
#include "input.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvtool {

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
            if (v_trans && l.n_embd_v > 0 && (i % n_side == n_side - 1 || i == k - 1)) {
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

    auto & kvtool = *layer.kvtool;

    const auto & l = kvtool.archive[layer.i];

    const ggml_tensor * q = dst->src[0];

    const int64_t rot = *(const int32_t *) dst->src[1]->data;

    const auto * most = (const float *) dst->src[2]->data;
    const auto * prob = (const float *) dst->src[3]->data;

    const int k     = kvtool.params.n_recall;
    const int n_gqa = q->ne[1]/l.n_head;

    T * to_k = (T *) dst->data;
    T * to_v = to_k + (size_t) k*l.n_head*l.n_embd_k;

    choice       one(kvtool.archive, layer.i, rot, kvtool.work, ith, nth);
    gathering<T> all { l, kvtool.archive.turns_of(layer.i), k, kvtool.v_trans, to_k, to_v };

    if (kvtool.archive.size() > k) {
        if (ith == 0) {
            one.make_room(n_gqa*q->ne[2]);
        }
        kvtool.work.meet(nth);

        std::vector<float> queries;
        std::vector<float> live;

        for (int head = 0; head < l.n_head; ++head) {
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
            one.set_scores(head, queries, live, layer.scale);
        }
        kvtool.work.meet(nth);
    }

    for (int head = ith; head < l.n_head; head += nth) {
        const auto & chosen = one.choose(head, k);
        std::fill_n(std::copy(chosen.begin(), chosen.end(), layer.chosen.begin() + head*k), k - chosen.size(), -1);
        all.copy(head, one, chosen, rot);
    }
}

// of each query's products with the live cells the highest one, and its probability beside them and the attention sink: both
// [1, 1, n_tokens*n_head]
static std::pair<ggml_tensor *, ggml_tensor *> live_logits(
        const llm_graph_context & graph, const llama_kvtool & kvtool, const layer & l, ggml_tensor * q, ggml_tensor * mask,
        ggml_tensor * sinks, float scale) {
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
    ggml_soft_max_add_sinks(p, sinks);
    ggml_tensor * at = ggml_reshape_2d(ctx, ggml_argmax(ctx, ggml_reshape_2d(ctx, p, n_live, n_row)), 1, n_row);

    const auto highest = [&](ggml_tensor * t) { return ggml_get_rows(ctx, ggml_reshape_3d(ctx, t, 1, n_live, n_row), at); };

    return { highest(kq), highest(p) };
}

} // namespace kvtool

using namespace kvtool;

void llama_kvtool_recall(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale, int il) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || kvtool->archive.size() == 0 || !kvtool->find(il)) {
        return;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);

    const size_t  i = &l - kvtool->layers.data();
    const int64_t k = kvtool->params.n_recall;

    const int64_t n_embd_k = l.k->ne[0];
    const int64_t n_embd_v = l.v ? l.v->ne[0] : 0;

    auto & input = graph_input(graph);
    if (!input.rot) {
        input.rot = new_input(ctx, GGML_TYPE_I32, 1, 1, 1);
    }

    const auto live = live_logits(graph, *kvtool, l, q, mask, sinks, scale);

    auto * layer = const_cast<recalled_layer *>(&kvtool->recalled[i]);
    layer->scale = scale;

    // devices copy to a cache in half precision from the same, and to others from floats
    const bool is_half = l.k->type == GGML_TYPE_F16 && (!l.v || l.v->type == GGML_TYPE_F16);
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
    if (!l.v) {
        return;
    }
    if (!kvtool->v_trans) {
        write(l.v, n_embd_v, k*n_embd_k);
        return;
    }

    const size_t one = ggml_type_size(l.v->type);

    ggml_tensor * from = ggml_view_2d(ctx, t,   k, n_embd_v, ggml_row_size(type, k), k*n_embd_k*ggml_type_size(type));
    ggml_tensor * to   = ggml_view_2d(ctx, l.v, k, n_embd_v, l.n_cell*one, (l.n_cell - k)*one);
    ggml_build_forward_expand(graph.gf, ggml_cpy(ctx, from, to));
}
