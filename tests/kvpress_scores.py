"""Scores of presses of kvpress on the weights of a tiny model: for a Python that has kvpress, torch and gguf.

    python tests/kvpress_scores.py MODEL.gguf TOKENS.npy OUT.npy PRESSES.json

Writes scores f32[press, row, n] of a text that is read whole. The model is one of tests/tiny.py with
rope="neox". The presses are a list of their names and parameters: [["KnormPress", {}], ...].
"""

import json
import sys
from pathlib import Path

import kvpress
import numpy as np
import torch
from kvpress_model import load
from transformers import DynamicCache


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
    model = load(path, "eager")
    ids = torch.tensor(np.load(tokens)[None], dtype=torch.long)
    asked = json.loads(Path(presses).read_text())
    np.save(out, np.stack([score(model, ids, *each) for each in asked]))


if __name__ == "__main__":
    main(*sys.argv[1:])
