#include "memory.h"

#include "llama-context.h"
#include "llama-cparams.h"
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

//
// kinds of memory
//

static llama_kv_cache_iswa * sliding_pair(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn();
    }
    return dynamic_cast<llama_kv_cache_iswa *>(memory);
}

static llama_kv_cache_dsa * indexed_pair(llama_memory_i * memory) {
    if (auto * pair = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        return pair->get_dsa();
    }
    return dynamic_cast<llama_kv_cache_dsa *>(memory);
}

llama_kv_cache * memory::cache(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * pair = sliding_pair(memory)) {
        return pair->get_base();
    }
    if (auto * pair = indexed_pair(memory)) {
        return pair->get_mla();
    }
    if (auto * pair = dynamic_cast<llama_kv_cache_msa *>(memory)) {
        return pair->get_base();
    }
    return dynamic_cast<llama_kv_cache *>(memory);
}

llama_kv_cache * memory::sliding_cache(llama_memory_i * memory) {
    if (auto * pair = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
        return pair->get_swa();
    }
    auto * pair = sliding_pair(memory);
    return pair ? pair->get_swa() : nullptr;
}

llama_kv_cache * memory::index_cache(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        return hybrid->get_mem_idx();
    }
    if (auto * pair = dynamic_cast<llama_kv_cache_msa *>(memory)) {
        return pair->get_idx();
    }
    auto * pair = indexed_pair(memory);
    return pair ? pair->get_lid() : nullptr;
}

llama_memory_recurrent * memory::recurrent(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

llama_kv_cache         * memory::cache        (const llama_context & lctx) { return cache        (lctx.get_memory()); }
llama_kv_cache         * memory::sliding_cache(const llama_context & lctx) { return sliding_cache(lctx.get_memory()); }
llama_kv_cache         * memory::index_cache  (const llama_context & lctx) { return index_cache  (lctx.get_memory()); }
llama_memory_recurrent * memory::recurrent    (const llama_context & lctx) { return recurrent    (lctx.get_memory()); }

std::unique_ptr<llama_memory_i> memory::smallest(const llama_model & model) {
    llama_memory_params params = { GGML_TYPE_F16, GGML_TYPE_F16, false, LLAMA_CONTEXT_TYPE_DEFAULT, nullptr };

    llama_cparams cparams = {};
    cparams.n_ctx_seq  = 1;
    cparams.n_ubatch   = 1;
    cparams.n_seq_max  = 1;
    cparams.kv_unified = true;
    cparams.flash_attn = true;

    return std::unique_ptr<llama_memory_i>(model.create_memory(params, cparams));
}

std::string memory::unsupported(const llama_model & model, llama_memory_i * memory) {
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

std::string memory::unsupported(const llama_context & lctx) {
    const auto why = unsupported(lctx.get_model(), lctx.get_memory());
    if (!why.empty()) {
        return why;
    }

    const auto * kv  = cache(lctx);
    const auto * mem = recurrent(lctx);

    for (const llama_kv_cache * attn_cache : { kv, (const llama_kv_cache *) sliding_cache(lctx) }) {
        if (attn_cache && attn_cache->other) {
            return "this model shares the KV cache of another context";
        }
    }
    if (kv->n_stream != 1 || (mem && mem->size != 1)) {
        return "the context must have one sequence (n_seq_max = 1)";
    }

    return {};
}

bool memory::can_drop(const llama_model & model) {
    const bool is_recurrent = llm_arch_is_recurrent(model.arch) || llm_arch_is_hybrid(model.arch);

    return !is_recurrent || llm_arch_supports_rs_rollback(model.arch);
}

int memory::most_indexed(const llama_model & model, llama_memory_i * memory) {
    const auto & hparams = model.hparams;

    if (!index_cache(memory)) {
        return INT32_MAX;
    }
    // in this kind of memory, indexer_top_k is a number of blocks of tokens; in other kinds it is a number of tokens
    const bool counts_blocks = dynamic_cast<llama_kv_cache_msa *>(memory) != nullptr;

    return std::min<int64_t>((int64_t) hparams.indexer_top_k*(counts_blocks ? hparams.indexer_block_size : 1), INT32_MAX);
}

//
// layers of a memory
//

std::vector<llama_kvtool_layer> memory::describe(const llama_model & model, llama_memory_i * memory) {
    const auto & hparams = model.hparams;

    std::vector<llama_kvtool_layer> res;

    const auto add_cache = [&](const llama_kv_cache * kv, llama_kvtool_layer_kind kind) {
        if (!kv) {
            return;
        }
        const auto cache_layers = layers(model, *kv);
        const auto owner        = owners(model, *kv);

        for (int il = 0; il < (int) owner.size(); ++il) {
            if (owner[il] >= 0 && hparams.n_head_kv(il) > 0) {
                const auto & l = cache_layers[owner[il]];
                res.push_back({ il, kind, l.il, l.n_head, l.n_embd_k, l.n_embd_v, 0 });
            }
        }
    };

    add_cache(cache(memory),         LLAMA_KVTOOL_LAYER_ROWS);
    add_cache(sliding_cache(memory), LLAMA_KVTOOL_LAYER_SLIDING);

    if (const auto * kv = index_cache(memory)) {
        for (const auto & l : index_layers(*kv)) {
            res.push_back({ l.il, LLAMA_KVTOOL_LAYER_INDEX, l.il, 1, l.n_embd_k, l.n_embd_v, 0 });
        }
    }

    if (const auto * mem = recurrent(memory)) {
        for (int il = 0; il < (int) hparams.n_layer_all; ++il) {
            int64_t n = 0;
            for (const auto * states : { &mem->r_l, &mem->s_l, &mem->p_l }) {
                n += il < (int) states->size() && (*states)[il] ? ggml_nbytes((*states)[il]) : 0;
            }
            if (n > 0) {
                res.push_back({ il, LLAMA_KVTOOL_LAYER_RECURRENT, il, 0, 0, 0, n });
            }
        }
    }

    return res;
}

std::vector<layer> memory::layers(const llama_model & model, const llama_kv_cache & kv) {
    const auto & hparams = model.hparams;

    std::vector<layer> res;
    for (const auto & kv_layer : kv.layers) {
        const int il       = kv_layer.il;
        const int n_head   = hparams.n_head_kv(il);
        const int n_embd_v = kv_layer.v ? hparams.n_embd_head_v(il) : 0;

        // some models have layers without attention
        if (n_head > 0) {
            res.push_back({ il, n_head, 0, (int) kv_layer.k->ne[1], kv_layer.k, kv_layer.v, (int) kv_layer.k->ne[0]/n_head, n_embd_v, il });
        }
    }
    return res;
}

std::vector<int> memory::owners(const llama_model & model, const llama_kv_cache & kv) {
    const auto & hparams = model.hparams;

    int n = 0;

    std::vector<int> index; // for each layer of the cache, its index in the result of `layers`; -1 without attention
    for (const auto & kv_layer : kv.layers) {
        index.push_back(hparams.n_head_kv(kv_layer.il) > 0 ? n++ : -1);
    }

    std::vector<int> res(hparams.n_layer_all, -1);
    for (const auto & [il, i] : kv.map_layer_ids) {
        res[il] = index[i];
    }
    return res;
}

std::vector<layer> memory::index_layers(const llama_kv_cache & kv) {
    std::vector<layer> res;
    for (const auto & kv_layer : kv.layers) {
        const int il       = kv_layer.il;
        const int n_embd_v = kv_layer.v ? (int) kv_layer.v->ne[0] : 0;

        res.push_back({ il, 1, 0, (int) kv_layer.k->ne[1], kv_layer.k, kv_layer.v, (int) kv_layer.k->ne[0], n_embd_v, il });
    }
    return res;
}

std::vector<int> memory::layer_cells(const llama_kv_cache & kv) {
    std::vector<int> res;
    for (const auto & layer : kv.layers) {
        res.push_back(layer.k->ne[1]);
    }
    return res;
}

void memory::replace(
        llama_kv_cache & kv, const std::vector<layer> & layers, const layer & l, ggml_tensor * k_stream, ggml_tensor * v_stream,
        ggml_context_ptr ctx, ggml_backend_buffer_ptr buf) {
    auto & kv_layer = kv.layers[kv.map_layer_ids.at(l.il)];

    kv_layer.k = l.k;
    kv_layer.v = l.v;
    kv_layer.k_stream = { k_stream };
    kv_layer.v_stream = { v_stream };

    auto & bufs = kv.ctxs_bufs;

    bufs.emplace_back(std::move(ctx), std::move(buf));
    bufs.erase(std::remove_if(bufs.begin(), bufs.end(), [&](const auto & b) {
        return std::none_of(layers.begin(), layers.end(), [&](const layer & other) {
            return other.k->buffer == b.second.get() || (other.v && other.v->buffer == b.second.get());
        });
    }), bufs.end());
}

bool memory::is_transposed(const llama_kv_cache & kv) {
    return kv.v_trans;
}

const std::vector<float> & memory::key_hadamard(const llama_kv_cache & kv, int64_t n) {
    return kv.attn_rot_hadamard.at(n);
}

int memory::key_map(const llama_kv_cache & kv) {
    int n = 0;
    for (int i = 64; kv.attn_rot_k && kv.n_embd_head_k_all % i == 0; i *= 2) {
        n = i;
    }
    return n;
}

//
// tables of cells
//

void memory::fill_table(llama_kv_cache & kv, int n, llama_pos pos_0, int n_hidden) {
    auto & cells = kv.v_cells[0];

    const llama_pos last_pos = pos_0 + n - 1;

    // Keep the entries if possible: llama.cpp's table contains sets and maps, so writing all entries takes as much time
    // as moving a few cells. Only the last cell needs an exact position; all other cells may have any lower position
    bool keep_entries = n > 0;
    for (int i = 0; keep_entries && i < n - 1; ++i) {
        keep_entries = !cells.is_empty(i) && cells.seq_has(i, i < n_hidden) && cells.pos_get(i) < last_pos;
    }
    if (keep_entries) {
        for (int i = cells.used_max_p1() - 1; i >= n - 1; --i) {
            if (!cells.is_empty(i)) {
                cells.rm(i);
            }
        }
    } else {
        cells.reset();
    }
    for (int i = keep_entries ? n - 1 : 0; i < n; ++i) {
        // pos_0 + i may be negative for hidden cells. Their positions do not matter, because no query sees these cells
        cells.pos_set(i, std::max(pos_0 + i, 0));
        cells.seq_add(i, i < n_hidden);
    }
    kv.v_heads[0] = n;
}

void memory::fill_tables(const llama_context & lctx, int n, llama_pos pos_0, int n_hidden) {
    fill_table(*cache(lctx), n, pos_0, n_hidden);

    if (auto * kv = index_cache(lctx)) {
        fill_table(*kv, n, pos_0, n_hidden);
    }
}

bool memory::resize_tables(const llama_context & lctx, int n_cell, int n_live) {
    if (n_cell == (int) cache(lctx)->v_cells[0].size()) {
        return false;
    }
    const auto old_cells = cache(lctx)->v_cells[0];

    for (auto * kv : { cache(lctx), index_cache(lctx) }) {
        if (!kv) {
            continue;
        }
        auto & cells = kv->v_cells[0];

        cells.resize(n_cell);
        for (int i = 0; i < n_live; ++i) {
            cells.pos_set(i, old_cells.pos_get(i));
            cells.seq_add(i, !old_cells.seq_has(i, 0));
        }
        kv->v_heads[0] = n_live;
    }
    return true;
}

int memory::n_used(const llama_kv_cache & kv, int n_recall) {
    const auto & cells = kv.v_cells[0];

    int n = std::min<int>(cells.used_max_p1(), cells.size() - n_recall);
    while (n > 0 && cells.is_empty(n - 1)) {
        --n;
    }
    return n;
}

void memory::fill_recalled(llama_kv_cache & kv, int n_recall, int begin, int end) {
    auto & cells = kv.v_cells[0];

    // Mark recalled tokens only if the context's newest token is visible. Otherwise the only visible tokens would be
    // recalled tokens, which are at position 0, and llama.cpp would require position 1 for the next token
    const int n_live = n_used(kv, n_recall);
    if (n_live == 0 || !cells.seq_has(n_live - 1, 0)) {
        begin = end = 0;
    }
    for (int i = 0; i < n_recall; ++i) {
        const int c = cells.size() - n_recall + i;
        const bool is_used = i >= begin && i < end;
        if (is_used && cells.is_empty(c)) {
            cells.pos_set(c, 0);
            cells.seq_add(c, 0);
        } else if (!is_used && !cells.is_empty(c)) {
            cells.rm(c);
        }
    }
}

int memory::copy_table(llama_kv_cache & kv, int32_t * out, const int32_t * in) {
    auto & cells = kv.v_cells[0];

    if (out) {
        *out++ = kv.v_heads[0];
        for (uint32_t c = 0; c < cells.size(); ++c) {
            *out++ = cells.is_empty(c) ? -1 : cells.pos_get(c);
        }
    }
    if (in) {
        cells.reset();
        kv.v_heads[0] = *in++;
        for (uint32_t c = 0; c < cells.size(); ++c, ++in) {
            if (*in >= 0) {
                cells.pos_set(c, *in);
                cells.seq_add(c, 0);
            }
        }
    }
    return 1 + cells.size();
}

std::vector<int> memory::shift_swa(llama_kv_cache & kv, int delta) {
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

int memory::n_dropped(const llama_memory_recurrent & mem) {
    return mem.rs_idx[0];
}

void memory::set_newest(llama_memory_recurrent & mem, llama_pos pos) {
    if (pos < 0) {
        mem.clear(false);
        return;
    }
    // a context with one sequence keeps its recurrent state in one cell
    auto & cell = mem.cells[0];
    cell.pos    = pos;
    cell.src    = 0;
    cell.tail   = 0;
    cell.seq_id = { 0 };

    mem.head = 0;
    mem.used = 1;
}

void memory::restored(llama_memory_recurrent & mem) {
    mem.set_rs_idx(0, 0);
}
