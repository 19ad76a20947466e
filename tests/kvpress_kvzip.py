"""KVzip by kvpress, on the weights of a tiny model; run by a Python that has kvpress and gguf.

    python tests/kvpress_kvzip.py MODEL.gguf PROMPT.json OUT.npy [CHUNK]

The prompt's file has its "tokens", and "texts": the tokens of whatever else is read, by its text. Writes
scores f32[row, n]. The model is one of tests/tiny.py with rope="neox".
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from kvpress.presses import kvzip_press
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
    of = lambda name: reader.fields[f"{arch}.{name}"].contents()  # noqa: E731
    weights = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        head_dim=weights["blk.0.attn_q.weight"].shape[0] // of("attention.head_count"),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_theta=of("rope.freq_base"),
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    named = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            named[f"model.layers.{i}.{theirs}.weight"] = weights[f"blk.{i}.{ours}.weight"]
    model.load_state_dict(named)
    return model


class Tokenizer:
    """The model's, as far as it is asked for."""

    chat_template = None

    def __init__(self, texts):
        self.texts = {"": [], **texts}

    def from_pretrained(self, name):
        return self

    def encode(self, text, return_tensors, add_special_tokens):
        return torch.tensor([self.texts[text]], dtype=torch.long)


class Press(kvzip_press.KVzipPress):
    """Keeps the scores."""

    def compress_post(self, model):
        self.scores = self.score_val[:, 0].flatten(0, 1).float().numpy().copy()
        super().compress_post(model)


def main(path, prompt, out, chunk="2048"):
    prompt = json.loads(Path(prompt).read_text())
    kvzip_press.AutoTokenizer = Tokenizer(prompt["texts"])
    model = load(path)
    press = Press(compression_ratio=0.5, layerwise=True, chunk_size=int(chunk))
    ids = torch.tensor([prompt["tokens"]], dtype=torch.long)
    with torch.no_grad(), press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    np.save(out, press.scores)


if __name__ == "__main__":
    main(*sys.argv[1:])
