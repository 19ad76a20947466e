"""ggml's devices with their memory, and a description of the loaded library."""

from __future__ import annotations

import ctypes
from typing import Any

from kvtool.llama.libllama.bindings import upstream
from kvtool.llama.libllama.library import ABI, api, lib, library_path
from kvtool.llama.libllama.log import start_backends
from kvtool.system.memory import free_bytes, total_bytes

_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")
"""Names of ggml's device types. The index is ggml's number of the type."""


def devices() -> list[dict[str, Any]]:
    """Return ggml's devices: name, description, type, and memory_total and memory_free in bytes."""
    listed = []
    for device in _all_devices():
        free, total = memory_of(_pointer(device))
        if device["type"] == "cpu":
            # for a CPU, ggml reports all memory of the machine as free
            free, total = min(free, free_bytes()), min(total, total_bytes())
        listed.append(device | {"memory_total": total, "memory_free": free})
    return listed


def _all_devices() -> list[dict[str, Any]]:
    """Return ggml's devices without their memory, which takes time to read: name, description, type."""
    start_backends()
    listed = []
    for device in map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count())):
        kind = lib.ggml_backend_dev_type(device)
        listed.append(
            {
                "name": lib.ggml_backend_dev_name(device).decode(),
                "description": lib.ggml_backend_dev_description(device).decode(),
                "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
            }
        )
    return listed


def _pointer(device: dict[str, Any]) -> int:
    pointer: int = lib.ggml_backend_dev_by_name(device["name"].encode())
    return pointer


def buffers() -> dict[str, int]:
    """Return pointers to ggml's buffer types of all devices, by name."""
    start_backends()
    devices = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
    types = map(lib.ggml_backend_dev_buffer_type, devices)
    return {lib.ggml_backend_buft_name(buffer).decode(): buffer for buffer in types if buffer}


def memory_of(device: int) -> tuple[int, int]:
    """Return the (free, total) memory of a device in bytes."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def has_gpu() -> bool:
    """Return True if any device is a GPU, of this machine or of a worker."""
    return bool(gpus())


def gpus() -> list[dict[str, Any]]:
    """Return the devices that get layers, in llama.cpp's order: name, description, type.

    The devices of workers come first, then the devices of this machine.
    """
    available = _all_devices()
    discrete = [device for device in available if device["type"] == "gpu"]
    workers = [device for device in discrete if _is_worker(device)]
    local = [device for device in discrete if not _is_worker(device)]
    # llama.cpp uses integrated GPUs only in machines without discrete GPUs
    return workers + (local or [device for device in available if device["type"] == "igpu"])


def local_gpus() -> Any:
    """Return pointers to this machine's GPUs, then null, as llama.cpp needs them; None without workers."""
    found = gpus()
    local = [device for device in found if not _is_worker(device)]
    if len(local) == len(found):
        return None
    return (ctypes.c_void_p * (len(local) + 1))(*map(_pointer, local))


def can_split_rows(name: str) -> bool:
    """Return True if the device with this name can split a tensor by rows, for --split-mode row."""
    backend = lib.ggml_backend_dev_backend_reg(lib.ggml_backend_dev_by_name(name.encode()))
    return bool(lib.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_split_buffer_type"))


def _is_worker(device: dict[str, Any]) -> bool:
    return bool(device["name"].startswith("RPC"))


def gpu_free_bytes(only: int | None = None) -> int:
    """Return the free memory of all GPUs together in bytes; 0 if any of them belongs to a worker.

    only: index in `gpus` of the only GPU to count; None to count all.
    """
    found = gpus() if only is None else gpus()[only : only + 1]
    return 0 if any(map(_is_worker, found)) else sum(memory_of(_pointer(device))[0] for device in found)


def library_info() -> dict[str, Any]:
    """Describe the loaded library and its devices.

    version: version of the llama-cpp-python from which the library was built.
    """
    return {
        "version": upstream(),
        "path": str(library_path()),
        "abi": lib.llama_kvtool_abi(),
        "abi_wanted": ABI,
        "digest": lib.llama_kvtool_digest().decode(),
        "devices": devices(),
        "system_info": api.llama_print_system_info().decode().strip(),
    }
