"""Small random GGUFs of architectures for which llama.cpp's test-llama-archs writes no usable file.

    python -m tests.tiny_archs DIR

The program writes a file NAME.gguf for each architecture into the folder DIR. The models' trained context is
the same as in the files of test-llama-archs. Chameleon is left out: llama.cpp suppresses the logits of image
tokens, but only for the first token of a batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from tests import tiny_kinds
from tests.tiny import K_STD, O_STD, Q_STD, Tensors
from tests.tiny_kinds import HEAD_DIM, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB, begin

N_CTX_TRAIN = 256
N_EXPERT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, write in ARCHS.items():
        write(folder / f"{name}.gguf", n_ctx_train=N_CTX_TRAIN)


def _experts(tensors):
    """Return the tensors of a feed-forward network with N_EXPERT routed experts and a shared expert."""
    return {
        "ffn_norm": tensors.norm(),
        "ffn_gate_inp": tensors.matrix(N_EXPERT, N_EMBD),
        "ffn_gate_exps": tensors.matrix(N_FF, N_EMBD, of=[N_EXPERT]),
        "ffn_up_exps": tensors.matrix(N_FF, N_EMBD, of=[N_EXPERT]),
        "ffn_down_exps": tensors.matrix(N_EMBD, N_FF, of=[N_EXPERT]),
        "ffn_gate_shexp": tensors.matrix(N_FF, N_EMBD),
        "ffn_up_shexp": tensors.matrix(N_FF, N_EMBD),
        "ffn_down_shexp": tensors.matrix(N_EMBD, N_FF),
    }


def _feed_forward_without_gate(tensors):
    layer = tensors.feed_forward(N_FF)
    del layer["ffn_gate"]
    return layer


def _add_expert_sizes(writer, n_dense):
    writer.add_leading_dense_block_count(n_dense)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_shared_feed_forward_length(N_FF)


def write_apertus(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """RoPE has factors. Feed-forward networks have no gate. Each layer has its own xIELU parameters."""
    writer = begin(path, "apertus", n_ctx_train, n_layer)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_xielu_alpha_n([0.9, 0.6])
    writer.add_xielu_alpha_p([0.7, 1.1])
    writer.add_xielu_beta([0.5, 0.5])
    writer.add_xielu_eps([-1e-6, -1e-6])
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    writer.add_tensor("rope_freqs.weight", np.repeat(np.float32([1, 2, 8]), [8, 4, 4]))
    for i in range(n_layer):
        tensors.add_layer(
            i,
            tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
            | tensors.qk_norms(HEAD_DIM)
            | _feed_forward_without_gate(tensors),
        )
    tensors.write()


def write_bitnet(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """The inputs of attn_output and ffn_down are normalized. Matrices have scales. Embeddings are tied."""
    writer = begin(path, "bitnet", n_ctx_train, n_layer)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB, tied=True)
    for i in range(n_layer):
        layer = tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM) | tensors.feed_forward(N_FF)
        for name in [name for name in layer if not name.endswith("norm")]:
            writer.add_tensor(f"blk.{i}.{name}.scale", tensors.norm(1))
        tensors.add_layer(i, layer | {"attn_sub_norm": tensors.norm(), "ffn_sub_norm": tensors.norm(N_FF)})
    tensors.write()


def write_deepseek2_ocr(path, *, n_layer=3, n_ctx_train=1024, seed=0):
    """Attention is plain, with a KV head for each query head. All layers except the first have experts."""
    writer = begin(path, "deepseek2-ocr", n_ctx_train, n_layer, n_head_kv=N_HEAD)
    _add_expert_sizes(writer, 1)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for i in range(n_layer):
        feed = _experts(tensors) if i else tensors.feed_forward(N_FF)
        tensors.add_layer(i, tensors.attention(N_HEAD, N_HEAD, HEAD_DIM) | feed)
    tensors.write()


def write_gemma3n(path, *, window=16, n_ctx_train=1024, seed=0):
    """Twenty layers, of which every fifth attends to all tokens. The remaining layers slide.

    Two additional layers have no cells. They read the cells of layers 18 and 19.
    """
    # sizes that are not in the header: number of layers with cells, number of states per token (AltUp), size
    # of a layer's additional input, rank of LAuReL's bypass
    n_own, n_state, n_input, rank = 20, 4, 256, 64
    slides = [i % 5 < 4 for i in range(n_own)] + [True, False]
    n_layer = len(slides)
    writer = begin(path, "gemma3n", n_ctx_train, n_layer)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base_swa(1000.0)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(slides)
    writer.add_final_logit_softcapping(20.0)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for name in ("altup_proj", "altup_unembd_proj"):
        writer.add_tensor(f"{name}.weight", tensors.matrix(N_EMBD, N_EMBD, of=[n_state - 1]))
    writer.add_tensor("per_layer_token_embd.weight", tensors.bias(N_VOCAB, n_input * n_layer, std=0.06))
    writer.add_tensor("per_layer_model_proj.weight", tensors.matrix(n_input * n_layer, N_EMBD))
    writer.add_tensor("per_layer_proj_norm.weight", tensors.norm(n_input))
    for i in range(n_layer):
        tensors.add_layer(
            i,
            tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
            # norms divide by sqrt(HEAD_DIM), since gemma3n does not scale attention logits
            | tensors.qk_norms(HEAD_DIM, HEAD_DIM**-0.25)
            | tensors.feed_forward(N_FF)
            | {
                "post_attention_norm": tensors.norm(size=2.0),
                "laurel_l": tensors.matrix(rank, N_EMBD),
                "laurel_r": tensors.matrix(N_EMBD, rank),
                "laurel_post_norm": tensors.norm(),
                "altup_router_norm": tensors.norm(),
                # std is N_EMBD because llama.cpp divides the router's input by N_EMBD
                "altup_router": tensors.matrix(n_state, N_EMBD, N_EMBD),
                "altup_predict_coef": tensors.matrix(n_state**2, n_state, 0.1),
                "altup_correct_coef": tensors.matrix(n_state, n_state, 0.1),
                "altup_correct_scale": tensors.norm(),
                "inp_gate": tensors.matrix(n_input, N_EMBD),
                "proj": tensors.matrix(N_EMBD, n_input),
                # small, to limit the errors of llama.cpp's GELU, which is an f16 table
                "post_ffw_norm": tensors.norm(size=0.1),
                "post_norm": tensors.norm(size=0.1),
            },
        )
    tensors.write()


def write_plm(path, *, n_layer=2, n_latent=48, n_ctx_train=1024, seed=0):
    """Attention is latent (MLA): values and half of each key are computed from a latent vector.

    The other half of each key is rotated, and is the same for all heads.
    """
    n_nope = n_rot = n_value = HEAD_DIM
    writer = begin(path, "plm", n_ctx_train, n_layer, n_head_kv=N_HEAD)
    writer.add_key_length(n_nope + n_rot)
    writer.add_value_length(n_value)
    writer.add_kv_lora_rank(n_latent)
    writer.add_rope_dimension_count(n_rot)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB, tied=True)
    for i in range(n_layer):
        heads = [
            part
            for _ in range(N_HEAD)
            for part in (tensors.matrix(n_nope, n_latent, K_STD), tensors.matrix(n_value, n_latent))
        ]
        tensors.add_layer(
            i,
            {
                "attn_norm": tensors.norm(),
                "attn_q": tensors.matrix(N_HEAD * (n_nope + n_rot), N_EMBD, Q_STD),
                "attn_kv_a_mqa": tensors.matrix(n_latent + n_rot, N_EMBD, K_STD),
                "attn_kv_a_norm": tensors.norm(n_latent),
                "attn_kv_b": np.concatenate(heads),
                "attn_output": tensors.matrix(N_EMBD, N_HEAD * n_value, O_STD),
            }
            | _feed_forward_without_gate(tensors),
        )
    tensors.write()


def write_step35(path, *, window=16, n_ctx_train=1024, seed=0):
    """Sliding layers have more query heads and rotate whole keys. Full layers rotate half a key."""
    slides = [False, True, True, False, True]
    n_layer, n_dense = len(slides), 1
    n_head = [6 if is_sliding else N_HEAD for is_sliding in slides]
    writer = begin(path, "step35", n_ctx_train, n_layer, n_head)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base_swa(1000.0)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(slides)
    _add_expert_sizes(writer, n_dense)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    # limits of each layer's activations: 0 means no limit
    writer.add_swiglu_clamp_exp([0.0, 0.0, 1.0, 0.0, 1.0])
    writer.add_swiglu_clamp_shexp([0.0, 0.0, 0.0, 1.5, 1.5])
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    # one RoPE factor for each pair of a key's elements; full layers rotate half a key, so they use only the
    # first half of the factors
    writer.add_tensor("rope_freqs.weight", np.repeat(np.float32([1, 8, 100]), [4, 4, 8]))
    for i in range(n_layer):
        tensors.add_layer(
            i,
            tensors.attention(n_head[i], N_HEAD_KV, HEAD_DIM)
            | tensors.qk_norms(HEAD_DIM)
            | {"attn_gate": tensors.matrix(n_head[i], N_EMBD)}
            | (
                tensors.feed_forward(N_FF)
                if i < n_dense
                else _experts(tensors) | {"exp_probs_b.bias": tensors.bias(N_EXPERT)}
            ),
        )
    tensors.write()


ARCHS = {
    "apertus": write_apertus,
    "bitnet": write_bitnet,
    "deepseek2-ocr": write_deepseek2_ocr,
    "gemma3n": write_gemma3n,
    "gemma4": tiny_kinds.write_gemma4,
    "lfm2": tiny_kinds.write_lfm2,
    "plm": write_plm,
    "step35": write_step35,
}
"""Writer of each architecture."""

if __name__ == "__main__":
    main()
