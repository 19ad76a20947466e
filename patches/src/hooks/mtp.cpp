// Multi-token prediction (MTP): hidden states of tokens, from which a model's MTP layers compute draft tokens.

#include "error.h"
#include "llama-kvtool.h"

#include "llama-ext.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

using namespace kvtool;

bool llama_kvtool_has_mtp(const llama_model * model) {
    // granite-switch counts its router in n_layer_nextn, but the router is not an MTP layer
    if (!model || model->hparams.n_layer_nextn == 0 || model->hparams.router_layer >= 0) {
        return false;
    }
    // This model's MTP graph has only one position per token. M-RoPE needs several, so llama.cpp would abort
    if (model->arch == LLM_ARCH_GLM4_MOE && model->hparams.use_mrope()) {
        return false;
    }
    return model->layers.at(model->hparams.n_layer()).nextn.eh_proj != nullptr;
}

int32_t llama_kvtool_output_hidden(llama_context * ctx, bool all) {
    if (!ctx) {
        return fail("ctx must not be null");
    }
    llama_set_embeddings_nextn(ctx, true, !all);
    return 0;
}

int32_t llama_kvtool_get_hidden(llama_context * ctx, int32_t first, int32_t n, float * out) {
    if (!ctx || !out) {
        return fail("ctx and out must not be null");
    }
    const int32_t n_batch = llama_n_batch(ctx);
    if (first < 0 || n < 0 || n > n_batch - first) {
        return fail(format("first and n must be 0 or more, and first + n at most %d, got %d and %d", n_batch, first, n));
    }
    return guarded([&]() -> int32_t {
        const int32_t n_embd = llama_model_n_embd_out(llama_get_model(ctx));
        for (int32_t i = 0; i < n; ++i) {
            const float * row = llama_get_embeddings_nextn_ith(ctx, first + i);
            if (!row) {
                return fail(format("the last decode left no hidden state of token %d", first + i));
            }
            std::copy_n(row, n_embd, out + (int64_t) i*n_embd);
        }
        return 0;
    });
}
