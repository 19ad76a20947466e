"""Scores of kvpress's presses on the weights of a tiny model. Needs kvpress, torch and gguf.

    python tests/policies/kvpress_scores.py MODEL.gguf TOKENS.npy OUT.npy PRESSES.json

The model reads the tokens in TOKENS.npy in one forward pass. It is one of tests/tiny.py with rope="neox".
Scores f32[press, row, n] are written to OUT.npy. PRESSES.json lists names and parameters:
[["KnormPress", {}], ...]. A press with the parameters "keep" and "alpha_safeguard" is wrapped in an
AdaKVPress. The AdaKVPress keeps `keep` tokens per row on average. It always keeps the newest token. Its
scores are 1 for kept tokens and 0 for masked tokens.
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
    """Return the scores f32[row, n] of one press."""
    instance, scores = getattr(kvpress, press)(compression_ratio=0.5, **params), []
    original = instance.score

    def noted(*args, **kwargs):
        scores.append(original(*args, **kwargs))
        return scores[-1]

    instance.score = noted
    with torch.no_grad(), instance(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    return torch.cat(scores, dim=1)[0].numpy()


def share(model, ids, press, params, keep, alpha):
    """Return f32[row, n]: 1 for tokens that an AdaKVPress keeps, 0 for tokens that it masks."""
    n = ids.shape[1]
    inner = getattr(kvpress, press)(compression_ratio=1 - keep / n, **params)
    original, masks = inner.score, []

    def with_newest(*args, **kwargs):
        scores = original(*args, **kwargs)
        scores[..., -1] = torch.finfo(scores.dtype).max
        return scores

    inner.score = with_newest
    outer = kvpress.AdaKVPress(inner, alpha_safeguard=alpha)
    with torch.no_grad(), outer(model):
        model.model(input_ids=ids, past_key_values=DynamicCache())
    for layer in model.model.layers:
        stays = torch.ones(layer.self_attn.config.num_key_value_heads, n)
        _, heads, tokens = layer.self_attn.masked_key_indices
        stays[heads, tokens] = 0
        masks.append(stays)
    return torch.cat(masks).numpy()


def main(path, tokens, out, presses):
    # masks of a press have no effect with transformers' eager attention
    model, masked = (load(path, attention) for attention in ("eager", "sdpa"))
    ids = torch.tensor(np.load(tokens)[None], dtype=torch.long)
    results = []
    for name, params in json.loads(Path(presses).read_text()):
        keep, alpha = params.pop("keep", None), params.pop("alpha_safeguard", None)
        results.append(
            score(model, ids, name, params) if keep is None else share(masked, ids, name, params, keep, alpha)
        )
    np.save(out, np.stack(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
