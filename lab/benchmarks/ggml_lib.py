"""The parts of ggml's C API that ggml_micro.py needs, by ctypes: tensors, graphs, backends and events.

The library is the same that kvtool uses. Tensors, graphs and backends are plain addresses (int).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtool.llama.libllama.devices import devices
from kvtool.llama.libllama.library import library_path
from kvtool.llama.libllama.log import start_backends

F32, F16, Q4_0, Q8_0, I32, I64 = 0, 1, 2, 8, 26, 27
"""Ids of ggml's types."""

TYPES = {"f16": F16, "q8_0": Q8_0}

_P, _I, _N, _L, _F, _B = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_bool,
)


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _N), ("mem_buffer", _P), ("no_alloc", _B)]


_SIGNATURES = {
    # name: result, arguments
    "ggml_init": (_P, _InitParams),
    "ggml_free": (None, _P),
    "ggml_new_tensor_4d": (_P, _P, _I, _L, _L, _L, _L),
    "ggml_view_4d": (_P, _P, _P, _L, _L, _L, _L, _N, _N, _N, _N),
    "ggml_permute": (_P, _P, _P, _I, _I, _I, _I),
    "ggml_cont": (_P, _P, _P),
    "ggml_cpy": (_P, _P, _P, _P),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_set_rows": (_P, _P, _P, _P, _P),
    "ggml_get_rows": (_P, _P, _P, _P),
    "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, _F, _F, _F),
    "ggml_flash_attn_ext_add_sinks": (None, _P, _P),
    "ggml_new_graph_custom": (_P, _P, _N, _B),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_nbytes": (_N, _P),
    "ggml_row_size": (_N, _I, _L),
    "ggml_tensor_overhead": (_N,),
    "ggml_graph_overhead_custom": (_N, _N, _B),
    "ggml_quantize_chunk": (_N, _I, _P, _P, _L, _L, _L, _P),
    "ggml_backend_dev_count": (_N,),
    "ggml_backend_dev_get": (_P, _N),
    "ggml_backend_dev_name": (ctypes.c_char_p, _P),
    "ggml_backend_dev_init": (_P, _P, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (_B, _P, _P),
    "ggml_backend_dev_buffer_type": (_P, _P),
    "ggml_backend_dev_host_buffer_type": (_P, _P),
    "ggml_backend_buft_alloc_buffer": (_P, _P, _N),
    "ggml_backend_buft_name": (ctypes.c_char_p, _P),
    "ggml_backend_buffer_get_base": (_P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_alloc_ctx_tensors": (_P, _P, _P),
    "ggml_backend_tensor_set": (None, _P, _P, _N, _N),
    "ggml_backend_tensor_get": (None, _P, _P, _N, _N),
    "ggml_backend_tensor_set_async": (None, _P, _P, _P, _N, _N),
    "ggml_backend_tensor_get_async": (None, _P, _P, _P, _N, _N),
    "ggml_backend_tensor_set_2d_async": (None, _P, _P, _P, _N, _N, _N, _N, _N),
    "ggml_backend_graph_compute": (_I, _P, _P),
    "ggml_backend_graph_compute_async": (_I, _P, _P),
    "ggml_backend_synchronize": (None, _P),
    "ggml_backend_free": (None, _P),
    "ggml_backend_event_new": (_P, _P),
    "ggml_backend_event_free": (None, _P),
    "ggml_backend_event_record": (None, _P, _P),
    "ggml_backend_event_wait": (None, _P, _P),
}


class Ggml:
    """ggml's functions, and one device: the first GPU, or else the CPU.

    Attributes
    ----------
    device
        ggml's device.
    name, is_gpu
        Name of the device, and whether it is a GPU.
    """

    def __init__(self) -> None:
        start_backends()
        # load the library again, because the argument types declared here must not change kvtool's object
        self.lib = ctypes.CDLL(str(library_path()))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self.lib, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
        listed = devices()
        gpus = [i for i, each in enumerate(listed) if each["type"] in ("gpu", "igpu")]
        self.is_gpu = bool(gpus)
        at = gpus[0] if gpus else next(i for i, each in enumerate(listed) if each["type"] == "cpu")
        self.device: int = self.lib.ggml_backend_dev_get(at)
        self.name: str = listed[at]["name"]

    def has(self, function: str) -> bool:
        """True if the library exports the function."""
        return hasattr(self.lib, function)

    def backend(self) -> int:
        """Return a new backend on the device; on a GPU it has its own stream."""
        return int(self.lib.ggml_backend_dev_init(self.device, None))

    def event(self) -> int | None:
        """Return a new event; None if the device has no events."""
        return self.lib.ggml_backend_event_new(self.device) or None

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Return u8[n_bytes] in host memory that the device can read directly (pinned memory).

        If the device has no such memory, use ordinary memory.
        """
        kind = self.lib.ggml_backend_dev_host_buffer_type(self.device)
        if not kind:
            return np.zeros(n_bytes, np.uint8)
        buffer = self.lib.ggml_backend_buft_alloc_buffer(kind, n_bytes)
        base = self.lib.ggml_backend_buffer_get_base(buffer)
        # this memory is never freed: the process ends after its measurements
        return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(base))

    def host_memory(self) -> str:
        """Name of the buffer type of pinned host memory; "none" if there is no such type."""
        kind = self.lib.ggml_backend_dev_host_buffer_type(self.device)
        return self.lib.ggml_backend_buft_name(kind).decode() if kind else "none"

    def row_bytes(self, kind: int, n: int) -> int:
        """Return the number of bytes of n values of a type."""
        return int(self.lib.ggml_row_size(kind, n))

    def quantized(self, values: np.ndarray, kind: int) -> np.ndarray:
        """Convert f32[row, n] to a type. Return u8[row, bytes]."""
        if kind == F16:
            return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)
        values = np.ascontiguousarray(values, np.float32)
        out = np.empty((values.shape[0], self.row_bytes(kind, values.shape[1])), np.uint8)
        self.lib.ggml_quantize_chunk(kind, values.ctypes.data, out.ctypes.data, 0, *values.shape, None)
        return out

    def sync(self, *backends: int) -> None:
        """Wait for all work of the backends."""
        for backend in backends:
            self.lib.ggml_backend_synchronize(backend)


class Work:
    """Tensors and graphs of one measurement. All are in the memory of one backend."""

    def __init__(self, ggml: Ggml, backend: int, n_tensor: int = 4096, n_graph: int = 16) -> None:
        self.ggml, self.lib, self.backend = ggml, ggml.lib, backend
        lib = ggml.lib
        self._n_node = n_tensor
        size = n_tensor * lib.ggml_tensor_overhead() + n_graph * lib.ggml_graph_overhead_custom(
            n_tensor, False
        )
        self.context = lib.ggml_init(_InitParams(size, None, True))
        self._buffer: int | None = None

    def tensor(self, kind: int, *ne: int) -> int:
        """Return a new tensor of up to four axes, the innermost first."""
        return int(self.lib.ggml_new_tensor_4d(self.context, kind, *ne, *[1] * (4 - len(ne))))

    def view(self, tensor: int, ne: Sequence[int], nb: Sequence[int], offset: int = 0) -> int:
        """Return a view with four axes. ne: their lengths. nb: strides of the last three axes in bytes."""
        return int(self.lib.ggml_view_4d(self.context, tensor, *ne, *nb, offset))

    def graph(self, nodes: Sequence[int]) -> int:
        graph = self.lib.ggml_new_graph_custom(self.context, self._n_node, False)
        for node in nodes:
            self.lib.ggml_build_forward_expand(graph, node)
        return int(graph)

    def alloc(self) -> None:
        """Allocate every tensor that has no memory yet. Raises MemoryError."""
        self._buffer = self.lib.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        if not self._buffer:
            raise MemoryError("the device has no memory for this measurement")

    def free(self) -> None:
        if self._buffer:
            self.lib.ggml_backend_buffer_free(self._buffer)
        self.lib.ggml_free(self.context)

    def set(self, tensor: int, values: np.ndarray, offset: int = 0) -> None:
        """Write the bytes of an array to a tensor, starting at a byte offset."""
        values = np.ascontiguousarray(values)
        self.lib.ggml_backend_tensor_set(tensor, values.ctypes.data, offset, values.nbytes)

    def get(self, tensor: int, shape: Sequence[int], dtype: type = np.float32) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.lib.ggml_backend_tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def supports(self, node: int) -> bool:
        """True if the device computes this node."""
        return bool(self.lib.ggml_backend_dev_supports_op(self.ggml.device, node))

    def start(self, graph: int) -> None:
        """Start to compute a graph, without waiting for the result. Raises RuntimeError if this fails."""
        if status := self.lib.ggml_backend_graph_compute_async(self.backend, graph):
            raise RuntimeError(f"a graph failed with status {status}")

    def compute(self, graph: int) -> None:
        """Compute a graph and wait for it."""
        self.start(graph)
        self.ggml.sync(self.backend)


def median_s(run: Callable[[], object], *, seconds: float = 0.15, warm: int = 3, least: int = 3) -> float:
    """Return the median seconds of a call of `run`, which must wait until its work is done.

    `run` is called for `seconds`, at least `least` times and at most 200 times. The first `warm` calls are
    not measured, because CUDA compiles kernels and captures graphs in them.
    """
    for _ in range(warm):
        run()
    taken: list[float] = []
    while len(taken) < least or (sum(taken) < seconds and len(taken) < 200):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
