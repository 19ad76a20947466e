"""Small random GGUFs of special architectures. (tests/tiny.py writes the plain ones.)"""

from __future__ import annotations

from functools import partial

import gguf
import numpy as np

from tests import tiny
from tests.tiny import K_STD, O_STD, Q_STD, Tensors, start

N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF, N_VOCAB = 4, 2, 32, 64, 320
N_EMBD = N_HEAD * HEAD_DIM


def write(arch, path, /, **shape):
    """Write a model of architecture `arch` with write_ARCH of this file or of tests/tiny.py."""
    name = f"write_{arch}"
    (globals().get(name) or getattr(tiny, name))(path, **shape)


write_deci = partial(tiny.write_llama, arch="deci")


def begin(path, arch, n_ctx_train, n_layer, n_head=N_HEAD, n_head_kv=N_HEAD_KV, eps=1e-5):
    """Return a GGUFWriter with the tokenizer, and with the header fields that most architectures have."""
    writer = start(path, arch, n_ctx_train, (n_layer, n_head, n_head_kv, HEAD_DIM, N_FF, N_VOCAB))
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(10000.0)
    return writer


def _write_plain(writer, n_layer, seed):
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for i in range(n_layer):
        tensors.add_layer(i, tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM) | tensors.feed_forward(N_FF))
    tensors.write()


def write_smollm3(path, *, n_layer=5, n_ctx_train=1024, seed=0):
    """The fourth layer does not rotate its keys (NoPE)."""
    writer = begin(path, "smollm3", n_ctx_train, n_layer)
    writer.add_rope_dimension_count(HEAD_DIM)
    _write_plain(writer, n_layer, seed)


def write_qwen2vl(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """M-RoPE: the pairs have four sections, each with its own position.

    In a text, the position of the last section is always 0. The sections cover 13 of the 16 pairs. The other
    3 pairs use the positions of the first sections again. Attention has biases.
    """
    # llama.cpp always uses an eps of 0 for this architecture. tests/reference uses the eps of the file, so
    # this eps is nearly 0.
    writer = begin(path, "qwen2vl", n_ctx_train, n_layer, eps=1e-12)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_sections([5, 4, 2, 2])
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for i in range(n_layer):
        tensors.add_layer(
            i,
            tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
            | tensors.feed_forward(N_FF)
            | {
                "attn_q.bias": tensors.bias(N_HEAD * HEAD_DIM),
                "attn_k.bias": tensors.bias(N_HEAD_KV * HEAD_DIM),
                "attn_v.bias": tensors.bias(N_HEAD_KV * HEAD_DIM),
            },
        )
    tensors.write()


def write_gpt_oss(path, *, n_layer=4, n_expert=2, window=16, n_ctx_train=1024, seed=0):
    """Every second layer attends to the whole stream; the rest slide."""
    writer = begin(path, "gpt-oss", n_ctx_train, n_layer)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(window)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_expert)
    writer.add_expert_feed_forward_length(N_FF)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for i in range(n_layer):
        tensors.add_layer(
            i,
            tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
            | {
                "attn_q.bias": tensors.bias(N_HEAD * HEAD_DIM),
                "attn_k.bias": tensors.bias(N_HEAD_KV * HEAD_DIM),
                "attn_v.bias": tensors.bias(N_HEAD_KV * HEAD_DIM),
                "attn_output.bias": tensors.bias(N_EMBD),
                "attn_sinks": tensors.bias(N_HEAD, std=4),
                "post_attention_norm": tensors.norm(),
                "ffn_gate_inp": tensors.matrix(n_expert, N_EMBD),
                "ffn_gate_inp.bias": tensors.bias(n_expert),
                # so large that some activations exceed SwiGLU's limit of 7
                "ffn_gate_exps": tensors.matrix(N_FF, N_EMBD, 4, of=[n_expert]),
                "ffn_gate_exps.bias": tensors.bias(n_expert, N_FF),
                "ffn_up_exps": tensors.matrix(N_FF, N_EMBD, 4, of=[n_expert]),
                "ffn_up_exps.bias": tensors.bias(n_expert, N_FF),
                "ffn_down_exps": tensors.matrix(N_EMBD, N_FF, 0.2, of=[n_expert]),
                "ffn_down_exps.bias": tensors.bias(n_expert, N_EMBD),
            },
        )
    tensors.write()


def write_lfm2(path, *, n_head_kv=(0, 2, 0, 2, 0), n_conv=3, n_ctx_train=1024, chat_template=None, seed=0):
    """A layer without KV heads convolves the last n_conv tokens.

    Its state keeps the newest n_conv - 1 tokens.
    """
    n_layer = len(n_head_kv)
    writer = begin(path, "lfm2", n_ctx_train, n_layer, n_head_kv=list(n_head_kv))
    writer.add_shortconv_l_cache(n_conv)
    if chat_template:
        writer.add_chat_template(chat_template)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB, output_norm="token_embd_norm")
    for i in range(n_layer):
        if n_head_kv[i]:
            mix = tensors.attention(N_HEAD, n_head_kv[i], HEAD_DIM) | tensors.qk_norms(HEAD_DIM)
        else:
            mix = {
                "attn_norm": tensors.norm(),
                "shortconv.in_proj": tensors.matrix(3 * N_EMBD, N_EMBD),
                "shortconv.conv": tensors.matrix(N_EMBD, n_conv),
                "shortconv.out_proj": tensors.matrix(N_EMBD, N_EMBD),
            }
        tensors.add_layer(i, mix | tensors.feed_forward(N_FF))
    tensors.write()


def write_qwen35(
    path, *, n_layer=4, mtp=True, quiet=1.0, hidden=0.0, n_ctx_train=1024, chat_template=None, seed=0
):
    """Three of four layers are recurrent. An additional layer is for multi-token prediction (MTP).

    The model writes only letters.
    mtp: whether the model has the MTP layer.
    quiet: factor of the values that each layer adds to the residual stream. With 0, the next token depends
    only on the last token, and the MTP layer predicts it correctly.
    hidden: scale of the hidden states in the input of the MTP layer. With 0, they have no effect.
    """
    n_state, n_group, n_rank = 32, 2, 4
    writer = begin(path, "qwen35", n_ctx_train, n_layer + mtp)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(n_rank * n_state)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    writer.add_ssm_group_count(n_group)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    if mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
    if chat_template:
        writer.add_chat_template(chat_template)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB, n_silent=tiny.N_SPECIAL + 256)
    n_key, n_value = n_group * n_state, n_rank * n_state
    for i in range(n_layer + mtp):
        feed = tensors.feed_forward(N_FF)
        feed["post_attention_norm"] = feed.pop("ffn_norm")
        feed["ffn_down"] *= np.float32(quiet)
        if (i + 1) % 4 and i < n_layer:
            mix = {
                "attn_norm": tensors.norm(),
                "attn_qkv": tensors.matrix(2 * n_key + n_value, N_EMBD),
                "attn_gate": tensors.matrix(n_value, N_EMBD),
                "ssm_conv1d": tensors.matrix(2 * n_key + n_value, 4),
                "ssm_dt.bias": tensors.bias(n_rank),
                "ssm_beta": tensors.matrix(n_rank, N_EMBD),
                "ssm_alpha": tensors.matrix(n_rank, N_EMBD),
                "ssm_norm": tensors.norm(n_state),
                "ssm_out": tensors.matrix(N_EMBD, n_value, quiet),
            }
            writer.add_tensor(f"blk.{i}.ssm_a", -tensors.norm(n_rank))
        else:
            # for each head, attn_q has first the query and then a gate for the head's output
            mix = tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
            mix["attn_q"] = tensors.matrix(2 * N_HEAD * HEAD_DIM, N_EMBD)
            mix |= tensors.qk_norms(HEAD_DIM)
            mix["attn_output"] *= np.float32(quiet)
        tensors.add_layer(i, mix | feed)
    if mtp:
        one, other = np.eye(N_EMBD, dtype=np.float32), tensors.matrix(N_EMBD, N_EMBD, hidden)
        norms = dict.fromkeys(("nextn.enorm", "nextn.hnorm"), np.ones(N_EMBD, np.float32))
        tensors.add_layer(n_layer, norms | {"nextn.eh_proj": np.hstack([one, other])})
    tensors.write()


def write_maincoder(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """Queries and keys are normalized after their rotation. The norms have weights."""
    writer = begin(path, "maincoder", n_ctx_train, n_layer)
    writer.add_rope_dimension_count(HEAD_DIM)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    for i in range(n_layer):
        norms = {f"attn_{n}_norm": tensors.rng.uniform(0.9, 2.7, HEAD_DIM).astype(np.float32) for n in "qk"}
        layer = tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM) | norms
        tensors.add_layer(i, layer | tensors.feed_forward(N_FF))
    tensors.write()


def write_refact(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """Attention logits decrease with distance (ALiBi). Keys are not rotated."""
    _write_plain(begin(path, "refact", n_ctx_train, n_layer), n_layer, seed)


def write_gemma2(path, *, n_layer=4, n_head_kv=N_HEAD_KV, cap=12.0, window=16, n_ctx_train=1024, seed=0):
    """Attention logits are capped. Every second layer has a sliding window."""
    writer = begin(path, "gemma2", n_ctx_train, n_layer, n_head_kv=n_head_kv, eps=1e-6)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(cap)
    writer.add_final_logit_softcapping(30.0)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB, tied=True)
    for i in range(n_layer):
        norms = {"post_attention_norm": tensors.norm(), "post_ffw_norm": tensors.norm(size=0.1)}
        layer = tensors.attention(N_HEAD, n_head_kv, HEAD_DIM) | tensors.feed_forward(N_FF) | norms
        tensors.add_layer(i, layer)
    tensors.write()


def write_gpt2(path, *, n_layer=2, n_ctx_train=1024, seed=0):
    """A learned position vector is added to each token's embedding. All norms have biases."""
    writer = begin(path, "gpt2", n_ctx_train, n_layer, n_head_kv=N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    writer.add_tensor("output_norm.bias", tensors.bias(N_EMBD))
    writer.add_tensor("position_embd.weight", tensors.matrix(n_ctx_train, N_EMBD, 0.5 * N_EMBD**0.5))
    for i in range(n_layer):
        attention = tensors.attention(N_HEAD, N_HEAD, HEAD_DIM)
        feed = tensors.feed_forward(N_FF)
        layer = {
            "attn_norm": attention["attn_norm"],
            "attn_qkv": np.concatenate([attention[name] for name in ("attn_q", "attn_k", "attn_v")]),
            "attn_output": attention["attn_output"],
            "ffn_norm": feed["ffn_norm"],
            "ffn_up": feed["ffn_up"],
            # small, to limit the errors of llama.cpp's GELU, which is an f16 table
            "ffn_down": 0.1 * feed["ffn_down"],
        }
        biases = {f"{name}.bias": tensors.bias(tensor.shape[0]) for name, tensor in layer.items()}
        tensors.add_layer(i, layer | biases)
    tensors.write()


def write_deepseek32(path, *, n_index_head=64, n_index=128, top_k=512, **shape):
    """Write a model like write_deepseek2, plus an index that chooses top_k cells for each query."""

    def add_index(writer):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        writer.add_indexer_head_count(n_index_head)
        writer.add_indexer_key_length(n_index)
        writer.add_indexer_top_k(top_k)

    def index_of(tensors, q_rank):
        return {
            "indexer.k_norm": tensors.norm(n_index),
            "indexer.k_norm.bias": tensors.bias(n_index),
            "indexer.proj": tensors.matrix(n_index_head, N_EMBD),
            "indexer.attn_k": tensors.matrix(n_index, N_EMBD),
            "indexer.attn_q_b": tensors.matrix(n_index_head * n_index, q_rank),
        }

    write_deepseek2(path, arch="deepseek32", add_keys=add_index, more=index_of, **shape)


def write_deepseek2(
    path,
    *,
    n_layer=2,
    q_rank=24,
    n_latent=64,
    n_rot=64,
    n_ctx_train=1024,
    seed=0,
    arch="deepseek2",
    add_keys=lambda writer: None,
    more=lambda tensors, q_rank: {},
):
    """Multi-head latent attention, with one row per layer.

    With the default sizes, a key has a multiple of 64 elements. llama.cpp then multiplies quantized keys by a
    Hadamard matrix.
    q_rank: rank of the query projection. With 0, the projection is a single matrix.
    add_keys: function that adds the header fields of the architecture `arch`.
    more: function that returns the additional tensors of a layer of `arch`.
    """
    n_nope, n_value = 32, 40
    writer = begin(path, arch, n_ctx_train, n_layer, n_head_kv=1)
    add_keys(writer)
    writer.add_key_length(n_latent + n_rot)
    writer.add_value_length(n_latent)
    writer.add_key_length_mla(n_nope + n_rot)
    writer.add_value_length_mla(n_value)
    writer.add_kv_lora_rank(n_latent)
    writer.add_q_lora_rank(q_rank)
    writer.add_rope_dimension_count(n_rot)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_shared_count(0)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    n_query = N_HEAD * (n_nope + n_rot)
    for i in range(n_layer):
        if q_rank:
            query = {
                "attn_q_a": tensors.matrix(q_rank, N_EMBD),
                "attn_q_a_norm": tensors.norm(q_rank),
                "attn_q_b": tensors.matrix(n_query, q_rank, Q_STD),
            }
        else:
            query = {"attn_q": tensors.matrix(n_query, N_EMBD, Q_STD)}
        tensors.add_layer(
            i,
            query
            | {
                "attn_norm": tensors.norm(),
                "attn_kv_a_mqa": tensors.matrix(n_latent + n_rot, N_EMBD, K_STD),
                "attn_kv_a_norm": tensors.norm(n_latent),
                "attn_k_b": tensors.matrix(n_latent, n_nope, K_STD * (n_nope / n_latent) ** 0.5, of=[N_HEAD]),
                "attn_v_b": tensors.matrix(n_value, n_latent, of=[N_HEAD]),
                "attn_output": tensors.matrix(N_EMBD, N_HEAD * n_value, O_STD),
            }
            | more(tensors, q_rank)
            | tensors.feed_forward(N_FF),
        )
    tensors.write()


def write_gemma4(path, *, window=16, n_ctx_train=1024, seed=0):
    """Layers 4 to 7 have no cells.

    The sliding layers among them read the cells of layer 2, and the full layers read the cells of layer 3.
    """
    slides = [True, False, True, False, True, False, False, True]
    n_layer, n_own = len(slides), 4
    writer = begin(path, "gemma4", n_ctx_train, n_layer, eps=1e-6)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_key_length_swa(HEAD_DIM)
    writer.add_value_length_swa(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_count_swa(HEAD_DIM)
    writer.add_rope_freq_base_swa(1000.0)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(n_layer - n_own)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(20.0)
    tensors = Tensors(writer, N_EMBD, seed)
    tensors.add_ends(N_VOCAB)
    # RoPE factors of the layers that do not slide. The last quarter of the pairs hardly rotates.
    factors = np.repeat(np.float32([1, 4, 1e30]), [8, 4, 4])
    writer.add_tensor("rope_freqs.weight", factors)
    for i in range(n_layer):
        # norms divide by sqrt(HEAD_DIM), since gemma4 does not scale attention logits
        attention = tensors.attention(N_HEAD, N_HEAD_KV, HEAD_DIM)
        attention |= tensors.qk_norms(HEAD_DIM, HEAD_DIM**-0.25)
        if i >= n_own:
            for name in ("attn_k", "attn_k_norm", "attn_v"):
                del attention[name]
        behind = {
            "post_attention_norm": tensors.norm(size=0.5 * N_EMBD**0.5),
            # small, to limit the errors of llama.cpp's GELU, which is an f16 table
            "post_ffw_norm": tensors.norm(size=0.1),
        }
        tensors.add_layer(i, attention | tensors.feed_forward(N_FF) | behind)
    tensors.write()
