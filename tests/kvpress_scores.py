"""Scores of presses of kvpress on the weights of a tiny model: for a Python that has kvpress, torch and gguf.

    python tests/kvpress_scores.py MODEL.gguf TOKENS.npy OUT.npy PRESSES.json

Writes scores f32[press, row, n] of a text that is read whole. The model is one of tests/tiny.py with
rope="neox". The presses are a list of their names and parameters: [["KnormPress", {}], ...].
"""

import json
import sys
from pathlib import Path

import gguf
import kvpress
import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

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


def load(path):
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
        attn_implementation="eager",
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


def score(model, ids, press, params):
    """f32[row, n]"""
    made, found = getattr(kvpress, press)(compression_ratio=0.5, **params), []
    own = made.score

    def noted(*args, **kwargs):
        found.append(own(*args, **kwargs))
        return found[-1]

    made.score = noted
    with torch.no_grad(), made(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return torch.cat(found, dim=1)[0].numpy()


def main(path, tokens, out, presses):
    model = load(path)
    ids = torch.tensor(np.load(tokens)[None], dtype=torch.long)
    asked = json.loads(Path(presses).read_text())
    np.save(out, np.stack([score(model, ids, *each) for each in asked]))


if __name__ == "__main__":
    main(*sys.argv[1:])
