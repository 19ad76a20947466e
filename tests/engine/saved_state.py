"""Read the state of a sequence, as llama.cpp saves it, into arrays.

This is the only public way to see K and V.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import gguf
import numpy as np


@dataclass
class CacheState:
    """Saved cells of one cache.

    pos: i64[n], the position of each cell.
    k, v: for each layer, the bytes of its cells, u1[n, bytes of a cell].
    k_type, v_type: ggml's numbers of the types, or -1 if there are no cells.
    """

    pos: np.ndarray
    v_is_transposed: bool
    k: list[np.ndarray]
    v: list[np.ndarray]
    k_type: int
    v_type: int

    def keys(self, layer, n_head_kv):
        """Return the stored keys f32[n, n_head_kv, head_dim].

        They are rotated by RoPE, and in some caches also by a Hadamard matrix.
        """
        return _floats(self.k[layer], self.k_type).reshape(len(self.pos), n_head_kv, -1)

    def values(self, layer, n_head_kv):
        """Return the stored values f32[n, n_head_kv, head_dim]."""
        return _floats(self.v[layer], self.v_type).reshape(len(self.pos), n_head_kv, -1)

    def rows(self, tensor, layer, n_head_kv):
        """Return the stored bytes u1[n, n_head_kv, bytes of a head]. `tensor` is "k" or "v"."""
        return getattr(self, tensor)[layer].reshape(len(self.pos), n_head_kv, -1)


class _Reader:
    def __init__(self, data):
        self.data, self.offset = data, 0

    def take(self, layout):
        values = struct.unpack_from("<" + layout, self.data, self.offset)
        self.offset += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    def bytes(self, *shape):
        n = int(np.prod(shape))
        part = np.frombuffer(self.data, np.uint8, n, self.offset).reshape(shape)
        self.offset += n
        return part


def parse(data):
    """Parse the bytes of Context.state() of a model with one cache.

    llama_kv_cache::state_write_* in llama.cpp writes them.
    """
    (cache,) = parse_all(data)
    return cache


def parse_all(data):
    """Parse the bytes of Context.state(). Return a CacheState per cache; the second is for sliding layers."""
    reader = _Reader(data)
    reader.take("Ii")  # skip the magic number and the id of the sequence
    caches = []
    while reader.offset < len(data):
        caches.append(_cache(reader))
    return caches


def _cache(reader):
    assert reader.take("I") == 1  # number of streams
    n = reader.take("I")
    if n == 0:
        return CacheState(np.empty(0, np.int64), False, [], [], -1, -1)
    pos = []
    for _ in range(n):
        cell_pos, n_seq = reader.take("iI")
        pos.append(cell_pos)
        reader.bytes(4 * n_seq)
    v_is_transposed, n_layer = reader.take("II")
    k, v, k_type, v_type = [], [], -1, -1
    for _ in range(n_layer):
        k_type, size = reader.take("iQ")
        k.append(reader.bytes(n, size))
    for _ in range(n_layer):
        if v_is_transposed:
            v_type, size, n_embd = reader.take("iII")
            v.append(reader.bytes(n_embd, n, size).swapaxes(0, 1).reshape(n, n_embd * size))
        else:
            v_type, size = reader.take("iQ")
            v.append(reader.bytes(n, size))
    return CacheState(np.array(pos), bool(v_is_transposed), k, v, k_type, v_type)


def _floats(data, number):
    kind = gguf.GGMLQuantizationType(number)
    return gguf.quants.dequantize(np.ascontiguousarray(data), kind).astype(np.float32)
