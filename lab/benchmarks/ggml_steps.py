"""Parts 2d and 2e of ggml_micro.py: steps that read or write tokens, with an archive in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.benchmarks.ggml_attention import (
    N_HEAD,
    N_KV_HEAD,
    D,
    Row,
    Sizes,
    attention,
    cells,
    ggml_zeros,
    random_mask,
)
from lab.benchmarks.ggml_lib import F16, F32, I64, Q4_0, TYPES, Ggml, Work, median_s


class Matrices:
    """Weights of one layer of an 8B model in Q4_0, and their products with a chunk of tokens."""

    SHAPES = (
        *((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)),
        *((4096, 14336), (4096, 14336), (14336, 4096)),
    )
    """Sizes [in, out] of the matrices of attention and of the feed-forward network."""

    def __init__(self, work: Work, n: int, divisor: int) -> None:
        self.work, self.n = work, n
        self.shapes = [(n_in // divisor, n_out // divisor) for n_in, n_out in self.SHAPES]
        self.weights = [work.tensor(Q4_0, *shape) for shape in self.shapes]
        self.inputs = {n_in: work.tensor(F32, n_in, n) for n_in, _ in self.shapes}

    def nodes(self) -> list[int]:
        """Return a node for the product with each matrix."""
        lib, context = self.work.lib, self.work.context
        pairs = zip(self.weights, self.shapes, strict=True)
        return [lib.ggml_mul_mat(context, weight, self.inputs[n_in]) for weight, (n_in, _) in pairs]

    def fill(self, rng: np.random.Generator) -> None:
        for weight, (n_in, n_out) in zip(self.weights, self.shapes, strict=True):
            blocks = rng.integers(0, 256, (n_out, n_in // 32, 18), np.uint8)
            blocks[..., :2] = np.array([0.01], np.float16).view(np.uint8)
            self.work.set(weight, blocks)
        for n_in, tensor in self.inputs.items():
            self.work.set(tensor, rng.standard_normal((self.n, n_in), np.float32))


def streamed(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2d: measure microseconds per layer if archived keys and values are copied to the device first.

    us_compute: time of computing alone. us_copy: time of copying alone. us_serial: each layer is copied and
    then computed. us_overlap: a layer is copied while the layer before it is computed, with two staging
    buffers.

    A layer has only attention ("attention"), or attention and the products with the weights of an 8B model's
    layer ("whole").
    """
    rng = np.random.default_rng(0)
    for name, kind in sorted(TYPES.items(), reverse=True):
        n_bytes = max(sizes.archived) * ggml.row_bytes(kind, D * N_KV_HEAD)
        hosts = [ggml.pinned(n_bytes) for _ in range(2)]
        raw = ggml.quantized(rng.standard_normal((256, D * N_KV_HEAD), np.float32), kind)
        for host in hosts:
            host[:] = np.resize(raw.reshape(-1), n_bytes)
        for n_archived in sizes.archived:
            for n in sizes.chunks:
                for layer in ("attention", "whole"):
                    row = {"what": layer, "type": name, "n": n, "archived": n_archived}
                    yield row | _streamed(ggml, sizes, rng, kind, hosts, n, n_archived, layer)


def _streamed(
    ggml: Ggml,
    sizes: Sizes,
    rng: np.random.Generator,
    kind: int,
    hosts: list[np.ndarray],
    n: int,
    n_archived: int,
    layer: str,
) -> Row:
    lib = ggml.lib
    compute, copier = ggml.backend(), ggml.backend()
    work = Work(ggml, compute)
    n_kv = n_archived + n
    q, mask = work.tensor(F32, D, N_HEAD, n), work.tensor(F16, n_kv, n)
    staging = [(cells(work, kind, n_kv), cells(work, kind, n_kv)) for _ in range(2)]
    matrices = Matrices(work, n, 1 if ggml.is_gpu else 16) if layer == "whole" else None
    graphs = []
    for k, v in staging:
        nodes = attention(work, q, k, v, mask, kind, n, n_kv, "one")
        graphs.append(work.graph([*nodes, *(matrices.nodes() if matrices else [])]))
    work.alloc()
    work.set(q, rng.standard_normal((n, N_HEAD, D), np.float32))
    work.set(mask, np.zeros((n, n_kv), np.float16))
    for pair in staging:
        for tensor in pair:
            work.set(tensor, ggml_zeros(ggml, kind, n_kv, D * N_KV_HEAD))
    if matrices:
        matrices.fill(rng)
    n_bytes = n_archived * ggml.row_bytes(kind, D * N_KV_HEAD)
    done, copied = ([ggml.event() for _ in range(2)] for _ in range(2))

    def copy(i: int) -> None:
        for tensor, host in zip(staging[i], hosts, strict=True):
            lib.ggml_backend_tensor_set_async(copier, tensor, host.ctypes.data, 0, n_bytes)

    def computing() -> None:
        for at in range(sizes.n_read_layer):
            work.start(graphs[at % 2])
        ggml.sync(compute)

    def copying() -> None:
        for at in range(sizes.n_read_layer):
            copy(at % 2)
        ggml.sync(copier)

    def serial() -> None:
        for at in range(sizes.n_read_layer):
            copy(at % 2)
            ggml.sync(copier)
            work.compute(graphs[at % 2])

    def overlapped() -> None:
        for at in range(sizes.n_read_layer):
            i = at % 2
            if at > 1:
                lib.ggml_backend_event_wait(copier, done[i])
            copy(i)
            lib.ggml_backend_event_record(copied[i], copier)
            lib.ggml_backend_event_wait(compute, copied[i])
            work.start(graphs[i])
            lib.ggml_backend_event_record(done[i], compute)
        ggml.sync(compute, copier)

    ways = {"us_compute": computing, "us_copy": copying, "us_serial": serial}
    if all(done) and all(copied):
        ways["us_overlap"] = overlapped
    row: Row = {
        name: 1e6 * median_s(way, seconds=0.1, warm=2) / sizes.n_read_layer for name, way in ways.items()
    }
    work.free()
    for event in filter(None, [*done, *copied]):
        lib.ggml_backend_event_free(event)
    for backend in (compute, copier):
        lib.ggml_backend_free(backend)
    return row | {"copy_gb_per_s": 2 * n_bytes / float(row["us_copy"]) / 1e3}  # type: ignore[arg-type]


def writing(ggml: Ggml, sizes: Sizes) -> Iterator[Row]:
    """2e: measure the microseconds that the attention of all layers takes in a step of one token.

    "full": attention to the whole cache, with one mask. "resident": attention to the window, to archived
    tokens that stay on the device (resident), and to cluster means, with a mask per KV head. "resident,
    uploads": a step also uploads 64 pieces of 16 tokens, writes them to the cache, and copies all queries to
    the host.
    """
    rng = np.random.default_rng(0)
    for name, kind in TYPES.items():
        backend = ggml.backend()
        caches = Work(ggml, backend)
        n_cell = max(*sizes.full, *sizes.resident)
        kv = [(cells(caches, kind, n_cell), cells(caches, kind, n_cell)) for _ in range(sizes.n_layer)]
        caches.alloc()
        # repeat the same rows in the cache, because new random values for 17 GB would take too long
        raw = ggml.quantized(rng.standard_normal((min(n_cell, 32768), D * N_KV_HEAD), np.float32), kind)
        for pair in kv:
            for tensor in pair:
                for begin in range(0, n_cell, len(raw)):
                    part = raw[: n_cell - begin]
                    caches.set(tensor, part, begin * raw.shape[1])
        for n_kv in sizes.full:
            yield {"what": "full", "type": name, "n_kv": n_kv} | _writing(
                ggml, backend, kv, kind, n_kv, "one"
            )
        for n_kv in sizes.resident:
            row: Row = {"what": "resident", "type": name, "n_kv": n_kv}
            yield row | _writing(ggml, backend, kv, kind, n_kv, "ne3")
            row["what"] = "resident, uploads"
            yield row | _writing(ggml, backend, kv, kind, n_kv, "ne3", uploads=True)
        caches.free()
        ggml.lib.ggml_backend_free(backend)


def _writing(
    ggml: Ggml,
    backend: int,
    kv: list[tuple[int, int]],
    kind: int,
    n_kv: int,
    form: str,
    *,
    uploads: bool = False,
) -> Row:
    lib, n_layer = ggml.lib, len(kv)
    work = Work(ggml, backend)
    queries = work.tensor(F32, D, N_HEAD, n_layer)
    n_mask = 1 if form == "one" else N_KV_HEAD
    masks = [work.tensor(F16, n_kv, 1, 1, n_mask) for _ in (kv if form == "ne3" else kv[:1])]
    n_piece, n_token = 64, 16
    packed, index = work.tensor(F32, D, n_token, 2 * n_piece), work.tensor(I64, n_token, 2 * n_piece)
    nodes, n_written = [], 0
    for layer, (k, v) in enumerate(kv):
        if uploads:
            head = ggml.row_bytes(kind, D)
            for tensor in (k, v):
                flat = work.view(
                    tensor, (D, n_kv * N_KV_HEAD, 1, 1), (head, n_kv * 8 * head, n_kv * 8 * head)
                )
                for _ in range(n_piece // n_layer):
                    size = 4 * D * n_token
                    source = work.view(packed, (D, n_token, 1, 1), (4 * D, size, size), n_written * size)
                    dst = work.view(index, (n_token, 1, 1, 1), (8 * n_token,) * 3, n_written * 8 * n_token)
                    nodes.append(lib.ggml_set_rows(work.context, flat, source, dst))
                    n_written += 1
        q = work.view(queries, (D, N_HEAD, 1, 1), (4 * D, *(4 * D * N_HEAD,) * 2), layer * 4 * D * N_HEAD)
        nodes += attention(work, q, k, v, masks[layer % len(masks)], kind, 1, n_kv, form)
    graph = work.graph(nodes)
    work.alloc()
    rng = np.random.default_rng(1)
    work.set(queries, rng.standard_normal((n_layer, N_HEAD, D), np.float32))
    for mask in masks:
        work.set(mask, random_mask(rng, n_mask, 1, n_kv))
    sent = ggml.pinned(4 * D * n_token * 2 * n_piece)
    sent.view(np.float32)[:] = 0.5
    sent_index = ggml.pinned(8 * n_token * 2 * n_piece)
    sent_index.view(np.int64)[:] = rng.permutation(n_kv * N_KV_HEAD)[: n_token * 2 * n_piece]
    read = ggml.pinned(4 * D * N_HEAD * n_layer)
    work.set(index, sent_index)

    def step() -> None:
        if uploads:
            lib.ggml_backend_tensor_set_async(backend, packed, sent.ctypes.data, 0, sent.nbytes)
            lib.ggml_backend_tensor_set_async(backend, index, sent_index.ctypes.data, 0, sent_index.nbytes)
        work.start(graph)
        if uploads:
            lib.ggml_backend_tensor_get_async(backend, queries, read.ctypes.data, 0, read.nbytes)
        ggml.sync(backend)

    row: Row = {"us": 1e6 * median_s(step, seconds=0.1, warm=4)}
    work.free()
    return row
