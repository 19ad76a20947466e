#include "state.h"

#include "error.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

using namespace kvtool;

//
// enable
//

// why these parameters cannot be; empty: they can
static std::string invalid(const llama_kvtool_params & params) {
    if (params.signals >> llama_kvtool_graph::n_signal) {
        return format("signals must be in 0..%u, got %u", (1u << llama_kvtool_graph::n_signal) - 1, params.signals);
    }
    if (params.group > LLAMA_KVTOOL_GROUP_FIRST) {
        return format("group must be in 0..%d, got %u", LLAMA_KVTOOL_GROUP_FIRST, params.group);
    }
    if (params.n_query < 1) {
        return format("n_query must be 1 or more, got %d", params.n_query);
    }
    if (params.n_recall < 0 || (params.n_recall > 0 && params.ragged)) {
        return format("n_recall must be 0 or more, and 0 where rows are ragged, got %d", params.n_recall);
    }
    if (params.n_recall > 0 && params.n_bit != 0 && params.n_bit != 4 && params.n_bit != 8) {
        return format("n_bit must be 0, 4 or 8, got %d", params.n_bit);
    }

    return {};
}

// why this context cannot be used; empty: it can
std::string llama_kvtool::unsupported(const llama_context & lctx) {
    const auto & hparams = lctx.model.hparams;

    const llama_kv_cache * kv = cache(lctx);

    if (!kv) {
        return "this model has no plain KV cache (recurrent or hybrid memory)";
    }
    if (kv->layers.empty()) {
        return "all layers of this model attend through a sliding window";
    }
    for (const llama_kv_cache * one : { kv, (const llama_kv_cache *) sliding_cache(lctx) }) {
        if (one && one->other) {
            return "this model shares the KV cache of another context";
        }
        if (one && one->map_layer_ids.size() != one->layers.size()) {
            return "layers of this model share keys and values";
        }
    }
    if (kv->n_stream != 1) {
        return "the context must have one sequence (n_seq_max = 1)";
    }
    if (hparams.is_mla()) {
        return "this model compresses its KV cache (MLA)";
    }
    if (hparams.use_alibi) {
        return "this model biases attention by position (ALiBi)";
    }
    if (hparams.n_pos_per_embd() > 1) {
        return "this model has several positions per token (M-RoPE)";
    }
    for (const auto & layer : kv->layers) {
        if (!layer.k || !layer.v) {
            return "a layer of this model has no keys or no values in its KV cache";
        }
    }

    return {};
}

// why these parameters' archive cannot be of this cache; empty: it can
std::string llama_kvtool::no_archive(const llama_hparams & hparams, const llama_kv_cache & kv, const llama_kvtool_params & params) {
    if (params.n_near < 1 || (uint32_t) params.n_near > hparams.n_ctx_train) {
        return format("n_near must be in 1..%u, got %d", hparams.n_ctx_train, params.n_near);
    }
    for (const int32_t type : { params.type_k, params.type_v }) {
        if (type < 0 || type >= GGML_TYPE_COUNT || (type != GGML_TYPE_F32 && !ggml_get_type_traits((ggml_type) type)->from_float_ref)) {
            return format("keys and values of type %d cannot be archived", type);
        }
    }
    for (const auto & layer : kv.layers) {
        const int64_t n_k = hparams.n_embd_head_k(layer.il);
        const int64_t n_v = hparams.n_embd_head_v(layer.il);

        if (n_k % ggml_blck_size((ggml_type) params.type_k) != 0 || n_v % ggml_blck_size((ggml_type) params.type_v) != 0) {
            return format("heads of %d and %d numbers are not archived as %s; choose f16",
                    (int) n_k, (int) n_v, ggml_type_name((ggml_type) params.type_k));
        }
        if (params.n_bit > 0 && n_k % 8 != 0) {
            return format("an index is for keys of a multiple of 8 numbers, not %d; choose by keys", (int) n_k);
        }
        if (params.n_recall >= layer.k->ne[1]) {
            return format("n_recall must be less than the %d cells, got %d", (int) layer.k->ne[1], params.n_recall);
        }
    }

    return {};
}

int32_t llama_kvtool::enable(llama_context & lctx, const llama_kvtool_params & params) {
    auto why = lctx.kvtool ? lctx.kvtool->broken : std::string();
    if (why.empty()) {
        why = invalid(params);
    }
    if (why.empty()) {
        why = unsupported(lctx);
    }
    if (!why.empty()) {
        return fail(why);
    }

    const auto & hparams = lctx.model.hparams;

    auto * kv = cache(lctx);

    const uint32_t n_cell = kv->layers[0].k->ne[1];
    for (const auto & layer : kv->layers) {
        if (!params.ragged && (uint32_t) layer.k->ne[1] != n_cell) {
            return fail("the layers have different numbers of cells, which is for ragged rows only");
        }
    }

    if (params.n_recall > 0) {
        const auto why = no_archive(hparams, *kv, params);
        if (!why.empty()) {
            return fail(why);
        }
    }

    auto res = std::make_shared<llama_kvtool>(params);

    res->v_trans = kv->v_trans;

    for (const auto & layer : kv->layers) {
        const int n_head = hparams.n_head_kv(layer.il);

        res->layers.push_back({ (int) layer.il, n_head, res->n_row, (int) layer.k->ne[1], layer.k, layer.v });
        res->layer_of_row.insert(res->layer_of_row.end(), n_head, layer.il);
        res->n_row += n_head;
    }
    if (const auto * swa = sliding_cache(lctx)) {
        for (const auto & layer : swa->layers) {
            res->sliding.push_back({ (int) layer.il, (int) hparams.n_head_kv(layer.il), 0, (int) layer.k->ne[1], layer.k, layer.v });
        }
    }

    res->live.resize(res->n_row);
    res->signals.resize();

    if (params.n_recall > 0) {
        res->archive.make(*res, lctx);
        for (size_t i = 0; i < res->layers.size(); ++i) {
            const size_t n = (size_t) res->layers[i].n_head*params.n_recall;
            res->recalled.push_back({ res.get(), i, 0.0f, std::vector<int64_t>(n, -1) });
        }
    }

    recent::rings rings;
    if (!res->recent.make(rings, res->layer_cells().data())) {
        return fail(format("no memory for the attention of the last %d queries", params.n_query));
    }
    res->recent.take(std::move(rings));

    lctx.synchronize();

    lctx.memory->clear(false);
    if (!params.ragged && kv->v_cells[0].size() != n_cell) {
        // the table does not know the sizes that ragged rows had
        kv->v_cells[0].resize(n_cell);
    }

    lctx.kvtool         = std::move(res);
    lctx.cparams.kvtool = lctx.kvtool.get();

    lctx.sched_need_reserve = true;

    return lctx.kvtool->n_row;
}

llama_kvtool * llama_kvtool::get(const llama_context * ctx) {
    if (!ctx || !ctx->kvtool) {
        fail("call llama_kvtool_enable on this context first");
        return nullptr;
    }
    if (!ctx->kvtool->broken.empty()) {
        fail(ctx->kvtool->broken);
        return nullptr;
    }
    return ctx->kvtool.get();
}

//
// counts
//

const layer * llama_kvtool::find(int il) const {
    const auto it = std::find_if(layers.begin(), layers.end(), [&](const layer & l) { return l.il == il; });
    return it == layers.end() ? nullptr : &*it;
}

bool llama_kvtool::has_keys(const ggml_tensor * k) const {
    return std::any_of(layers.begin(), layers.end(), [&](const layer & l) { return l.k == k->view_src; });
}

int llama_kvtool::most_cells() const {
    int res = 0;
    for (const auto & l : layers) {
        res = std::max(res, l.n_cell);
    }
    return res;
}

int llama_kvtool::most_live(const layer & l) const {
    return *std::max_element(live.begin() + l.row_0, live.begin() + l.row_0 + l.n_head);
}

std::vector<int> llama_kvtool::layer_cells() const {
    std::vector<int> res;
    for (const auto & l : layers) {
        res.push_back(l.n_cell);
    }
    return res;
}

std::vector<int> llama_kvtool::row_cells() const {
    std::vector<int> res;
    for (const auto & l : layers) {
        res.insert(res.end(), l.n_head, l.n_cell);
    }
    return res;
}

int64_t llama_kvtool::n_bytes() const {
    int64_t res = 0;
    for (const auto * some : { &layers, &sliding }) {
        for (const auto & l : *some) {
            res += ggml_nbytes(l.k) + ggml_nbytes(l.v);
        }
    }
    return res;
}

int32_t llama_kvtool::n_dim() const {
    int32_t res = 0;
    for (const auto & l : layers) {
        res = std::max<int32_t>(res, l.k->ne[0]/l.n_head);
    }
    return res;
}

int32_t llama_kvtool::n_swa() const {
    return sliding.empty() ? 0 : sliding[0].n_cell;
}

void llama_kvtool::decoded(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens) {
    signals.extract(lctx, graph, n_tokens);
    recent.decoded(n_tokens);

    if (params.ragged) {
        for (int32_t & n : live) {
            n += n_tokens;
        }
    }
    n_seen += n_tokens;
}

//
// copies
//

int64_t llama_kvtool::copy_cells(llama_context & lctx, const layer & l, uint8_t * out, const uint8_t * in, int n) const {
    const size_t size_k = l.k->nb[1]*n;
    const size_t size_v = l.v->nb[1]*n;

    if ((!out && !in) || n == 0) {
        return size_k + size_v;
    }
    lctx.synchronize();

    if (out) {
        ggml_backend_tensor_get(l.k, out, 0, size_k);
    } else {
        ggml_backend_tensor_set(l.k, in, 0, size_k);
    }

    if (!v_trans) {
        if (out) {
            ggml_backend_tensor_get(l.v, out + size_k, 0, size_v);
        } else {
            ggml_backend_tensor_set(l.v, in + size_k, 0, size_v);
        }
        return size_k + size_v;
    }

    // the bytes must not depend on how the device stores V
    const size_t  one    = ggml_type_size(l.v->type);
    const int64_t n_embd = l.v->ne[0];

    std::vector<uint8_t> tmp(size_v);

    const auto transpose = [one](const uint8_t * src, uint8_t * dst, int64_t n_src, int64_t n_dst) {
        for (int64_t a = 0; a < n_src; ++a) {
            for (int64_t b = 0; b < n_dst; ++b) {
                memcpy(dst + (b*n_src + a)*one, src + (a*n_dst + b)*one, one);
            }
        }
    };

    if (out) {
        ggml_backend_tensor_get_2d(l.v, tmp.data(), 0, one*n, n_embd, one*l.n_cell, one*n);
        transpose(tmp.data(), out + size_k, n_embd, n);
    } else {
        transpose(in + size_k, tmp.data(), n, n_embd);
        ggml_backend_tensor_set_2d(l.v, tmp.data(), 0, one*n, n_embd, one*l.n_cell, one*n);
    }

    return size_k + size_v;
}

int64_t llama_kvtool::copy_swa(
        llama_context & lctx, int32_t * table_out, uint8_t * out, const int32_t * table_in, const uint8_t * in) const {
    int64_t res = 0;
    for (const auto & l : sliding) {
        res += copy_cells(lctx, l, out ? out + res : nullptr, in ? in + res : nullptr, l.n_cell);
    }

    auto * kv = sliding_cache(lctx);

    if (!kv) {
        return res;
    }

    auto & cells = kv->v_cells[0];

    if (table_out) {
        *table_out++ = kv->v_heads[0];
        for (uint32_t c = 0; c < cells.size(); ++c) {
            *table_out++ = cells.is_empty(c) ? -1 : cells.pos_get(c);
        }
    }
    if (table_in) {
        cells.reset();
        kv->v_heads[0] = *table_in++;
        for (uint32_t c = 0; c < cells.size(); ++c, ++table_in) {
            if (*table_in >= 0) {
                cells.pos_set(c, *table_in);
                cells.seq_add(c, 0);
            }
        }
    }

    return res;
}

//
// llama.cpp's own
//

llama_kv_cache * llama_kvtool::cache(const llama_context & lctx) {
    if (auto * both = dynamic_cast<llama_kv_cache_iswa *>(lctx.memory.get())) {
        return both->get_base();
    }
    return dynamic_cast<llama_kv_cache *>(lctx.memory.get());
}

llama_kv_cache * llama_kvtool::sliding_cache(const llama_context & lctx) {
    auto * both = dynamic_cast<llama_kv_cache_iswa *>(lctx.memory.get());
    return both ? both->get_swa() : nullptr;
}

std::vector<ggml_backend_t> & llama_kvtool::backends(llama_context & lctx) {
    return lctx.backend_ptrs;
}

std::vector<ggml_backend_buffer_type_t> & llama_kvtool::backend_bufts(llama_context & lctx) {
    return lctx.backend_buft;
}

const std::vector<float> & llama_kvtool::key_rotation(const llama_kv_cache & kv, int64_t n) {
    return kv.attn_rot_hadamard.at(n);
}

int llama_kvtool::key_map(const llama_kv_cache & kv) {
    int n = 0;
    for (int i = 64; kv.attn_rot_k && kv.n_embd_head_k_all % i == 0; i *= 2) {
        n = i;
    }
    return n;
}

void llama_kvtool::fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden) {
    auto & cells = kv.v_cells[0];

    const llama_pos last = pos_0 + n - 1;

    // after an eviction all but the last cell may keep their positions. A table made anew, with its sets and maps, costs
    // as much as the moves of a few cells
    bool stay = n > 0;
    for (int i = 0; stay && i < n - 1; ++i) {
        stay = !cells.is_empty(i) && cells.seq_has(i, i < n_hidden) && cells.pos_get(i) < last;
    }
    if (stay) {
        for (int i = cells.used_max_p1() - 1; i >= n - 1; --i) {
            if (!cells.is_empty(i)) {
                cells.rm(i);
            }
        }
    } else {
        cells.reset();
    }
    for (int i = stay ? n - 1 : 0; i < n; ++i) {
        cells.pos_set(i, pos_0 + i);
        cells.seq_add(i, i < n_hidden);
    }
    kv.v_heads[0] = n;
}

int llama_kvtool::n_used(const llama_kv_cache & kv) const {
    const auto & cells = kv.v_cells[0];

    int n = std::min<int>(cells.used_max_p1(), cells.size() - params.n_recall);
    while (n > 0 && cells.is_empty(n - 1)) {
        --n;
    }
    return n;
}

void llama_kvtool::fill_recalled(llama_kv_cache & kv) const {
    auto & cells = kv.v_cells[0];

    // beside no other token they would say which position comes next
    const int n = n_used(kv) > 0 && cells.seq_has(n_used(kv) - 1, 0) ? std::min<int>(params.n_recall, archive.size()) : 0;
    for (int i = 0; i < params.n_recall; ++i) {
        const int c = cells.size() - params.n_recall + i;
        if (i < n && cells.is_empty(c)) {
            cells.pos_set(c, 0);
            cells.seq_add(c, 0);
        } else if (i >= n && !cells.is_empty(c)) {
            cells.rm(c);
        }
    }
}

void llama_kvtool::forget_graphs(llama_context & lctx, bool reserve) {
    for (auto & res : lctx.gf_res_prev) {
        res.reset();
    }
    lctx.gf_res_prev_active = nullptr;
    lctx.sched_need_reserve = reserve;
}

std::vector<int> llama_kvtool::shift_swa(llama_kv_cache & kv, int delta) {
    auto & cells = kv.v_cells[0];

    std::vector<int> res;

    if (delta == 0 || cells.get_used() == 0) {
        return res;
    }

    for (uint32_t c = 0; c < cells.size(); ++c) {
        if (!cells.is_empty(c) && !cells.pos_add(c, delta)) {
            res.push_back(c);
        }
    }
    cells.reset_shift();

    return res;
}
