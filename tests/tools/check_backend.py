"""Check that this Python's library of llama.cpp has the patch, and a given backend of ggml.

    python tests/tools/check_backend.py CUDA

The program prints the library and its devices. The exit status is 1 if the patch or the backend is missing.
With --device, the backend must have a device.
"""

from __future__ import annotations

import argparse
import ctypes
import sys

from kvtool.build import sources
from kvtool.llama.libllama.devices import library_info
from kvtool.llama.libllama.library import api


def check(backend, device):
    """Return a description of the first fault, or None."""
    info = library_info()
    print(f"{info['path']}: {', '.join(device['name'] for device in info['devices'])}")
    if info["digest"] != sources.patch_digest(sources.patches_dir()):
        return "it was built from other patch files than these"
    find = api._lib.ggml_backend_reg_by_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    if not find(backend.encode()):
        return f"ggml has no backend {backend} in it"
    if device and not any(each["name"].startswith(backend) for each in info["devices"]):
        return f"{backend} has no device here"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", help="as ggml names it: CUDA, Vulkan, RPC")
    parser.add_argument("--device", action="store_true", help="it must have a device, too")
    sys.exit(check(**vars(parser.parse_args())))
