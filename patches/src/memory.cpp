// llama.cpp's own memory: which of its kinds a model has, and the tables of its cells.

#include "state.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>

using namespace kvtool;

static llama_kv_cache_iswa * sliding_pair(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn();
    }
    return dynamic_cast<llama_kv_cache_iswa *>(memory);
}

static llama_kv_cache_dsa * indexed_pair(llama_memory_i * memory) {
    if (auto * both = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        return both->get_dsa();
    }
    return dynamic_cast<llama_kv_cache_dsa *>(memory);
}

llama_kv_cache * llama_kvtool::cache(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * both = sliding_pair(memory)) {
        return both->get_base();
    }
    if (auto * both = indexed_pair(memory)) {
        return both->get_mla();
    }
    if (auto * both = dynamic_cast<llama_kv_cache_msa *>(memory)) {
        return both->get_base();
    }
    return dynamic_cast<llama_kv_cache *>(memory);
}

llama_kv_cache * llama_kvtool::sliding_cache(llama_memory_i * memory) {
    if (auto * both = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        return both->get_swa();
    }
    auto * both = sliding_pair(memory);
    return both ? both->get_swa() : nullptr;
}

llama_kv_cache * llama_kvtool::index_cache(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        return hybrid->get_mem_idx();
    }
    if (auto * both = dynamic_cast<llama_kv_cache_msa *>(memory)) {
        return both->get_idx();
    }
    auto * both = indexed_pair(memory);
    return both ? both->get_lid() : nullptr;
}

llama_memory_recurrent * llama_kvtool::recurrent(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

llama_kv_cache         * llama_kvtool::cache        (const llama_context & lctx) { return cache        (lctx.memory.get()); }
llama_kv_cache         * llama_kvtool::sliding_cache(const llama_context & lctx) { return sliding_cache(lctx.memory.get()); }
llama_kv_cache         * llama_kvtool::index_cache  (const llama_context & lctx) { return index_cache  (lctx.memory.get()); }
llama_memory_recurrent * llama_kvtool::recurrent    (const llama_context & lctx) { return recurrent    (lctx.memory.get()); }

std::string llama_kvtool::unsupported(const llama_model & model, llama_memory_i * memory) {
    const auto & hparams = model.hparams;

    const auto * kv = cache(memory);

    if (!memory) {
        return "this model keeps nothing from one token to the next (an encoder, or diffusion)";
    }
    if (!kv && dynamic_cast<llama_memory_recurrent *>(memory)) {
        return "all layers of this model are recurrent: its memory does not grow, and needs no kvtool";
    }
    if (!kv) {
        return "this model attends to compressed tokens, several in a cell";
    }
    if (hparams.ple_ngram_size > 0) {
        return "this model reads the tokens before one from llama.cpp's own table of cells";
    }
    if (kv->layers.empty()) {
        return "all layers of this model attend through a sliding window: its cache does not grow, and needs no kvtool";
    }
    if (!hparams.causal_attn) {
        return "this model attends to later tokens";
    }
    if (llama_model_has_encoder(&model)) {
        return "this model has an encoder";
    }
    if (hparams.router_layer >= 0) {
        return "a layer of this model routes by what is in its cache";
    }
    return {};
}

int llama_kvtool::most_indexed(const llama_model & model, llama_memory_i * memory) {
    const auto & hparams = model.hparams;

    if (!index_cache(memory)) {
        return INT32_MAX;
    }
    // blocks of tokens, or tokens
    const bool is_blocks = dynamic_cast<llama_kv_cache_msa *>(memory) != nullptr;

    return std::min<int64_t>((int64_t) hparams.indexer_top_k*(is_blocks ? hparams.indexer_block_size : 1), INT32_MAX);
}

std::vector<llama_kvtool_layer> llama_kvtool::describe(const llama_model & model, llama_memory_i * memory) {
    const auto & hparams = model.hparams;

    std::vector<llama_kvtool_layer> res;

    const auto add_cache = [&](const llama_kv_cache * kv, llama_kvtool_layer_kind kind) {
        for (int il = 0; kv && il < (int) hparams.n_layer_all; ++il) {
            const auto it = kv->map_layer_ids.find(il);
            if (it == kv->map_layer_ids.end() || hparams.n_head_kv(il) == 0) {
                continue;
            }
            const auto & from   = kv->layers[it->second];
            const int    n_head = hparams.n_head_kv(from.il);
            const int    n_v    = from.v ? hparams.n_embd_head_v(from.il) : 0;

            res.push_back({ il, kind, (int) from.il, n_head, (int) from.k->ne[0]/n_head, n_v, 0 });
        }
    };

    add_cache(cache(memory),         LLAMA_KVTOOL_LAYER_ROWS);
    add_cache(sliding_cache(memory), LLAMA_KVTOOL_LAYER_SLIDING);

    if (const auto * kv = index_cache(memory)) {
        for (const auto & from : kv->layers) {
            const int n_v = from.v ? (int) from.v->ne[0] : 0;
            res.push_back({ (int) from.il, LLAMA_KVTOOL_LAYER_INDEX, (int) from.il, 1, (int) from.k->ne[0], n_v, 0 });
        }
    }

    if (const auto * mem = recurrent(memory)) {
        for (int il = 0; il < (int) hparams.n_layer_all; ++il) {
            int64_t n = 0;
            for (const auto * some : { &mem->r_l, &mem->s_l, &mem->p_l }) {
                n += il < (int) some->size() && (*some)[il] ? ggml_nbytes((*some)[il]) : 0;
            }
            if (n > 0) {
                res.push_back({ il, LLAMA_KVTOOL_LAYER_RECURRENT, il, 0, 0, 0, n });
            }
        }
    }

    return res;
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

void llama_kvtool::fill_tables(llama_context & lctx, int n, llama_pos pos_0, int n_hidden) {
    fill_table(*cache(lctx), n, pos_0, n_hidden);

    if (auto * kv = index_cache(lctx)) {
        fill_table(*kv, n, pos_0, n_hidden);
    }
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

void llama_kvtool::set_newest(llama_memory_recurrent & mem, llama_pos pos) {
    if (pos < 0) {
        mem.clear(false);
        return;
    }
    // a context with one sequence has one cell, whose state is its own
    auto & cell = mem.cells[0];
    cell.pos    = pos;
    cell.src    = 0;
    cell.tail   = 0;
    cell.seq_id = { 0 };

    mem.head = 0;
    mem.used = 1;
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
