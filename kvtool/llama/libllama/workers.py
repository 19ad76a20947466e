"""Workers: machines whose devices hold layers of a model, through ggml's RPC.

This file has both sides: `add_rpc` uses the devices of workers, and `server` makes this machine a worker.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvtool.errors import LibraryError
from kvtool.llama.libllama.crash import add_workers
from kvtool.llama.libllama.devices import devices, memory_of
from kvtool.llama.libllama.endpoints import reached
from kvtool.llama.libllama.library import check, lib
from kvtool.llama.libllama.log import start_backends
from kvtool.system.paths import build_command

_SPARE_BYTES = 1
"""Size of memory that a spare claims to have, in bytes. A spare is an additional handle of a worker's device.

If a spare claimed 0 bytes, llama.cpp would assume the size of the host's memory, and put layers on the spare.
"""


def add_rpc(*endpoints: str) -> None:
    """Add the devices of workers at host:port. Models that are loaded later use these devices first.

    Raises UsageError for a malformed or repeated endpoint, and LibraryError for a worker that does not
    answer.
    """
    with reached(endpoints) as addresses:
        # `reached` has checked that all workers answer
        add_server = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    add_workers(endpoints)
    for endpoint, address in zip(endpoints, addresses, strict=True):
        server = add_server(address.encode())
        if not server:
            raise LibraryError(f"the worker at {endpoint} has no devices")
        _register(server)


def _register(server: int) -> None:
    """Register a worker's devices with ggml, and its spare devices with the patch.

    The patch uses spares to edit and read the cache on the worker's devices.
    """
    every = [lib.ggml_backend_reg_dev_get(server, i) for i in range(lib.ggml_backend_reg_dev_count(server))]
    real = [device for device in every if memory_of(device)[1] != _SPARE_BYTES]
    for device in real:
        lib.ggml_backend_device_register(device)
    n = len(real)
    if n > 0 and every[:n] == real and len(every) == 3 * n:
        for i in range(n):
            check(lib.llama_kvtool_use_spares(*every[i::n]))


def served(memory: int | None = None) -> list[dict[str, object]]:
    """Return the devices that `server` serves: the GPUs, or the CPU if there are no GPUs. See `devices`.

    memory: maximum bytes that the devices together claim to have.
    """
    local = _served()
    if memory is not None:
        for i, _ in local:
            check(lib.llama_kvtool_limit(lib.ggml_backend_dev_get(i), memory // len(local)))
        local = _served()
    return [device for _, device in local]


def server(address: str, n_threads: int) -> Callable[[], None]:
    """Return a function that serves this machine's devices at "1.2.3.4:50052", to one client at a time.

    The function logs to C's stdout, and returns only if it cannot listen at the address. Raises LibraryError
    if the library is built without RPC.
    """
    text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    arguments = (text, text, size, size, ctypes.POINTER(pointer))
    start = _rpc_function("ggml_backend_rpc_start_server", None, *arguments)
    handles = [lib.ggml_backend_dev_get(i) for i, _ in _served()]
    # ggml's server caches one graph per device. The patch has two graphs, so each device gets two spares
    handles += [lib.llama_kvtool_spare(device) for _ in range(2) for device in handles]
    array = (pointer * len(handles))(*handles)
    return lambda: start(address.encode(), None, n_threads, len(handles), array)


def _served() -> list[tuple[int, dict[str, object]]]:
    """Return (ggml's index, device) of each device that `server` serves."""
    local = list(enumerate(devices()))
    gpus = [(i, device) for i, device in local if device["type"] in ("gpu", "igpu")]
    return gpus or [(i, device) for i, device in local if device["type"] == "cpu"][:1]


def _rpc_function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    """Return a function of ggml's RPC backend. Raises LibraryError if the library lacks it."""
    start_backends()
    registry = lib.ggml_backend_reg_by_name(b"RPC")
    address = registry and lib.ggml_backend_reg_get_proc_address(registry, name.encode())
    if not address:
        raise LibraryError(
            f"llama.cpp is built without RPC; build it with CMAKE_ARGS=-DGGML_RPC=ON {build_command()}"
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)
