"""Observe the queries, keys, values and attention that a model computes while it reads a text.

llama.cpp shows them to a callback, before and after each operation of its graph. The patch is not needed. A
layer's attention, build_attn_mha in llama.cpp, is the same for every architecture: "kq" is the product of
keys and queries after RoPE, "kq_soft_max" the attention, "kqv" its product with the values. Keys before RoPE
have no name; the graph shows from which tensor RoPE makes the keys that go to the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

import numpy as np

from kvtool.errors import LibraryError, ModelError
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.library import api, bind, lib
from kvtool.llama.loaded.model import Model
from kvtool.system.paths import build_command


class Observed(Enum):
    """Arrays that can be observed. KEYS_BEFORE: before RoPE; KEYS and QUERIES: after it."""

    QUERIES = "queries"
    KEYS_BEFORE = "keys before RoPE"
    KEYS = "keys"
    VALUES = "values"
    ATTENTION = "attention"


Visit = Callable[[Observed, int, int, np.ndarray], None]
"""A function that takes the kind of array, the layer, the head, and the array.

The array is f32[n, dim], or for ATTENTION f32[n, n] by query and key. Heads are query heads for QUERIES and
ATTENTION, and KV heads for all other kinds.
"""

_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
"""ggml's numbers of the types that observed tensors may have."""


class _Tensor(ctypes.Structure):
    """The start of ggml_tensor; the offset of `name` is checked."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


def observe(
    model: Model,
    tokens: np.ndarray,
    wanted: Collection[Observed],
    layers: Collection[int],
    visit: Visit,
    n_threads: int | None = None,
) -> None:
    """Read a text i32[n] once, without evictions, and visit the wanted arrays of the layers in their order.

    A layer's queries and keys come first, then its attention, head by head, then its values. The text is one
    batch, so that llama.cpp holds the attention of one layer at a time. The cache is in F32, without flash
    attention. The visitor gets copies of the arrays. If it raises an exception, the reading ends.

    Raises ModelError if llama.cpp does not show a wanted array of a layer (keys before RoPE may be missing),
    and the errors of `Decoder`.
    """
    n = len(tokens)
    observer = _Observer(model, n, frozenset(wanted), frozenset(layers), visit)
    decoder = Decoder(
        model, n, n, type_k="f32", type_v="f32", flash="off", n_threads=n_threads, on_tensor=observer.callback
    )
    try:
        decoder.decode(tokens, 0, 1)
    finally:
        decoder.close()
        if observer.error:
            raise observer.error
    for observed in observer.wanted - {Observed.KEYS_BEFORE}:
        if missing := sorted(observer.layers - observer.seen[observed]):
            raise ModelError(f"llama.cpp shows no {observed.value} of layer {missing[0]} of {observer.name}")


class _Observer:
    """Read the wanted tensors of one decode of n tokens. error: the exception that ended it."""

    def __init__(
        self, model: Model, n: int, wanted: frozenset[Observed], layers: frozenset[int], visit: Visit
    ) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        bind("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        bind("ggml_get_name", pointer, pointer)
        bind("ggml_op_desc", ctypes.c_char_p, pointer)
        self.name = model.path.name
        self.wanted = wanted
        self.layers = layers
        self.seen: dict[Observed, set[int]] = {observed: set() for observed in Observed}
        self.error: BaseException | None = None
        self.callback = api.ggml_backend_sched_eval_callback(self._call)
        self._n = n
        self._visit = visit
        self._is_checked = False
        shapes = {(each.head_size_k, each.n_head_kv) for each in model.layers.all if each.number in layers}
        self._before = _KeysBefore(n, shapes) if Observed.KEYS_BEFORE in wanted else None

    def _call(self, address: int, asked: bool, _: object) -> bool:
        """If llama.cpp asks, say whether a tensor is wanted. Otherwise read it and return True."""
        # ctypes would drop an exception of a callback: keep it, and return False to end the decode
        try:
            return self.error is None and self._look(address, asked)
        except BaseException as error:  # noqa: BLE001
            self.error = error
            return False

    def _look(self, address: int, asked: bool) -> bool:
        tensor = _Tensor.from_address(address)
        if not self._is_checked:
            if lib.ggml_get_name(address) != address + _Tensor.name.offset:
                raise LibraryError(
                    f"this llama.cpp lays out tensors in another way; build the right one: {build_command()}"
                )
            self._is_checked = True
        name, _, number = tensor.name.partition(b"-")
        layer = int(number) if number.isdigit() else -1
        arrays = {
            b"kq": {
                Observed.QUERIES: tensor.src[1],
                Observed.KEYS: tensor.src[0],
                Observed.KEYS_BEFORE: tensor.src[0],
            },
            b"kq_soft_max": {Observed.ATTENTION: address},
            b"kqv": {Observed.VALUES: tensor.src[0]},
        }.get(name, {})
        if layer not in self.layers or self.wanted.isdisjoint(arrays):
            return self._before is not None and self._before.look(address, tensor, asked)
        for observed, at in arrays.items():
            if asked or observed not in self.wanted:
                continue
            if observed is Observed.KEYS_BEFORE:
                self._heads_before(layer, at)
            else:
                self._heads(observed, layer, at)
        return True

    def _heads_before(self, layer: int, cache: int) -> None:
        """Visit each head of a layer's keys before RoPE, if these keys are known."""
        assert self._before
        keys = self._before.of(_Tensor.from_address(cache))
        if keys is not None:
            self.seen[Observed.KEYS_BEFORE].add(layer)
            for head in range(keys.shape[1]):
                self._visit(Observed.KEYS_BEFORE, layer, head, keys[:, head].copy())

    def _heads(self, observed: Observed, layer: int, address: int) -> None:
        """Visit each head of a tensor [head, n, dim]. Keys and values also have unused cells after n."""
        tensor, n = _Tensor.from_address(address), self._n
        # the first axis (ne[0]) of values is the cell, as llama.cpp stores them transposed
        of_tokens = 0 if observed is Observed.VALUES else 1
        n_token = tensor.ne[of_tokens]
        is_cells = observed in (Observed.KEYS, Observed.VALUES)
        if tensor.ne[3] != 1 or n_token < n or (n_token > n and not is_cells) or layer in self.seen[observed]:
            raise ModelError(f"{self.name} computes {observed.value} in parts, which no map can show")
        self.seen[observed].add(layer)
        for head in range(tensor.ne[2]):
            array = _read(address, tensor, head)[0, 0]
            if observed is Observed.VALUES:
                array = array.T
            # a text that is read into an empty cache has its cells in order
            array = array[:n, :n] if observed is Observed.ATTENTION else array[:n]
            self._visit(observed, layer, head, np.ascontiguousarray(array))


class _KeysBefore:
    """Keys before RoPE.

    These keys have no name in the graph, so every tensor that may be such keys is kept until the layer's keys
    are multiplied by its queries. Then the graph shows from which tensor RoPE made the keys.

    n: number of tokens. shapes: head size and number of KV heads, of the observed layers' keys.
    """

    def __init__(self, n: int, shapes: Collection[tuple[int, int]]) -> None:
        self._n = n
        self._shapes = shapes
        self._kept: dict[int, np.ndarray] = {}
        self._written: dict[int, int] = {}

    def look(self, address: int, tensor: _Tensor, asked: bool) -> bool:
        """If llama.cpp asks, say whether the tensor may be keys before RoPE. Otherwise keep the tensor."""
        op = lib.ggml_op_desc(address)
        if op == b"SET_ROWS":
            # this operation writes to a cache
            self._written[tensor.view_src] = tensor.src[0]
        dim, n_head, n, n_stream = tensor.ne
        if op == b"ROPE" or (dim, n_head) not in self._shapes or (n, n_stream) != (self._n, 1):
            return False
        if not asked:
            self._kept[address] = _read(address, tensor)[0]
        return True

    def of(self, cache: _Tensor) -> np.ndarray | None:
        """Return a layer's keys f32[n, head, dim] before RoPE, and drop all tensors kept so far.

        cache: the tensor with the layer's keys in the cache. If the model has no RoPE, return the keys that
        are in the cache. None if llama.cpp computes keys in an unknown way.
        """
        kept, self._kept = self._kept, {}
        at: int | None = self._written.get(cache.view_src)
        last = None
        # walk back from the cache: a view, perhaps a norm, then RoPE or the product with the layer's weights
        while at:
            tensor, op = _Tensor.from_address(at), lib.ggml_op_desc(at)
            if op == b"ROPE":
                return kept.get(tensor.src[0])
            last = kept.get(at) if last is None else last
            if op == b"MUL_MAT":
                return last
            at = tensor.src[0]
        return None


def _read(address: int, tensor: _Tensor, at: int | None = None) -> np.ndarray:
    """Return a tensor of any strides as f32[ne3, ne2, ne1, ne0]. at: read only this index of ne2."""
    if tensor.type not in _DTYPES:
        raise ModelError(f"llama.cpp computes {tensor.name.decode()} in a type that no map can show")
    dtype, shape, strides = _DTYPES[tensor.type], list(tensor.ne), list(tensor.nb)
    offset = 0
    if at is not None:
        offset, shape[2], shape[3] = at * strides[2], 1, 1
    n_bytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    data = np.empty(n_bytes, np.uint8)
    lib.ggml_backend_tensor_get(address, data.ctypes.data, offset, n_bytes)
    return np.ndarray(shape[::-1], dtype, data, strides=strides[::-1]).astype(np.float32)
