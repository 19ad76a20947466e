// Rotation (RoPE) of a layer's keys. kvtool reads it from the model's graph, so it needs no list of models.

#pragma once

#include "ggml.h"

#include <string>

namespace kvtool {

struct rope {
    bool is_known = false; // true if `read` has succeeded

    bool is_mapped = false; // true if quantized keys are multiplied by a Hadamard matrix before they are stored

    // number of elements of a key that are rotated, in pairs; 0 if the layer has no RoPE
    int n_dims = 0;
    int first  = 0; // index of the first rotated element; greater than 0 in MLA

    int mode       = 0; // GGML_ROPE_TYPE_*
    int n_ctx_orig = 0;

    float freq_base  = 0.0f;
    float freq_scale = 0.0f;
    float ext_factor = 0.0f;
    float beta_fast  = 0.0f;
    float beta_slow  = 0.0f;

    int sections[GGML_MROPE_SECTIONS] = {};

    // tensor of the model: for each pair, the number that its angle is divided by
    ggml_tensor * factors = nullptr;
    // tensor of the model: weights of a norm. A rotated key is multiplied by them element by element
    ggml_tensor * scale   = nullptr;

    bool is_rotary() const { return n_dims > 0; }

    // True if a token has several positions (M-RoPE). In text all its positions are equal, except that the last
    // section's position is 0
    bool is_multi() const { return (mode & GGML_ROPE_TYPE_MROPE) != 0; }

    // true if pair i is rotated in text; only the pairs of M-RoPE's last section are not rotated
    bool has_pair(int i) const;

    // Read the rotation from the graph that computes a layer's keys. Returns an empty string on success, otherwise the
    // reason why kvtool cannot determine how the keys depend on positions.
    std::string read(const ggml_tensor * keys);

    // Rotate keys F32 [n_embd, n]. delta is I32 [n/n_head]: n_head consecutive keys share one entry. If tokens have
    // several positions, delta has four times as many entries
    ggml_tensor * build(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * delta, int64_t n_head = 1) const;
};

} // namespace kvtool
