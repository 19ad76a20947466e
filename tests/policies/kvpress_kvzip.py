"""Scores of kvpress's KVzip on the weights of a tiny model. Runs in a Python that has kvpress and gguf.

    python tests/policies/kvpress_kvzip.py MODEL.gguf PROMPT.json OUT.npy [CHUNK]

PROMPT.json has two keys: "tokens" has the prompt's tokens, and "texts" maps each other text that KVzip reads
to its tokens. The scores f32[row, n] are written to OUT.npy. The model is one of tests/tiny.py with
rope="neox".
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from kvpress.presses import kvzip_press
from kvpress_model import load
from transformers import DynamicCache


class Tokenizer:
    """Stand-in for transformers' AutoTokenizer. It looks up the tokens of known texts."""

    chat_template = None

    def __init__(self, texts):
        self.texts = {"": [], **texts}

    def from_pretrained(self, name):
        return self

    def encode(self, text, return_tensors, add_special_tokens):
        return torch.tensor([self.texts[text]], dtype=torch.long)


class Press(kvzip_press.KVzipPress):
    """KVzipPress that stores its scores."""

    def compress_post(self, model):
        self.scores = self.score_val[:, 0].flatten(0, 1).float().numpy().copy()
        super().compress_post(model)


def main(path, prompt, out, chunk="2048"):
    prompt = json.loads(Path(prompt).read_text())
    kvzip_press.AutoTokenizer = Tokenizer(prompt["texts"])
    model = load(path, "sdpa")
    press = Press(compression_ratio=0.5, layerwise=True, chunk_size=int(chunk))
    ids = torch.tensor([prompt["tokens"]], dtype=torch.long)
    with torch.no_grad(), press(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    np.save(out, press.scores)


if __name__ == "__main__":
    main(*sys.argv[1:])
