#include "rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvtool {

bool rope::has_pair(int i) const {
    if (!is_multi()) {
        return true;
    }
    const int * s = sections;
    const int   j = i % std::max(1, s[0] + s[1] + s[2] + s[3]);

    // interleaved sections: the pairs belong alternately to the first three sections
    return mode == GGML_ROPE_TYPE_IMROPE ? j < 3*s[j % 3] : j < s[0] + s[1] + s[2];
}

// walk through a graph, from a layer's keys back to the operation that rotates them
struct rope_walk {
    const ggml_tensor * rope_op = nullptr;

    int first = 0; // index of a key's first rotated element

    ggml_tensor * scale = nullptr; // weights applied after the rotation

    bool is_mapped = false;

    std::string why; // reason why the walk cannot continue

    static bool is_weight(const ggml_tensor * t) {
        return t->op == GGML_OP_NONE && !(t->flags & GGML_TENSOR_FLAG_INPUT);
    }

    // a product with a model's weights; it is allowed after the rotation
    void visit_scaled(const ggml_tensor * t, ggml_tensor * weights, int offset) {
        const auto * prev_op = rope_op;
        visit(t, offset);

        if (rope_op == prev_op || weights->ne[0] == 1) {
            return;
        }
        if (scale || first > 0 || ggml_nelements(weights) != weights->ne[0] || weights->type != GGML_TYPE_F32) {
            why = "they are scaled in an unknown way behind their rotation";
        }
        scale = weights;
    }

    // An operation that is allowed before the rotation of the keys. If it comes after the rotation, the walk fails
    void visit_plain(const ggml_tensor * t, int offset, const char * op_name) {
        const auto * prev_op = rope_op;
        visit(t, offset);

        if (rope_op != prev_op) {
            why = std::string(op_name) + " comes behind their rotation";
        }
    }

    // offset: index of t's first element in a key
    void visit(const ggml_tensor * t, int offset) {
        switch (t->op) {
            case GGML_OP_ROPE:
                if (rope_op && rope_op != t) {
                    why = "they are rotated twice";
                }
                rope_op = t;
                first = offset;
                return;
            case GGML_OP_CONCAT:
                visit(t->src[0], offset);
                visit(t->src[1], offset + (t->op_params[0] == 0 ? t->src[0]->ne[0] : 0));
                return;
            case GGML_OP_MUL_MAT:
                // If the first factor of a product is an input, it is the Hadamard matrix of quantized keys, and the
                // walk continues. Otherwise the first factor is the model's weights, and the product computes the keys.
                // The walk then ends
                if (t->src[0]->flags & GGML_TENSOR_FLAG_INPUT) {
                    is_mapped = true;
                    visit(t->src[1], offset);
                }
                return;
            case GGML_OP_MUL_MAT_ID:
            case GGML_OP_GET_ROWS:
                return;
            case GGML_OP_MUL:
                if (is_weight(t->src[1])) {
                    visit_scaled(t->src[0], t->src[1], offset);
                } else {
                    visit(t->src[0], offset);
                    visit(t->src[1], offset);
                }
                return;
            case GGML_OP_ADD:
                if (is_weight(t->src[1])) {
                    visit_plain(t->src[0], offset, "a sum");
                    return;
                }
                [[fallthrough]];
            case GGML_OP_SUB:
            case GGML_OP_DIV:
                visit(t->src[0], offset);
                visit(t->src[1], offset);
                return;
            case GGML_OP_NORM:
                visit_plain(t->src[0], offset, "a norm with a mean");
                return;
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_TRANSPOSE:
            case GGML_OP_CONT:
            case GGML_OP_CPY:
            case GGML_OP_DUP:
            case GGML_OP_REPEAT:
            case GGML_OP_SCALE:
            case GGML_OP_CLAMP:
            case GGML_OP_RMS_NORM:
            case GGML_OP_L2_NORM:
            case GGML_OP_UNARY:
                visit(t->src[0], offset);
                return;
            case GGML_OP_NONE:
                if (t->flags & GGML_TENSOR_FLAG_INPUT) {
                    why = std::string("they are made from the input ") + t->name;
                }
                return;
            default:
                why = std::string("they are made by ") + ggml_op_name(t->op);
        }
    }
};

std::string rope::read(const ggml_tensor * keys) {
    rope_walk walk;
    walk.visit(keys, 0);

    if (!walk.why.empty()) {
        return walk.why;
    }

    *this = {};
    is_known  = true;
    is_mapped = walk.is_mapped;

    const ggml_tensor * t = walk.rope_op;
    if (!t) {
        return {};
    }

    const auto as_float = [&](int i) {
        float res;
        memcpy(&res, &t->op_params[i], sizeof(res));
        return res;
    };

    // each parameter is at the index where ggml_rope_impl stores it
    first      = walk.first;
    n_dims     = t->op_params[1];
    mode       = t->op_params[2];
    n_ctx_orig = t->op_params[4];
    freq_base  = as_float(5);
    freq_scale = as_float(6);
    ext_factor = as_float(7);
    beta_fast  = as_float(9);
    beta_slow  = as_float(10);
    factors    = t->src[2];
    scale      = walk.scale;
    memcpy(sections, &t->op_params[11], sizeof(sections));

    return {};
}

ggml_tensor * rope::build(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * delta, int64_t n_head) const {
    const int64_t n_embd = keys->ne[0];
    const int64_t n      = keys->ne[1];

    if (scale) {
        keys = ggml_div(ctx, keys, scale);
    }
    ggml_tensor * x = ggml_view_3d(ctx, keys, n_embd - first, n_head, n/n_head, keys->nb[1], n_head*keys->nb[1], first*sizeof(float));

    // YaRN scales a key when it is rotated. The key was scaled at its first rotation and must not be scaled again, so
    // this factor cancels the scale
    const float attn_factor = ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;

    if (is_multi()) {
        int sections_arg[GGML_MROPE_SECTIONS];
        memcpy(sections_arg, sections, sizeof(sections_arg));
        x = ggml_rope_multi(ctx, x, delta, factors, n_dims, sections_arg, mode, n_ctx_orig, freq_base, freq_scale,
                ext_factor, attn_factor, beta_fast, beta_slow);
    } else {
        x = ggml_rope_ext(ctx, x, delta, factors, n_dims, mode, n_ctx_orig, freq_base, freq_scale,
                ext_factor, attn_factor, beta_fast, beta_slow);
    }

    x = ggml_reshape_2d(ctx, x, n_embd - first, n);
    if (first > 0) {
        x = ggml_concat(ctx, ggml_view_2d(ctx, keys, first, n, keys->nb[1], 0), x, 0);
    }

    return scale ? ggml_mul(ctx, x, scale) : x;
}

} // namespace kvtool
