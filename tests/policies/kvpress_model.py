"""Load a tiny model of tests/tiny.py (rope="neox") into transformers. Needs torch, transformers and gguf."""

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(path, attention):
    """Return the model. attention: name of an attention implementation of transformers."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()

    def number(name):
        return reader.fields[f"{arch}.{name}"].contents()

    weights = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=len(weights["blk.0.attn_q.weight"]) // number("attention.head_count"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base"),
        attn_implementation=attention,
    )
    named = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            named[f"model.layers.{i}.{theirs}.weight"] = weights[f"blk.{i}.{ours}.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(named)
    return model
