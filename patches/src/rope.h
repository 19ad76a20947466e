// How the keys of a layer are rotated: as the model's graph says, so that no model has to be known by its name.

#pragma once

#include "ggml.h"

#include <string>

namespace kvtool {

struct rope {
    bool is_known = false; // the layer's keys have been seen in a graph

    bool is_mapped = false; // quantized keys are stored under a map

    int n_dims = 0; // numbers of a key that turn, in pairs; 0: the layer knows no positions
    int first  = 0; // the first of them: MLA has others before

    int mode       = 0; // GGML_ROPE_TYPE_*
    int n_ctx_orig = 0;

    float freq_base  = 0.0f;
    float freq_scale = 0.0f;
    float ext_factor = 0.0f;
    float beta_fast  = 0.0f;
    float beta_slow  = 0.0f;

    int sections[GGML_MROPE_SECTIONS] = {};

    ggml_tensor * factors = nullptr; // of the model: one a pair, by which its angle is divided
    ggml_tensor * scale   = nullptr; // of the model: what each number of a rotated key is multiplied by; a norm's weights

    bool is_rotary() const { return n_dims > 0; }

    // whether a token has several positions (M-RoPE), which for text are one; that of the last section is 0
    bool is_multi() const { return (mode & GGML_ROPE_TYPE_MROPE) != 0; }

    // whether pair i turns with a text's position
    bool has_pair(int i) const;

    // Sets this from what computes a layer's keys. Returns why it cannot be known how they depend on positions, or nothing.
    std::string read(const ggml_tensor * keys);

    // rotates keys F32 [n_embd, n] by so many positions, n_head of them, one after the other, by as many; delta: I32 [n/n_head], or
    // four times that where tokens have several positions
    ggml_tensor * build(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * delta, int64_t n_head = 1) const;
};

} // namespace kvtool
