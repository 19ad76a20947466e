"""List of architectures that kvtool cannot run. Their models are refused before they are loaded.

Other architectures work without changes to kvtool if kvtool knows their kinds of caches. llama.cpp reports
the kinds after the model is loaded (`kvtool.llama.loaded.model.Model.layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo

# sources: llama.cpp's src/llama-arch.cpp, src/llama-model.cpp (create_memory) and src/models/*.cpp
_NAMES = {
    "all layers are recurrent, so that its memory does not grow and kvtool is not needed": (
        "arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7"
    ),
    "llama.cpp knows only its name": "gptj",
    "it is an encoder, which has no KV cache": (
        "bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert "
        "nomic-bert nomic-bert-moe t5 t5encoder wavtokenizer-dec"
    ),
    "it is a diffusion model, which does not write token by token": "dream llada llada-moe rnd1",
    "it is a draft head, which needs another model": "dflash eagle3 gemma4-assistant",
    "it is a speech model": "pockettts qwen3tts",
}

BY_NAME = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Reason why kvtool refuses a model, by the name of its architecture."""


def unsupported(info: ModelInfo) -> str | None:
    """Return the reason why kvtool cannot run this model, or None. This looks only at the header."""
    reason = BY_NAME.get(info.architecture)
    if info.metadata.get(f"{info.architecture}.attention.causal") is False:
        reason = reason or "its tokens attend to later ones"
    return reason and f"cannot run {info.architecture} models: {reason}"
