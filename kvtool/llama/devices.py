"""The devices of ggml, how many threads a CPU takes, and what the library is."""

from __future__ import annotations

import ctypes
from typing import Any

from kvtool.llama.bindings import api, bind, is_ours, lib, library_path, stock_version, upstream
from kvtool.llama.library import ABI, is_patched
from kvtool.llama.log import start_backends
from kvtool.system.memory import free_bytes

_DEVICE_TYPES = ("cpu", "gpu", "igpu", "accelerator", "meta")
"""ggml's types of devices, by their numbers."""


def devices() -> list[dict[str, Any]]:
    """The devices of ggml: name, description, type, memory_total and memory_free in bytes."""
    start_backends()
    bind("ggml_backend_dev_count", ctypes.c_size_t)
    bind("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    bind("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    bind("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    bind("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        free, total = memory_of(device)
        kind = lib.ggml_backend_dev_type(device)
        if kind == _DEVICE_TYPES.index("cpu"):
            # ggml says that all of it is free
            free = min(free, free_bytes())
        found.append(
            {
                "name": lib.ggml_backend_dev_name(device).decode(),
                "description": lib.ggml_backend_dev_description(device).decode(),
                "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
                "memory_total": total,
                "memory_free": free,
            }
        )
    return found


def memory_of(device: int) -> tuple[int, int]:
    """(free, total) of a device in bytes."""
    size = ctypes.POINTER(ctypes.c_size_t)
    bind("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def has_gpu() -> bool:
    """Whether any device is a GPU; a worker's count."""
    return any(device["type"] in ("gpu", "igpu") for device in devices())


def gpu_free_bytes() -> int:
    """Free bytes of this machine's GPUs together, by their own counters; 0 where workers compute, too."""
    found = devices()
    # llama.cpp leaves out what is on a CPU's chip where there is another
    gpus = [device for device in found if device["type"] == "gpu"]
    gpus = gpus or [device for device in found if device["type"] == "igpu"]
    is_one_machine = not any(device["name"].startswith("RPC") for device in gpus)
    return sum(device["memory_free"] for device in gpus) if is_one_machine else 0


def library_info() -> dict[str, Any]:
    """What is built: version, path, unused, patched, abi, abi_wanted, digest, devices, system_info.

    version: of the llama-cpp-python that it comes from. unused: that of an installed one beside it, or None.
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
