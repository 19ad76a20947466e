"""Which architectures kvtool runs, and why it does not run the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo

INTERLEAVED = {"gemma2": (4096, 2), "gemma3": (0, 6)}
"""Architectures of which some layers use sliding-window attention (SWA) and the others attend to all tokens.

The tokens that an SWA layer sees, and a pattern: n means that every n-th layer is no SWA layer. Both are
defaults; the file may say otherwise (llama.cpp's src/models/*.cpp, load_swa_pattern).
"""

_SWA = "sliding-window attention"

_RECURRENT = "recurrent or convolution layers, which have no KV cache"

_LATENT = "latent attention (MLA), in which all heads share one compressed key"

_MROPE = "positions with more than one dimension (M-RoPE)"

_ALIBI = "ALiBi, in which distances come from the cells that all heads share"

# from llama.cpp's src/llama-arch.cpp, src/llama-model.cpp (create_memory) and src/models/*.cpp
_NAMES = {
    _SWA: (
        "cohere2 cohere2moe exaone-moe gemma4 gpt-oss granite_swa maple mimo2 muse-glimmer spark2_5 step35"
    ),
    "layers that share keys and values": "gemma3n",
    _RECURRENT: (
        "arwkv7 bailingmoe3 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba "
        "mamba2 minimax-01 nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next rwkv6 rwkv6qwen2 rwkv7"
    ),
    _LATENT: "deepseek2 deepseek32 dots3note glm-dsa minicpm3 mistral4 plm",
    _MROPE: "paddleocr qwen2vl qwen3tts qwen3vl qwen3vlmoe",
    _ALIBI: "bloom jais mpt refact",
    "sparse attention with an index beside the cache": "deepseek4 hy_v4 minimax-m3 qwen4exp",
    "learned positions, which end with the trained context": "gpt2 gptj starcoder",
    "rotary positions in some layers only": "afmoe llama4 smollm3",
    "a router that attends to the cache": "graniteswitch",
    "an encoder, which has no KV cache": (
        "bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert "
        "nomic-bert nomic-bert-moe t5 t5encoder wavtokenizer-dec"
    ),
    "diffusion, which does not write token by token": "dream llada llada-moe rnd1",
    "a draft head that needs another model": "dflash eagle3 gemma4-assistant",
    "speech": "pockettts",
}

_BY_NAME = {name: reason for reason, names in _NAMES.items() for name in names.split()}

# these files name a sliding window; llama.cpp attends to all tokens nevertheless
_IGNORE_SWA = ("phi3", "phimoe")


def unsupported(info: ModelInfo) -> str | None:
    """Why kvtool cannot run this model yet; None if it can. The engine checks the loaded model again."""
    reason = _BY_NAME.get(info.architecture) or _by_keys(info)
    return reason and f"kvtool cannot run {info.architecture} models yet: no support for {reason}"


def _by_keys(info: ModelInfo) -> str | None:
    def value(key: str) -> object:
        return info.metadata.get(f"{info.architecture}.{key}")

    known = (*INTERLEAVED, *_IGNORE_SWA)
    if _positive(value("attention.sliding_window")) and info.architecture not in known:
        return _SWA
    if all(info.is_swa):
        return "sliding-window attention in every layer"
    recurrent = tuple(f"{info.architecture}.{part}." for part in ("ssm", "wkv", "kda", "shortconv"))
    if any(key.startswith(recurrent) for key in info.metadata):
        return _RECURRENT
    if _positive(value("attention.kv_lora_rank")):
        return _LATENT
    sections = value("rope.dimension_sections")
    if isinstance(sections, tuple) and sum(map(_positive, sections)) > 1:
        return _MROPE
    # llama.cpp tells the 13B Baichuan, which uses ALiBi, by its number of layers
    if _positive(value("attention.max_alibi_bias")) or (info.architecture, info.n_layer) == ("baichuan", 40):
        return _ALIBI
    if value("attention.causal") is False:
        return "attention to later tokens"
    if 0 in info.n_head_kv:
        return "layers without attention"
    return None


def _positive(value: object) -> bool:
    """Whether a number, or any number of a list, is above 0."""
    if isinstance(value, tuple):
        return any(map(_positive, value))
    return isinstance(value, int | float) and value > 0
