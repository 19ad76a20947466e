// The signals in the decode's graph: each layer's attention probabilities, reduced to a few floats per row and cell.

#include "probes.h"

#include "reduce-middle.h"
#include "hooks/hooks.h"
#include "hooks/input.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-hparams.h"

#include <algorithm>
#include <cmath>

using namespace kvtool;

ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->params.logn || !kvtool->has_keys(k)) {
        return q;
    }

    auto & scale = graph_input(graph).scale;
    if (!scale) {
        scale = new_input(graph.ctx0, GGML_TYPE_F32, 1, 1, q->ne[2]);
    }

    return ggml_mul(graph.ctx0, q, scale);
}

namespace kvtool {

bool is_maximum(int s) {
    return 1u << s == LLAMA_KVTOOL_SIGNAL_IMPORTANT || 1u << s == LLAMA_KVTOOL_SIGNAL_HIGHEST;
}

ggml_tensor * probabilities(
        ggml_context * ctx, const llama_hparams & hparams, bool is_grok, ggml_tensor * k, ggml_tensor * q, ggml_tensor * mask,
        ggml_tensor * sinks, float scale) {
    ggml_tensor * p = ggml_mul_mat(ctx, k, q);
    ggml_prec_set_acc(p, GGML_PREC_F32);

    if (hparams.attn_soft_cap || is_grok) {
        const float cap    = hparams.f_attn_logit_softcapping;
        const float factor = is_grok ? hparams.f_attn_out_scale : 1.0f;
        p = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, p, factor/cap)), cap);
    }

    p = ggml_soft_max_ext(ctx, p, mask, scale, hparams.f_max_alibi_bias);
    ggml_soft_max_add_sinks(p, sinks);

    return p;
}

reducer::reducer(ggml_context * ctx, const llama_kvtool_params & params, ggml_tensor * p, int64_t n_head_kv, ggml_tensor * n_seen)
    : ctx(ctx), params(params), p(p), n_kv(p->ne[0]), n_tokens(p->ne[1]), n_head_kv(n_head_kv), n_gqa(p->ne[2]/n_head_kv) {
    // for LLAMA_KVTOOL_GROUP_SUM, the sum over heads is not computed here, but together with the sum over queries
    a = params.group == LLAMA_KVTOOL_GROUP_SUM || n_gqa == 1 ? p : reduce_group(params.group);

    if (params.signals & (LLAMA_KVTOOL_SIGNAL_HITS | LLAMA_KVTOOL_SIGNAL_IMPORTANT)) {
        // 1 where p >= 1/n_seen, otherwise 0
        hit = ggml_scale_bias(ctx, ggml_step(ctx, ggml_scale_bias(ctx, ggml_mul(ctx, p, n_seen), -1.0f, 1.0f)), -1.0f, 1.0f);
    }
}

// Return the last n queries of t as [n_kv, n*h, n_head_kv]. h: number of heads in a group, or 1 if t is already reduced
// to one value per group
ggml_tensor * reducer::last_queries(ggml_tensor * t, int64_t n) const {
    const int64_t h = t->ne[2]/n_head_kv;
    if (n < n_tokens) {
        t = ggml_cont(ctx, ggml_view_3d(ctx, t, n_kv, n, t->ne[2], t->nb[1], t->nb[2], (n_tokens - n)*t->nb[1]));
    }
    return ggml_reshape_3d(ctx, t, n_kv, n*h, n_head_kv);
}

// the last n queries, summed over the group's heads: [n_kv, n, n_head_kv]
ggml_tensor * reducer::per_query(ggml_tensor * t, int64_t n) const {
    const int64_t h = t->ne[2]/n_head_kv;
    t = ggml_reshape_3d(ctx, last_queries(t, n), n_kv*n, h, n_head_kv);
    return h == 1 ? ggml_reshape_3d(ctx, t, n_kv, n, n_head_kv) : ggml_reshape_3d(ctx, sum_middle(ctx, t), n_kv, n, n_head_kv);
}

// [n_kv, n_tokens, n_head] -> [n_kv, n_tokens, n_head_kv]
ggml_tensor * reducer::reduce_group(uint32_t group) const {
    ggml_tensor * t = ggml_reshape_3d(ctx, p, n_kv*n_tokens, n_gqa, n_head_kv);
    switch (group) {
        case LLAMA_KVTOOL_GROUP_MAX:   t = max_middle(ctx, t); break;
        case LLAMA_KVTOOL_GROUP_FIRST: t = ggml_cont(ctx, ggml_view_3d(ctx, t, t->ne[0], 1, n_head_kv, t->nb[1], t->nb[2], 0)); break;
        default:                       t = sum_middle(ctx, t); break;
    }
    return ggml_reshape_3d(ctx, t, n_kv, n_tokens, n_head_kv);
}

ggml_tensor * reducer::signal(int s) const {
    switch (1u << s) {
        case LLAMA_KVTOOL_SIGNAL_LAST:    return sum_middle(ctx, last_queries(a, 1));
        case LLAMA_KVTOOL_SIGNAL_RECENT:  return per_query(a, std::min<int64_t>(params.n_query, n_tokens));
        case LLAMA_KVTOOL_SIGNAL_SQUARES: return per_query(a, n_tokens);
        case LLAMA_KVTOOL_SIGNAL_HITS:    return sum_middle(ctx, last_queries(hit, n_tokens));
        case LLAMA_KVTOOL_SIGNAL_HIGHEST: return max_middle(ctx, last_queries(p, n_tokens));
        case LLAMA_KVTOOL_SIGNAL_IMPORTANT: {
            ggml_tensor * order = ggml_reshape_2d(ctx, ggml_arange(ctx, 1, n_tokens + 1, 1), 1, n_tokens);
            return max_middle(ctx, last_queries(ggml_mul(ctx, hit, order), n_tokens));
        }
        default:                          return sum_middle(ctx, last_queries(a, n_tokens));
    }
}

ggml_tensor * reducer::finished(int s, ggml_tensor * t) const {
    return 1u << s == LLAMA_KVTOOL_SIGNAL_SQUARES ? sum_middle(ctx, ggml_sqr(ctx, t)) : t;
}

} // namespace kvtool

// slots: input of the graph; created here if it is null
static void store_queries(
        const llm_graph_context & graph, stored_queries & dst, ggml_tensor * & slots, int64_t n, ggml_tensor * q, float scale,
        ggml_tensor * sinks, int il) {
    if (!slots) {
        slots = new_input(graph.ctx0, GGML_TYPE_I64, n, 1, 1);
    }
    ggml_build_forward_expand(graph.gf, dst.build(graph.ctx0, il, q, slots, scale, sinks));
}

void llama_kvtool_add_signals(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) {
    auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->is_watching || !kvtool->has_keys(k)) {
        return;
    }

    const auto & params = kvtool->params;

    ggml_context * ctx = graph.ctx0;

    const int64_t n_tokens = q->ne[1];

    if (kvtool->queries.is_on()) {
        store_queries(graph, kvtool->queries, graph_input(graph).query_slots, std::min<int64_t>(kvtool->queries.n_slot(), n_tokens), q, kq_scale, sinks, il);
    }
    if (params.signals == 0) {
        return;
    }

    const bool is_deferred = kvtool->defers(n_tokens);

    graph.res->kvtool.is_deferred   = is_deferred;
    graph_input(graph).is_deferred = is_deferred;

    if (is_deferred) {
        store_queries(graph, kvtool->deferred, graph_input(graph).deferred_slots, n_tokens, q, kq_scale, sinks, il);
        return;
    }
    if (!p) {
        p = probabilities(ctx, graph.hparams, graph.arch == LLM_ARCH_GROK, k, q, kq_mask, sinks, kq_scale);
    }

    const auto & l = *kvtool->find(il);

    const size_t i_layer = &l - kvtool->layers.data();

    // if earlier layers read the same cells, begin with the signals of these layers
    auto & shared = graph.res->kvtool.shared;

    const auto it = std::find_if(shared.begin(), shared.end(), [&](const auto & x) { return x.i == (int) i_layer; });

    llama_kvtool_graph::probe sums = it == shared.end() ? llama_kvtool_graph::probe { (int) i_layer, {} } : *it;
    if (it != shared.end()) {
        shared.erase(it);
    }

    llama_kvtool_graph::probe probe = { (int) i_layer, {} };

    auto & input = graph_input(graph);
    if (!input.n_seen && (params.signals & (LLAMA_KVTOOL_SIGNAL_HITS | LLAMA_KVTOOL_SIGNAL_IMPORTANT))) {
        input.n_seen = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, 1);
    }
    const reducer reduced(ctx, params, p, k->ne[2], input.n_seen);

    for (int s = 0; s < llama_kvtool_graph::n_signal; ++s) {
        if (!(params.signals >> s & 1)) {
            continue;
        }
        ggml_tensor * t = reduced.signal(s);
        if (sums.t[s]) {
            t = is_maximum(s) ? max_of(ctx, sums.t[s], t) : ggml_add(ctx, sums.t[s], t);
        }
        if (il < l.il_last) {
            // Add the sum to the graph now. The probabilities of this layer can then be freed before the next layer's
            // probabilities are computed
            sums.t[s] = t;
            ggml_build_forward_expand(graph.gf, t);
            continue;
        }
        if (1u << s == LLAMA_KVTOOL_SIGNAL_RECENT) {
            if (!input.recent_slots) {
                input.recent_slots = new_input(ctx, GGML_TYPE_I64, t->ne[1], 1, 1);
            }
            ggml_build_forward_expand(graph.gf, kvtool->recent.build(ctx, i_layer, t, input.recent_slots));
            continue;
        }
        t = reduced.finished(s, t);
        if (ggml_tensor * sum = kvtool->signals.build_sum(ctx, i_layer, s, t, n_tokens)) {
            ggml_build_forward_expand(graph.gf, sum);
            continue;
        }
        // The host reads t after the graph is computed, so the memory of t must not be reused. If t is a view, its
        // memory belongs to the viewed tensor
        for (ggml_tensor * x = t; x; x = x->view_src) {
            ggml_set_output(x);
        }
        ggml_build_forward_expand(graph.gf, t);
        probe.t[s] = t;
    }

    if (il >= l.il_last) {
        graph.res->kvtool.probes.push_back(probe);
    } else {
        shared.push_back(sums);
    }
}

void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens) {
    if (res.kvtool.joint) {
        for (size_t i = 0; i < res.kvtool.joint->parts.size(); ++i) {
            const auto & part = *res.kvtool.joint->parts[i];
            res.kvtool.joint->state.members[i].lctx->kvtool->decoded(lctx, part.res->kvtool, part.n);
        }
    } else if (lctx.kvtool) {
        lctx.kvtool->decoded(lctx, res.kvtool, n_tokens);
    }
}

uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens) {
    if (!kvtool) {
        return 0;
    }

    const auto & params = kvtool->params;

    const bool has_hits = (params.signals & (LLAMA_KVTOOL_SIGNAL_HITS | LLAMA_KVTOOL_SIGNAL_IMPORTANT)) != 0;

    // this bound must be tight, because ggml and its scheduler allocate about a kilobyte for each node that it allows
    uint32_t res = kvtool->joint ? kvtool->joint->n_member_max*kvtool->joint->n_node_member : 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const auto n_halving = [&](uint32_t n) { return (uint32_t) std::log2(std::max(1u, n*hparams.n_gqa(il))); };

        // with attention sinks, each KV head needs a separate flash attention, with views of its inputs
        const uint32_t n_per_head = 8*hparams.n_head_kv(il);

        // Number of nodes, term by term: probabilities (only with flash attention) and scaled queries; signals that are
        // combined over several layers; ragged rows; ALiBi; recall; residents; signals that count hits
        res += 8 + 4*llama_kvtool_graph::n_signal + (params.ragged ? 24 + n_per_head : 0) + (hparams.use_alibi ? 14 : 0) + (params.n_recall > 0 ? 30 : 0) +
            (kvtool->resident ? 24 + n_per_head : 0) + (has_hits ? 8 : 0);
        for (int s = 0; s < llama_kvtool_graph::n_signal; ++s) {
            // A halving needs two views and a sum. An odd number of elements needs one more view and one more sum. For
            // a maximum, each sum becomes three operations
            const bool is_max = params.group == LLAMA_KVTOOL_GROUP_MAX || is_maximum(s);

            res += kvtool->signals.has(s) ? (is_max ? 16 + 9*n_halving(n_tokens) : 8 + 5*n_halving(n_tokens)) : 0;
        }
        res += kvtool->queries.is_on() ? 8 : 0;
        res += kvtool->deferred.n_slot > 0 ? 8 : 0;
        if (kvtool->recent.is_on()) {
            // the sum or maximum of the recent signal over the heads of a group
            res += 16 + 9*n_halving(1);
        }
    }

    return res;
}
