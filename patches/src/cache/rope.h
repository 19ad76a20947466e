// Rotation (RoPE) of a layer's keys. It is read from the model's graph, so that no model has to be known by its name.

#pragma once

#include "ggml.h"

#include <string>

namespace kvtool {

struct rope {
    bool is_known = false; // a graph with the layer's keys has been read

    bool is_mapped = false; // quantized keys are stored multiplied by a Hadamard matrix

    // number of elements of a key that are rotated, in pairs; 0: the layer has no RoPE
    int n_dims = 0;
    int first  = 0; // index of the first rotated element; in MLA others precede it

    int mode       = 0; // GGML_ROPE_TYPE_*
    int n_ctx_orig = 0;

    float freq_base  = 0.0f;
    float freq_scale = 0.0f;
    float ext_factor = 0.0f;
    float beta_fast  = 0.0f;
    float beta_slow  = 0.0f;

    int sections[GGML_MROPE_SECTIONS] = {};

    // tensor of the model: one divisor of the angle per pair
    ggml_tensor * factors = nullptr;
    // tensor of the model: weights of a norm, by which a rotated key is multiplied element by element
    ggml_tensor * scale   = nullptr;

    bool is_rotary() const { return n_dims > 0; }

    // true if a token has several positions (M-RoPE). In text they are equal, except that the last section's is 0
    bool is_multi() const { return (mode & GGML_ROPE_TYPE_MROPE) != 0; }

    // true if pair i is rotated in text: only pairs of M-RoPE's last section are not
    bool has_pair(int i) const;

    // Read the rotation from the graph that computes a layer's keys. Returns the reason if the dependence on
    // positions cannot be determined, otherwise an empty string.
    std::string read(const ggml_tensor * keys);

    // Rotate keys F32 [n_embd, n]. n_head consecutive keys share one entry of delta: I32 [n/n_head], or four
    // times as many entries if tokens have several positions
    ggml_tensor * build(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * delta, int64_t n_head = 1) const;
};

} // namespace kvtool
