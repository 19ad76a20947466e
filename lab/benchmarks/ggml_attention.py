"""Flash attention in ggml's layouts, and plain attention for comparison.

ggml_micro.py and ggml_steps.py use this module. The shape is that of an 8B model: 32 query heads and 8 KV
heads with 128 dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.benchmarks.ggml_lib import F16, Ggml, Work

Row = dict[str, object]

D, N_HEAD, N_KV_HEAD = 128, 32, 8
N_GROUP = N_HEAD // N_KV_HEAD
SCALE = D**-0.5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes
    ----------
    n_node
        Number of attention calls in a graph. Each call has other keys and values.
    n_query, n_kv
        Numbers of tokens of a step, and numbers of cells that the tokens attend to.
    copy_bytes
        Number of bytes of a long copy.
    chunks, archived
        Numbers of tokens of a chunk, and numbers of archived tokens before the chunk.
    n_layer, n_read_layer
        Number of layers of a step that writes a token, and of a step that reads a chunk.
    full, resident
        Numbers of cells of the full cache, and of the cache with resident tokens and cluster means.
    """

    n_node: int = 32
    n_query: tuple[int, ...] = (1, 16, 1024)
    n_kv: tuple[int, ...] = (1024, 2048, 3584, 9728, 33792)
    copy_bytes: int = 64 << 20
    chunks: tuple[int, ...] = (512, 1024, 2048)
    archived: tuple[int, ...] = (8192, 32768)
    n_layer: int = 32
    n_read_layer: int = 8
    full: tuple[int, ...] = (8192, 32768, 131072)
    resident: tuple[int, ...] = (3840, 4864)


SMALL = Sizes(2, (1, 16), (256, 512), 1 << 20, (64,), (512,), 2, 2, (512, 1024), (256, 512))


def cells(work: Work, kind: int, n_cell: int) -> int:
    """Return a cache tensor [D * n_kv_head, n_cell], with llama.cpp's layout."""
    return work.tensor(kind, D * N_KV_HEAD, n_cell)


def attention(
    work: Work, q: int, k: int, v: int, mask: int, kind: int, n: int, n_kv: int, form: str
) -> list[int]:
    """Add flash attention to the graph: n tokens attend to the first n_kv cells. Return the result's nodes.

    q: F32 [D, n_head, n]. mask: F16, with a shape that depends on `form`.

    form
        "one": all heads share a mask [n_kv, n, 1, 1]. "ne2": a mask per query head, [n_kv, n, n_head, 1].
        All other forms have a mask per KV head, [n_kv, n, 1, n_kv_head]. "ne3": ne[3] of all tensors is the
        KV head. "ne3 in order": like "ne3", with the result's axes in the order of "one". "calls": one call
        and one node per KV head.
    """
    lib, context = work.lib, work.context
    cell, head = work.ggml.row_bytes(kind, D * N_KV_HEAD), work.ggml.row_bytes(kind, D)
    q_token, q_head = 4 * D * N_HEAD, 4 * D

    def call(q: int, k: int, v: int, mask: int) -> int:
        return int(lib.ggml_flash_attn_ext(context, q, k, v, mask, SCALE, 0.0, 0.0))

    if form in ("one", "ne2"):
        q = work.view(q, (D, n, N_HEAD, 1), (q_token, q_head, n * q_token))
        k, v = (work.view(each, (D, n_kv, N_KV_HEAD, 1), (cell, head, n_kv * cell)) for each in (k, v))
        return [call(q, k, v, mask)]
    if form == "calls":
        nodes = []
        for i in range(N_KV_HEAD):
            own_q = work.view(q, (D, n, N_GROUP, 1), (q_token, q_head, n * q_token), i * N_GROUP * q_head)
            k_i, v_i = (work.view(t, (D, n_kv, 1, 1), (cell, head, n_kv * cell), i * head) for t in (k, v))
            m_i = work.view(mask, (n_kv, n, 1, 1), (2 * n_kv, 2 * n_kv * n, 2 * n_kv * n), i * 2 * n_kv * n)
            nodes.append(call(own_q, k_i, v_i, m_i))
        return nodes
    q = work.view(q, (D, n, N_GROUP, N_KV_HEAD), (q_token, q_head, N_GROUP * q_head))
    k, v = (work.view(each, (D, n_kv, 1, N_KV_HEAD), (cell, head, head)) for each in (k, v))
    out = call(q, k, v, mask)
    if form == "ne3 in order":
        out = int(lib.ggml_cont(context, lib.ggml_permute(context, out, 0, 1, 3, 2)))
    return [out]


def in_order(work: Work, nodes: Sequence[int], n: int, form: str) -> np.ndarray:
    """Return the values of the nodes of `attention` as f32[n, n_head, D]."""
    if form == "calls":
        return np.concatenate([work.get(node, (n, N_GROUP, D)) for node in nodes], axis=1)
    if form == "ne3":
        out = work.get(nodes[0], (N_KV_HEAD, n, N_GROUP, D))
        return out.transpose(1, 0, 2, 3).reshape(n, N_HEAD, D)
    return work.get(nodes[0], (n, N_HEAD, D))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute attention directly from its definition, with a softmax in F64.

    q [n, n_head, D]; k, v [n_kv, n_kv_head, D]; mask [1 or n_kv_head, n, n_kv].
    """
    out = np.empty(q.shape)
    for head in range(N_HEAD):
        group = head // N_GROUP
        score = (q[:, head] @ k[:, group].T).astype(np.float64) * SCALE
        score += mask[group if len(mask) > 1 else 0].astype(np.float64)
        score = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, head] = (score / score.sum(axis=1, keepdims=True)).astype(np.float32) @ v[:, group]
    return out


def random_mask(rng: np.random.Generator, n_head: int, n: int, n_kv: int) -> np.ndarray:
    """Return a random mask, F16 [n_head, n, n_kv].

    It hides three of ten cells, and gives one of ten cells the weight of 16 tokens.
    """
    block = rng.choice(np.array([-np.inf, 0, 0, np.log(16)], np.float16), 65_521, p=[0.3, 0.4, 0.2, 0.1])
    mask = np.resize(block, n_head * n * n_kv).reshape(n_head, n, n_kv)
    mask[..., 0] = 0
    return mask


def dequantized(raw: np.ndarray, kind: int) -> np.ndarray:
    """Convert rows in f16 or q8_0 to f32[row, n]."""
    if kind == F16:
        return raw.view(np.float16).astype(np.float32)
    blocks = raw.reshape(len(raw), -1, 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    return (blocks[..., 2:].view(np.int8) * scale).reshape(len(raw), -1)


def ggml_zeros(ggml: Ggml, kind: int, n_row: int, n: int = D) -> np.ndarray:
    """Return rows of n zeros, in the bytes of a ggml type."""
    return np.zeros((n_row, ggml.row_bytes(kind, n)), np.uint8)
