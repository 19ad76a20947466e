// Joint steps: their graph, and the context that computes them.

#include "error.h"
#include "joint.h"
#include "memory.h"
#include "state.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

namespace kvtool {

joint_input::joint_input(const joint & state, const llm_graph_context & graph) : state(state) {
    for (const auto & m : state.members) {
        auto part = std::make_unique<member_graph>();

        part->version = m.lctx->kvtool->version;
        part->first   = m.first;
        part->n       = m.n;
        // room for one node is enough, because the member's nodes are created in the step's graph
        part->res     = std::make_unique<llm_graph_result>(1);
        part->params  = llama_kvtool::graph_params(m, part->res.get());

        // the step's scheduler computes the member's tensors
        part->params.sched       = graph.sched;
        part->params.backend_cpu = graph.backend_cpu;
        part->params.cb          = graph.cb_func;

        part->graph       = std::make_unique<llm_graph_context>(part->params);
        part->graph->ctx0 = graph.ctx0;
        part->graph->gf   = graph.gf;

        parts.push_back(std::move(part));
    }
}

void joint_input::set_input(const llama_ubatch *) {
    for (size_t i = 0; i < parts.size(); ++i) {
        parts[i]->res->set_inputs(&state.members[i].mctx->get_ubatch());
    }
}

bool joint_input::can_reuse(const llm_graph_params &) {
    if (state.members.size() != parts.size()) {
        return false;
    }

    bool res = true;

    for (size_t i = 0; res && i < parts.size(); ++i) {
        const auto & m = state.members[i];

        // can_reuse is not only a check: it also gives the new batch to the member's inputs
        res = parts[i]->version == m.lctx->kvtool->version && parts[i]->n == m.n &&
            parts[i]->res->can_reuse(llama_kvtool::graph_params(m, parts[i]->res.get()));
    }

    return res;
}

// create the inputs of a member's attention, of the same kind as the model's own inputs
static llm_graph_input_attn_kv      * new_attn(const llm_graph_context & graph, llm_graph_input_attn_kv      *) { return graph.build_attn_inp_kv();      }
static llm_graph_input_attn_k       * new_attn(const llm_graph_context & graph, llm_graph_input_attn_k       *) { return graph.build_attn_inp_k();       }
static llm_graph_input_attn_kv_iswa * new_attn(const llm_graph_context & graph, llm_graph_input_attn_kv_iswa *) { return graph.build_attn_inp_kv_iswa(); }

// llama.cpp fills these inputs even if nothing reads them, so they must stay in the graph
static void keep_inputs(const llm_graph_context & graph, llm_graph_input_attn_kv * inp) {
    ggml_build_forward_expand(graph.gf, inp->get_kq_mask());
}

static void keep_inputs(const llm_graph_context & graph, llm_graph_input_attn_k * inp) {
    ggml_build_forward_expand(graph.gf, inp->get_kq_mask());
}

static void keep_inputs(const llm_graph_context & graph, llm_graph_input_attn_kv_iswa * inp) {
    for (ggml_tensor * t : { inp->get_kq_mask(), inp->get_kq_mask_swa() }) {
        if (t) {
            ggml_build_forward_expand(graph.gf, t);
        }
    }
}

// mask of the layers without a sliding window
static ggml_tensor * mask_of(const llm_graph_input_attn_kv      * inp) { return inp->get_kq_mask(); }
static ggml_tensor * mask_of(const llm_graph_input_attn_k       * inp) { return inp->get_kq_mask(); }
static ggml_tensor * mask_of(const llm_graph_input_attn_kv_iswa * inp) { return inp->get_kq_mask(); }

template <typename T>
static ggml_tensor * join(
        const llm_graph_context & graph, T * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
        ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) {
    auto * kvtool = graph.cparams.kvtool;

    if (kvtool && kvtool->is_staging()) {
        return llama_kvtool_staged(graph, mask_of(inp), q, v, sinks, v_mla, kq_scale, il);
    }
    if (!kvtool || !kvtool->joint) {
        ggml_tensor * resident = kq_b ? nullptr : llama_kvtool_resident(graph, mask_of(inp), q, sinks, kq_scale, il);
        return kq_b || resident ? resident : llama_kvtool_ragged(graph, mask_of(inp), q, sinks, kq_scale, il);
    }
    if (kvtool->joint->members.empty()) {
        kvtool->joint->layers[il] = !kq_b;
        return nullptr;
    }

    auto & input = graph.res->kvtool.joint;
    if (!input) {
        auto ptr = std::make_unique<joint_input>(*kvtool->joint, graph);
        input = ptr.get();
        graph.res->add_input(std::move(ptr));
    }
    keep_inputs(graph, inp);

    ggml_tensor * res = nullptr;

    for (auto & part : input->parts) {
        const auto tokens_of = [&](ggml_tensor * t) {
            return t ? ggml_view_3d(graph.ctx0, t, t->ne[0], t->ne[1], part->n, t->nb[1], t->nb[2], part->first*t->nb[2]) : nullptr;
        };
        if (!part->attn) {
            part->attn = new_attn(*part->graph, inp);
        }
        ggml_tensor * cur = part->graph->build_attn(
                static_cast<T *>(part->attn), nullptr, nullptr, nullptr, tokens_of(q), tokens_of(k), tokens_of(v), nullptr, sinks, v_mla, kq_scale, il);

        res = res ? ggml_concat(graph.ctx0, res, cur, 1) : cur;
    }

    return res;
}

} // namespace kvtool

using namespace kvtool;

ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_kv * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) {
    return join(graph, inp, q, k, v, kq_b, sinks, v_mla, kq_scale, il);
}

ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_k * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) {
    return join(graph, inp, q, k, v, kq_b, sinks, v_mla, kq_scale, il);
}

ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_kv_iswa * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il) {
    return join(graph, inp, q, k, v, kq_b, sinks, v_mla, kq_scale, il);
}

//
// the context that computes joint steps
//

llm_graph_params llama_kvtool::graph_params(const member & m, llm_graph_result * res) {
    auto params = m.lctx->graph_params(res, m.mctx->get_ubatch(), m.mctx.get(), LLM_GRAPH_TYPE_DEFAULT);
    // the step's graph has the outputs (logits) of all members, so a member's part has no outputs
    params.n_outputs = 0;
    return params;
}

// type of the first K or V tensor that is not F16; GGML_TYPE_F16 if all are
static ggml_type type_of_cells(const llama_context & lctx) {
    for (const llama_kv_cache * kv : { memory::cache(lctx), memory::sliding_cache(lctx) }) {
        if (!kv) {
            continue;
        }
        for (const auto & l : memory::layers(lctx.get_model(), *kv)) {
            for (const ggml_tensor * t : { l.k, l.v }) {
                if (t && t->type != GGML_TYPE_F16) {
                    return t->type;
                }
            }
        }
    }
    return GGML_TYPE_F16;
}

int32_t llama_kvtool::enable_joint(llama_context & lctx, const llama_context & like, int n_member_max) {
    // nodes of a layer's attention, not counting the nodes that kvtool adds
    static constexpr uint32_t n_node_layer = 56;

    llama_kvtool_params params = {};
    params.n_query = 1;

    const auto why_not = [&]() -> const char * {
        if (memory::recurrent(like)) {
            return "recurrent layers";
        }
        if (memory::index_cache(like)) {
            return "an index";
        }
        return nullptr;
    };
    if (const char * why = why_not()) {
        return fail(format("a model with %s takes no joint steps", why));
    }

    // The cells of lctx must not be quantized. Otherwise llama.cpp would multiply queries, keys and values by Hadamard
    // matrices before the members' attention. Members with quantized cells do the same, so the multiplication would be
    // done twice
    if (const ggml_type type = type_of_cells(lctx); type != GGML_TYPE_F16) {
        return fail(format("the cells of a context for joint steps must be f16, got %s", ggml_type_name(type)));
    }

    const auto & hparams       = lctx.model.hparams;
    const auto & member_kvtool = *like.kvtool;

    auto joint = std::make_unique<kvtool::joint>();

    joint->n_member_max  = n_member_max;
    joint->n_node_member = llama_kvtool_n_nodes(hparams, &member_kvtool, member_kvtool.params.n_draft + 1) + n_node_layer*hparams.n_layer();
    joint->layers.resize(hparams.n_layer_all);

    if (enable(lctx, params, std::move(joint)) < 0) {
        return -1;
    }

    const auto & kvtool = *lctx.kvtool;

    for (int il = 0; il < (int) kvtool.index_of_il.size(); ++il) {
        const bool is_sliding = std::any_of(kvtool.sliding.begin(), kvtool.sliding.end(), [&](const layer & l) { return l.il == il; });
        if ((kvtool.find(il) || is_sliding) && !kvtool.joint->layers[il]) {
            return fail(format("layer %d attends in a way that takes no joint steps", il));
        }
    }

    return 0;
}

// reserve cells in a member's memory for the member's tokens in the batch; returns false if the tokens do not fit
bool llama_kvtool::begin(member & m, const llama_batch & batch) {
    llama_batch member_batch = {};

    std::vector<int8_t> no_logits(m.n);

    member_batch.n_tokens = m.n;
    member_batch.token    = batch.token + m.first;
    member_batch.pos      = batch.pos + m.first;
    member_batch.logits   = no_logits.data();

    m.pos_0 = member_batch.pos[0];

    // wait until the member's earlier work has ended
    m.lctx->synchronize();

    llama_batch_compat compat(m.lctx, member_batch);

    if (!m.lctx->balloc->init(*compat.batch_ext, m.lctx->model.vocab, false)) {
        return false;
    }

    m.mctx = m.lctx->memory->init_batch(*m.lctx->balloc, m.lctx->cparams.n_ubatch, false);

    const bool is_ready = m.mctx && m.mctx->get_status() == LLAMA_MEMORY_STATUS_SUCCESS &&
        (int) m.mctx->get_ubatch().n_tokens == m.n && llama_kvtool_prepare(*m.lctx, m.n) && m.mctx->apply();

    // The joint step runs on other queues than the copies of a member's residents, and does not wait for them
    m.lctx->synchronize();

    return is_ready;
}

namespace {

// Marks the contexts that take part in a joint step. The destructor removes the marks. If the step has not finished by
// then, the destructor also removes the step's tokens
class joint_step {
public:
    explicit joint_step(llama_context & lctx) : lctx(lctx), members(lctx.kvtool->joint->members) {}

    ~joint_step() {
        lctx.synchronize();

        for (const auto & m : members) {
            if (m.pos_0 >= 0 && !is_done) {
                llama_memory_seq_rm(llama_get_memory(m.lctx), 0, m.pos_0, -1);
            }
        }
        members.clear();

        // the tokens belong to the members: this context keeps none
        llama_memory_clear(llama_get_memory(&lctx), false);
    }

    joint_step(const joint_step &) = delete;

    bool is_done = false;

    void add(llama_context * lctx, int first, int n) {
        members.push_back({ lctx, first, n, -1, nullptr });
    }

private:
    llama_context & lctx;

    std::vector<member> & members;
};

} // namespace

int32_t llama_kvtool::decode_joint(
        llama_context & lctx, const llama_batch & batch, llama_context ** members, const int32_t * n_tokens, int n_member) {
    auto & joint = *lctx.kvtool->joint;

    joint_step step(lctx);

    int first = 0;
    for (int i = 0; i < n_member; ++i) {
        step.add(members[i], first, n_tokens[i]);
        first += n_tokens[i];
    }

    const bool fits = std::all_of(joint.members.begin(), joint.members.end(), [&](member & m) { return begin(m, batch); });

    const int32_t status = fits ? llama_decode(&lctx, batch) : 1;

    step.is_done = status == 0;

    return status;
}
