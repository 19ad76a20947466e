"""Models with the first layers in host memory and the last layers on a device: one edit changes both.

The device is the library's GPU if there is one (`make check-vulkan`), else ggml's RPC server on loopback. The
tests run this file as a module in another process, because devices are registered for a whole process.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing, nullcontext

import numpy as np
import pytest

from kvtool.engine.settings import Settings
from kvtool.llama.libllama.devices import devices, has_gpu
from kvtool.llama.libllama.log import set_verbose
from kvtool.llama.libllama.workers import add_rpc
from kvtool.llama.loaded.model import Model
from kvtool.measure import bench, machine
from tests.engine import rpc_server
from tests.engine.test_rpc import N_TOKENS, score

# name of the policy, positions, flash attention
RUNS = [
    ("h2o", "in-cache", "off"),
    ("h2o", "in-cache", "on"),
    ("merging", "original", "off"),
    ("merging", "in-cache", "on"),
    ("bumblebee", "in-cache", "off"),
    ("corm", "in-cache", "off"),
    ("snapkv", "original", "off"),
    ("expected", "in-cache", "on"),
    ("recall", "original", "off"),
    ("recall", "auto", "on"),
]
# N_GPU_LAYERS counts the output as a layer, so 2 of the 4 layers stay on the host
N_LAYER, N_GPU_LAYERS = 4, 3


def client(path, endpoint):
    """Print the results of the runs as JSON. llama.cpp's log goes to stderr."""
    set_verbose(True)
    if endpoint:
        add_rpc(endpoint)
    results = []
    for run in RUNS:
        sys.stderr.write(f"\nrun {' '.join(run)}\n")
        results.append(score(path, *run, n_gpu_layers=N_GPU_LAYERS))
    print(json.dumps(results))


@pytest.fixture(scope="module")
def split(tiny_model):
    """Return (results of all runs, their logs)."""
    with nullcontext("") if has_gpu() else rpc_server.running() as endpoint:
        return rpc_server.client("tests.engine.test_offload", str(tiny_model(n_layer=N_LAYER)), endpoint)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_edits_on_host_and_device_score_like_edits_on_the_host(split, tiny_model, number):
    log = split[1][1 + number]
    assert log.startswith(" ".join(RUNS[number]))
    host, device = re.findall(r"(\S+) KV buffer size", log)
    assert host == "CPU"
    assert device.startswith(("RPC0", "Vulkan0", "CUDA0"))
    on_host = score(tiny_model(n_layer=N_LAYER), *RUNS[number], n_gpu_layers=0)
    assert len(on_host[0]) == N_TOKENS - 1
    for expected, actual in zip(on_host, split[0][number], strict=True):
        expected, actual = np.array(expected), np.array(actual)
        assert expected.shape == actual.shape
        errors = np.abs(expected - actual)
        # a GPU multiplies in half precision if it can; llvmpipe's results differ by up to 0.008
        if not has_gpu():
            # flash attention rounds to half precision. An NLL then depends on the order in which a merge adds
            # values, so the tolerance is 1e-3
            assert np.median(errors) < 1e-6
            assert errors.max() < (1e-3 if RUNS[number][2] == "on" else 1e-4)
        elif RUNS[number][0] in ("corm", "recall"):
            # rounding may move a few cells across a threshold, and then all later tokens differ
            assert np.median(errors) < 2e-3
        else:
            assert errors.max() < 2e-2


def test_device_memory_shows_the_bytes_that_q8_0_saves(tiny_model):
    """Needs Mesa's llvmpipe, which counts memory to the byte. Drivers of graphics cards use larger units."""
    if not any("llvmpipe" in device["description"] for device in devices()):
        pytest.skip("the device is not Mesa's, on the CPU")
    with closing(Model(tiny_model(n_ctx_train=512))) as model:
        rows = [bench.sized(config, 64, 16) for config in bench.cache_configs({})[1:]]
        list(bench.Bench(model, Settings(n_batch=16, n_threads=1), rows, rounds=1, row_s=0.1).measure())
        assert not any(row.why for row in rows)
        (f16,), (q8_0,) = (row.device_bytes for row in rows)
        cache = 256 * model.layers.cell_bytes("f16", "f16")
    # a block of 32 numbers takes 34 bytes in q8_0 and 64 bytes in f16
    assert f16 - q8_0 == cache * 30 // 64
    assert f16 > cache
    assert not any(row.host_bytes >= cache for row in rows)
    assert machine.line(machine.machine()).count("; Vulkan0: llvmpipe (") == 1


if __name__ == "__main__":
    client(*sys.argv[1:])
