"""Micro-benchmarks of ggml on a GPU: the operations that recall needs, without a model.

    python -m lab.benchmarks.ggml_micro 2a 2b

Each line of the output is a JSON object. lab/benchmarks/gpu_check.py runs each part in a separate process.

2a  flash attention with one mask for all heads, and with a mask per KV head in different layouts
2b  copies between host and device
2c  single rows written to and read from a cache
2d  reading with archived keys and values that are copied from host memory, layer by layer
2e  writing with recall's resident tokens and cluster means, compared with attention to the full cache

All shapes come from an 8B model. --small uses sizes for a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lab.benchmarks.ggml_attention import (
    N_GROUP,
    N_HEAD,
    N_KV_HEAD,
    SMALL,
    D,
    Row,
    Sizes,
    attention,
    cells,
    dequantized,
    ggml_zeros,
    in_order,
    random_mask,
    reference,
)
from lab.benchmarks.ggml_lib import F16, F32, I32, I64, TYPES, Ggml, Work, median_s
from lab.benchmarks.ggml_steps import streamed, writing

PIECE_BYTES = 69_632
"""Size in bytes of the keys (or the values) of 512 tokens of one KV head in q8_0."""


def attentions(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2a: measure microseconds of one attention, and the relative error of its result."""
    rng = np.random.default_rng(0)
    backend = ggml.backend()
    n_cell = max(sizes.n_kv)
    for name, kind in TYPES.items():
        caches = Work(ggml, backend)
        kv = [(cells(caches, kind, n_cell), cells(caches, kind, n_cell)) for _ in range(sizes.n_node)]
        caches.alloc()
        raw = [
            ggml.quantized(rng.standard_normal((n_cell, D * N_KV_HEAD), np.float32), kind) for _ in range(2)
        ]
        plain = [dequantized(each, kind).reshape(n_cell, N_KV_HEAD, D) for each in raw]
        for pair in kv:
            for tensor, values in zip(pair, raw, strict=True):
                caches.set(tensor, values)
        for n in sizes.n_query:
            forms = ["one", "ne3", "calls"] if n == 1 else ["one", "ne3", "ne3 in order", "calls"]
            for n_kv in sizes.n_kv:
                for form in forms:
                    # use fewer nodes for a long step, which is slow enough to be measured precisely
                    n_node = sizes.n_node if n < 512 else max(sizes.n_node // 8, 1)
                    row = {"what": form, "type": name, "n": n, "n_kv": n_kv}
                    yield row | _attention(ggml, rng, backend, kv[:n_node], plain, kind, n, n_kv, form)
        caches.free()


def _attention(
    ggml: Ggml,
    rng: np.random.Generator,
    backend: int,
    kv: list[tuple[int, int]],
    plain: list[np.ndarray],
    kind: int,
    n: int,
    n_kv: int,
    form: str,
) -> Row:
    work = Work(ggml, backend)
    try:
        n_mask = 1 if form == "one" else N_KV_HEAD
        q = work.tensor(F32, D, N_HEAD, n)
        mask = work.tensor(F16, n_kv, n, 1, n_mask)
        by_layer = [attention(work, q, k, v, mask, kind, n, n_kv, form) for k, v in kv]
        if not all(work.supports(node) for node in by_layer[0]):
            return {"supported": False}
        graph = work.graph([node for nodes in by_layer for node in nodes])
        work.alloc()
        queries = rng.standard_normal((n, N_HEAD, D), np.float32)
        values = random_mask(rng, n_mask, n, n_kv)
        work.set(q, queries)
        work.set(mask, values)
        seconds = median_s(partial(work.compute, graph), seconds=0.1)
        some = np.unique(np.linspace(0, n - 1, 3).astype(int))
        want = reference(queries[some], *(each[:n_kv] for each in plain), values[:, some])
        got = in_order(work, by_layer[-1], n, form)[some]
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        return {"supported": True, "us": 1e6 * seconds / len(kv), "error": error}
    finally:
        work.free()


def layouts(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2a: find the layouts of masks and sinks that the device's flash attention supports."""
    backend = ggml.backend()
    for name, kind in TYPES.items():
        for n in (1, 16, 1024):
            for form, n_sink in (("one", 0), ("one", N_HEAD), ("ne3", 0), ("ne3", N_GROUP), ("ne2", 0)):
                work = Work(ggml, backend)
                shape = {"one": (1, 1), "ne3": (1, N_KV_HEAD), "ne2": (N_HEAD, 1)}[form]
                q, mask = work.tensor(F32, D, N_HEAD, n), work.tensor(F16, 1024, n, *shape)
                k, v = cells(work, kind, 1024), cells(work, kind, 1024)
                node = attention(work, q, k, v, mask, kind, n, 1024, form)[0]
                if n_sink:
                    ggml.lib.ggml_flash_attn_ext_add_sinks(node, work.tensor(F32, n_sink))
                what = f"mask in {form}" + (", sinks" if n_sink else "")
                yield {"what": what, "type": name, "n": n, "supported": work.supports(node)}
                work.free()


def copies(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2b: measure copies in microseconds and GB/s, and the share of a copy that is hidden by other work."""
    backend, other = ggml.backend(), ggml.backend()
    lib, size = ggml.lib, sizes.copy_bytes
    work = Work(ggml, backend)
    target = work.tensor(F32, size // 4)
    work.alloc()
    sources = {"pinned": ggml.pinned(size), "pageable": np.zeros(size, np.uint8)}
    yield {"what": "host buffer type", "value": ggml.host_memory()}
    for name, source in sources.items():
        source[:] = 1

        def whole(source: np.ndarray = source) -> None:
            lib.ggml_backend_tensor_set_async(backend, target, source.ctypes.data, 0, size)
            ggml.sync(backend)

        def pieces(source: np.ndarray = source) -> None:
            at = source.ctypes.data
            for begin in range(0, size - PIECE_BYTES + 1, PIECE_BYTES):
                lib.ggml_backend_tensor_set_async(backend, target, at + begin, begin, PIECE_BYTES)
            ggml.sync(backend)

        def strided(source: np.ndarray = source) -> None:
            # copy keys of one KV head to a cache whose cells hold the keys of all heads
            head, cell = D // 32 * 34, D // 32 * 34 * N_KV_HEAD
            n = size // cell
            lib.ggml_backend_tensor_set_2d_async(backend, target, source.ctypes.data, 0, head, n, cell, head)
            ggml.sync(backend)

        n_piece = size // PIECE_BYTES
        yield {"what": f"{name}, one copy", "bytes": size, **_rate(whole, size)}
        yield {"what": f"{name}, pieces", "bytes": PIECE_BYTES, **_rate(pieces, n_piece * PIECE_BYTES)}
        if ggml.has("ggml_backend_tensor_set_2d_async"):
            yield {"what": f"{name}, 2d of one head", "bytes": 136, **_rate(strided, size // 8)}
        for n_bytes in (4096, PIECE_BYTES):

            def one(n_bytes: int = n_bytes, source: np.ndarray = source) -> None:
                lib.ggml_backend_tensor_set_async(backend, target, source.ctypes.data, 0, n_bytes)
                ggml.sync(backend)

            yield {"what": f"{name}, to the device", "bytes": n_bytes, **_rate(one, n_bytes)}
        for n_bytes in (65_536, min(1 << 20, size)):

            def back(n_bytes: int = n_bytes, source: np.ndarray = source) -> None:
                lib.ggml_backend_tensor_get_async(backend, target, source.ctypes.data, 0, n_bytes)
                ggml.sync(backend)

            yield {"what": f"{name}, from the device", "bytes": n_bytes, **_rate(back, n_bytes)}
    yield from _overlap(ggml, sizes, backend, other, target, sources["pinned"])
    work.free()


def _rate(run: Callable[[], object], n_bytes: int) -> Row:
    seconds = median_s(run, seconds=0.1)
    return {"us": 1e6 * seconds, "gb_per_s": n_bytes / seconds / 1e9}


def _overlap(
    ggml: Ggml, sizes: Sizes, backend: int, other: int, target: int, source: np.ndarray
) -> Iterator[Row]:
    """Measure a long attention on one backend while another backend copies."""
    n, n_kv = max(sizes.n_query), max(sizes.n_kv)
    work = Work(ggml, backend)
    q, mask = work.tensor(F32, D, N_HEAD, n), work.tensor(F16, n_kv, n)
    k, v = cells(work, F16, n_kv), cells(work, F16, n_kv)
    graph = work.graph([attention(work, q, k, v, mask, F16, n, n_kv, "one")[0] for _ in range(4)])
    work.alloc()
    for tensor, shape in ((k, (n_kv, D * N_KV_HEAD)), (v, (n_kv, D * N_KV_HEAD)), (mask, (n, n_kv))):
        work.set(tensor, np.zeros(shape, np.float16))
    work.set(q, np.ones((n, N_HEAD, D), np.float32))
    compute = median_s(partial(work.compute, graph))

    def copy() -> None:
        ggml.lib.ggml_backend_tensor_set_async(other, target, source.ctypes.data, 0, sizes.copy_bytes)

    def both(n_copy: int) -> None:
        work.start(graph)
        for _ in range(n_copy):
            copy()
        ggml.sync(backend, other)

    def alone(n_copy: int) -> None:
        for _ in range(n_copy):
            copy()
        ggml.sync(other)

    # choose a number of copies that takes about as long as the attention
    n_copy = max(round(compute / median_s(partial(alone, 1))), 1)
    copying, together = median_s(partial(alone, n_copy)), median_s(partial(both, n_copy))
    hidden = (compute + copying - together) / min(compute, copying)
    times = {"compute_us": 1e6 * compute, "copy_us": 1e6 * copying, "us": 1e6 * together}
    yield {"what": "attention beside a pinned copy", **times, "hidden": hidden}
    work.free()


def rows(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2c: measure writing and reading cache rows of 128 values, with 64 nodes in a graph or with one."""
    backend = ggml.backend()
    n_cell = 4096
    rng = np.random.default_rng(0)
    for name, kind in (("f32", F32), *TYPES.items()):
        for n_node, n_row in ((64, 64), (1, 4096), (64, 16)):
            for what in ("set_rows", "get_rows", "cpy from f16", "cpy from f32"):
                work = Work(ggml, backend)
                cache = work.tensor(kind, D, n_cell * N_KV_HEAD)
                nodes, filled = [], []
                for _ in range(n_node):
                    index = work.tensor(I64 if what == "set_rows" else I32, n_row)
                    if what == "set_rows":
                        source = work.tensor(F32, D, n_row)
                        nodes.append(ggml.lib.ggml_set_rows(work.context, cache, source, index))
                        filled.append((index, np.int64))
                    elif what == "get_rows":
                        nodes.append(ggml.lib.ggml_get_rows(work.context, cache, index))
                        filled.append((index, np.int32))
                    else:
                        source = work.tensor(F16 if what.endswith("f16") else F32, D, n_row)
                        nodes.append(ggml.lib.ggml_cpy(work.context, source, work.tensor(kind, D, n_row)))
                row: Row = {"what": what, "type": name, "nodes": n_node, "rows": n_row}
                row["supported"] = all(work.supports(node) for node in nodes)
                if row["supported"]:
                    graph = work.graph(nodes)
                    work.alloc()
                    work.set(cache, ggml_zeros(ggml, kind, n_cell * N_KV_HEAD))
                    for index, dtype in filled:
                        work.set(index, rng.permutation(n_cell * N_KV_HEAD)[:n_row].astype(dtype))
                    row["us"] = 1e6 * median_s(partial(work.compute, graph), seconds=0.05)
                yield row
                work.free()


PARTS: dict[str, list[Callable[[Ggml, Sizes], Iterator[Row]]]] = {
    "2a": [layouts, attentions],
    "2b": [copies],
    "2c": [rows],
    "2d": [streamed],
    "2e": [writing],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    ggml = Ggml()
    for part in args.parts:
        for measure in PARTS[part]:
            for row in measure(ggml, SMALL if args.small else Sizes()):
                print(json.dumps({"part": part, "at_s": round(time.perf_counter(), 1), **row}), flush=True)


if __name__ == "__main__":
    main()
