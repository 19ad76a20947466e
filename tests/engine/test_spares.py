"""Spares: for each device of a worker, two additional handles that compute edits of the cache.

A worker keeps only the last graph of each handle. Edits use the spares, so the worker keeps the graph of
decoding, which therefore is not sent again for every token.

The tests run this file as a module in another process, because devices are registered for a whole process.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys

import numpy as np
import pytest

from kvtool.llama.libllama import workers
from kvtool.llama.libllama.devices import devices
from kvtool.llama.libllama.library import bind, error_text, lib
from kvtool.llama.libllama.log import set_verbose
from kvtool.llama.libllama.workers import _SPARE_BYTES, add_rpc
from lab.benchmarks import wire
from tests.engine import rpc_server
from tests.engine.exact_engines import open_engine, random_tokens
from tests.engine.test_rpc import POLICIES
from tests.engine.test_worker import working

# name of the policy, flash attention, type of the cache, number of layers on the worker
RUNS = [
    ("h2o", "on", "f32", 99),
    ("h2o", "off", "f32", 99),
    ("h2o", "on", "q8_0", 99),
    ("streamingllm", "on", "f32", 99),
    ("merging", "on", "f32", 99),
    ("merging", "off", "f32", 99),
    ("bumblebee", "on", "f32", 99),
    ("corm", "off", "f32", 99),
    ("h2o", "on", "f32", 3),
    ("merging", "on", "f32", 3),
    ("recall", "on", "f32", 99),
    ("recall", "off", "f32", 3),
    ("roco", "on", "f32", 99),
]
N_LAYER = 4
# the prompt has N_READ tokens. The others are decoded one by one: N_BEFORE tokens, and then N_COUNTED tokens
# for which the sent bytes are counted
N_READ, N_BEFORE, N_COUNTED = 64, 64, 48
RECOMPUTE = 13
"""Size in bytes of the command that computes a graph again."""


def step(engine, token):
    engine.step(np.array([token]))


def run(path, name, flash, kind, n_gpu_layers, meter=None):
    """Return (logits after each step, bytes for the last N_COUNTED tokens, signal_bytes).

    Bytes are those of the graphs that were sent, and those of logits and signals that were received.
    """
    positions = "original" if name == "recall" else "in-cache"
    settings = {"flash": flash, "type_k": kind, "type_v": kind, "n_batch": 16, "positions": positions}
    tokens = random_tokens(N_READ + N_BEFORE + N_COUNTED)
    logits, before = [], (0, 0)

    def counted():
        sent, received = meter.read() if meter else ({"graph": 0}, {"get": 0})
        return sent["graph"], received["get"]

    with open_engine(path, POLICIES[name], n_gpu_layers, **settings) as engine:
        engine.read(tokens[:N_READ])
        for i, token in enumerate(tokens[N_READ:]):
            if i == N_BEFORE:
                before = counted()
            step(engine, token)
            logits.append(engine.context.logits()[0].tolist())
        assert engine.n_evicted > 80
        n_bytes = np.subtract(counted(), before).tolist()
        return logits, n_bytes, engine.signal_bytes


def two_at_once(path):
    """Return True if a context continues unchanged while another one on the same worker opens and closes."""
    tokens = random_tokens(40)
    logits = []
    for other in (False, True):
        with open_engine(path, POLICIES["h2o"], 99) as engine:
            engine.read(tokens[:8])
            for i, token in enumerate(tokens[8:]):
                if other and i == 16:
                    with open_engine(path, POLICIES["h2o"], 99) as second:
                        second.read(tokens)
                step(engine, token)
            logits.append(engine.context.logits()[0].tolist())
    return logits[0] == logits[1]


def client(endpoint, path, as_stock):
    """Print the results of the runs on the worker as JSON. The log of llama.cpp is written to stderr."""
    set_verbose(True)
    meter = wire.Meter(endpoint)
    if as_stock:
        # register each device of the worker once, as llama.cpp does without the extra devices (spares)
        workers._register = bind("ggml_backend_register", None, ctypes.c_void_p) or (
            lambda server: lib.ggml_backend_register(server)
        )
    add_rpc(meter.endpoint)
    listed = devices()
    results = []
    for each in RUNS[:1] if as_stock else RUNS:
        sys.stderr.write(f"\nrun {' '.join(map(str, each))}\n")
        results.append(run(path, *each, meter))
    print(json.dumps({"devices": listed, "results": results, "two": two_at_once(path)}))


def from_worker(path, *options):
    with working() as worker:
        return rpc_server.client("tests.engine.test_spares", worker.endpoint, str(path), *options)


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(n_layer=N_LAYER)


@pytest.fixture(scope="module")
def remote(path):
    """Return (the results that `client` prints, the log of each run)."""
    return from_worker(path)


each_run = pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(map(str, run)) for run in RUNS])


@each_run
def test_edits_on_a_spare_score_like_local_edits(remote, path, number):
    name, flash, kind, _ = RUNS[number]
    local, *_ = run(path, name, flash, kind, 0)
    errors = np.abs(np.array(remote[0]["results"][number][0]) - np.array(local)).max(axis=1)
    assert len(errors) == N_BEFORE + N_COUNTED
    # values in half precision or 8 bits sometimes differ because of rounding
    assert np.median(errors) < 1e-4
    assert errors.max() < (0.1 if kind == "q8_0" else 1e-2)


@pytest.mark.parametrize("number", [i for i, run in enumerate(RUNS) if run[0] == "h2o"])
def test_no_queries_are_stored_for_signals_with_a_worker(remote, number):
    # each layer has two KV heads with 256 cells, and each of these cells has one float
    assert remote[0]["results"][number][2] == 4 * N_LAYER * 2 * 256


@each_run
def test_each_graph_is_sent_to_the_worker_once(remote, number):
    name, *_ = RUNS[number]
    if name == "corm":
        pytest.skip("its cache changes its size, and all graphs with it")
    if name == "recall":
        pytest.skip("its decode is a graph for each layer, of which a worker keeps one")
    n_plan = N_COUNTED // 16
    # one graph per token and one per plan, for its edit; bumblebee also reads keys at each plan
    n_graph = N_COUNTED + n_plan * (2 if name == "bumblebee" else 1)
    sent, _ = remote[0]["results"][number][1]
    # if a merge has more values than all earlier merges, it needs a new graph, which has to be sent
    most = 100_000 if name == "merging" else 0
    assert 0 <= sent - n_graph * RECOMPUTE <= most


@pytest.mark.parametrize(("name", "n_signal"), [("streamingllm", 0), ("h2o", 1), ("roco", 2)])
def test_signals_are_sent_once_per_plan(remote, name, n_signal):
    number = [run[0] for run in RUNS].index(name)
    _, received = remote[0]["results"][number][1]
    # each answer begins with its size, in 8 bytes. A signal has a float for each of 256 cells in two rows of
    # each layer
    assert received == N_COUNTED * (8 + 4 * 320) + N_COUNTED // 16 * n_signal * (8 + 4 * 256 * 2 * N_LAYER)


def test_spares_are_not_listed_as_devices(remote):
    (worker,) = [device for device in remote[0]["devices"] if device["name"].startswith("RPC")]
    assert worker["name"] == "RPC0"
    assert worker["memory_total"] > 2**30


def test_another_context_on_the_worker_does_not_change_the_logits(remote):
    assert remote[0]["two"]


def test_stock_llama_cpp_puts_no_layers_on_spares(remote, path):
    printed, log = from_worker(path, "as stock")
    spares = [device for device in printed["devices"] if device["name"].startswith("RPC")]
    assert [device["memory_total"] for device in spares[1:]] == [_SPARE_BYTES] * 2
    (buffer,) = re.findall(r"(\S+) KV buffer size", log[1])[:1]
    assert buffer.startswith("RPC0")
    assert not re.search(r"RPC[12]\[\S+ (KV|model) buffer size", log[1])
    assert printed["results"][0][0] == remote[0]["results"][0][0]
    # without spares the worker keeps only one graph, so the graphs of edits and of decoding are sent each
    # time
    assert printed["results"][0][1][0] > 10 * remote[0]["results"][0][1][0]


def test_null_device_has_no_spare():
    assert lib.llama_kvtool_spare(None) is None
    assert error_text() == "dev must not be null"


if __name__ == "__main__":
    client(sys.argv[1], sys.argv[2], len(sys.argv) > 3)
