"""ggml's devices with their memory, and a description of the loaded library."""

from __future__ import annotations

import ctypes
from typing import Any

from kvtool.llama.bindings import api, bind, is_ours, lib, library_path, stock_version, upstream
from kvtool.llama.library import ABI, is_patched
from kvtool.llama.log import start_backends
from kvtool.system.memory import free_bytes

_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")
"""ggml's device types, indexed by number."""


def devices() -> list[dict[str, Any]]:
    """Return ggml's devices: name, description, type, and memory_total and memory_free in bytes."""
    start_backends()
    bind("ggml_backend_dev_count", ctypes.c_size_t)
    bind("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    bind("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    bind("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    bind("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    listed = []
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        free, total = memory_of(device)
        kind = lib.ggml_backend_dev_type(device)
        if kind == _DEVICE_TYPES.index("cpu"):
            # for a CPU, ggml reports all memory as free
            free = min(free, free_bytes())
        listed.append(
            {
                "name": lib.ggml_backend_dev_name(device).decode(),
                "description": lib.ggml_backend_dev_description(device).decode(),
                "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
                "memory_total": total,
                "memory_free": free,
            }
        )
    return listed


def memory_of(device: int) -> tuple[int, int]:
    """Return (free, total) bytes of a device."""
    size = ctypes.POINTER(ctypes.c_size_t)
    bind("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def has_gpu() -> bool:
    """Return True if any device is a GPU, of this machine or of a worker."""
    return any(device["type"] in ("gpu", "igpu") for device in devices())


def gpu_free_bytes() -> int:
    """Return the free bytes of this machine's GPUs, 0 if workers have layers."""
    available = devices()
    # llama.cpp uses integrated GPUs only in machines without discrete GPUs
    gpus = [device for device in available if device["type"] == "gpu"]
    gpus = gpus or [device for device in available if device["type"] == "igpu"]
    is_one_machine = not any(device["name"].startswith("RPC") for device in gpus)
    return sum(device["memory_free"] for device in gpus) if is_one_machine else 0


def library_info() -> dict[str, Any]:
    """Describe the library: version, path, unused, patched, abi, abi_wanted, digest, devices, system_info.

    version: version of the llama-cpp-python that the library comes from. unused: version of another installed
    llama-cpp-python, or None.
    """
    return {
        "version": upstream(),
        "path": str(library_path()),
        "unused": stock_version() if is_ours() else None,
        "patched": is_patched(),
        "abi": lib.llama_kvtool_abi() if is_patched() else None,
        "abi_wanted": ABI,
        "digest": lib.llama_kvtool_digest().decode() if is_patched() else None,
        "devices": devices(),
        "system_info": api.llama_print_system_info().decode().strip(),
    }
