"""Layers on a remote device, the CPU of ggml's RPC server on loopback.

The tests run this file as a module in another process, because devices are registered for a whole process.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from kvtool import policies
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama.devices import devices
from kvtool.llama.libllama.log import set_verbose
from kvtool.llama.libllama.workers import add_rpc
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity
from kvtool.policy import Signal, SignalRequest
from lab.benchmarks.servers import reserved_port
from tests import fork_server
from tests.engine import rpc_server, saved_state
from tests.engine.exact_engines import open_engine, random_tokens
from tests.policies.merging import Merging

POLICIES = {
    "h2o": policies.fit("h2o", 48, 16),
    "streamingllm": policies.fit("streamingllm", 48, 16),
    "merging": Merging(48, 16),
    "bumblebee": policies.fit("bumblebee", 48, 16),
    "scissorhands": policies.fit("scissorhands", 48, 16),
    "tova": policies.fit("tova", 48, 16),
    # the window of 24 queries is longer than the 16 tokens between plans, so it includes queries before the
    # last plan
    "snapkv": policies.fit("snapkv", 48, 16, ["window=24"]),
    "expected": policies.fit("expected", 48, 16, ["queries=24"]),
    "roco": policies.fit("roco", 48, 16),
    "logn": policies.fit("buzz", 48, 16, ["logn=true"]),
    # the archive stays in the client
    "recall": policies.fit("recall", 48, 16),
    "corm": policies.fit("corm", 96, 16, ["history=8", "window=2", "t=cells"]),
}
# name of the policy, positions, flash attention, and the model's architecture unless it is llama. The other
# policies of POLICIES run in test_spares.py and test_offload.py
RUNS = [
    ("h2o", "in-cache", "off"),
    ("scissorhands", "in-cache", "on"),
    ("tova", "original", "off"),
    ("logn", "original", "off"),
    ("expected", "auto", "off", "gemma3"),
    ("h2o", "auto", "off", "gemma3"),
    ("recall", "auto", "off", "gemma3"),
]
N_TOKENS, N_ROW = 160, 4
# numbers of layers on the server: first all, then only some
N_GPU_LAYERS = (99, 2)


def model_of(tiny_model, arch="llama"):
    # gemma3's trained context is shorter than the text of N_TOKENS, so that gaps are closed
    return tiny_model(arch="gemma3", window=16, n_ctx_train=100) if arch == "gemma3" else tiny_model()


def score(path, name, positions, flash, arch="llama", n_gpu_layers=None):
    """Return the NLL of a short text, then keys and values of the first and the last layer.

    If rows are ragged, return the NLL and the numbers of live cells instead.
    """
    with open_engine(path, POLICIES[name], n_gpu_layers, positions=positions, flash=flash) as engine:
        nll = perplexity.stream(engine, random_tokens(N_TOKENS))
        assert engine.n_evicted > 80
        if engine.policy.ragged:
            return [nll.tolist(), engine.rows.live.tolist()]
        # if the model has sliding layers, their cache is the last
        state = saved_state.parse_all(engine.context.state())[-1]
        ends = [take(layer, 2).tolist() for layer in (0, -1) for take in (state.keys, state.values)]
        return [nll.tolist(), *ends]


def signals(path, n_gpu_layers=None):
    """Read the signals three times. Return a list of [RECENT of each query, IMPORTANT].

    They are read after the first batches, after an eviction and more batches, and after IMPORTANT was written
    and more batches were decoded.
    """
    model = Model(path, n_gpu_layers=n_gpu_layers)
    request = SignalRequest(Signal.RECENT | Signal.IMPORTANT, 9)
    context = Context(model, 512, 64, request, type_k="f32", type_v="f32", flash="off")

    def read():
        return [context.history(Signal.RECENT, 512).tolist(), context.read(Signal.IMPORTANT, 512).tolist()]

    tokens = random_tokens(330)
    for begin in range(0, 320, 64):
        context.decode(tokens[begin : begin + 64], begin, 1)
    reads = [read()]
    # keep so few tokens that llama.cpp's attention covers only a part of the cells
    context.apply(np.empty((0, 4), np.int32), 40, 280)
    for first, end in ((320, 321), (321, 324), (324, 325)):
        context.decode(tokens[first:end], first, 1)
    reads.append(read())
    context.write(Signal.IMPORTANT, np.arange(N_ROW * 45).reshape(N_ROW, 45))
    for first, end in ((325, 326), (326, 328)):
        context.decode(tokens[first:end], first, 1)
    reads.append(read())
    context.close()
    model.close()
    return reads


def client(endpoint, *paths):
    """Print the results of the runs on the server as JSON. The log of llama.cpp is written to stderr."""
    set_verbose(True)
    add_rpc(endpoint)
    listed = devices()
    results = []
    for run, path in zip(RUNS, paths, strict=True):
        sys.stderr.write(f"\nrun {' '.join(run)}\n")
        results.append(score(path, *run, n_gpu_layers=99))
    sys.stderr.write("\nrun signals\n")
    read_signals = [signals(paths[0], n) for n in N_GPU_LAYERS]
    print(json.dumps({"devices": listed, "results": results, "signals": read_signals}))


@pytest.fixture(scope="module")
def remote(tiny_model):
    """Return (printed results of the client, the log of each run)."""
    paths = [str(model_of(tiny_model, *run[3:])) for run in RUNS]
    with rpc_server.running() as endpoint:
        return rpc_server.client("tests.engine.test_rpc", endpoint, *paths)


def test_the_server_is_a_device(remote):
    devices = {device["name"]: device for device in remote[0]["devices"]}
    assert devices["RPC0"]["type"] == "gpu"
    assert devices["RPC0"]["memory_total"] > 2**30


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_edits_on_the_server_score_like_local_edits(remote, tiny_model, number):
    run, log = RUNS[number], remote[1][1 + number]
    assert log.startswith(" ".join(run))
    buffers = re.findall(r"(\S+) KV buffer size", log)
    assert len(buffers) == (2 if "gemma3" in run else 1)
    assert all(buffer.startswith("RPC0") for buffer in buffers)
    local_results = [np.array(part) for part in score(model_of(tiny_model, *run[3:]), *run)]
    remote_results = [np.array(part) for part in remote[0]["results"][number]]
    assert len(local_results[0]) == N_TOKENS - 1
    for expected, actual in zip(local_results, remote_results, strict=True):
        assert expected.shape == actual.shape
        assert np.abs(expected - actual).max() < 1e-4


@pytest.mark.parametrize("number", range(len(N_GPU_LAYERS)), ids=[f"{n} layers" for n in N_GPU_LAYERS])
def test_signals_on_the_server_equal_local_signals(remote, tiny_model, number):
    for expected, actual in zip(signals(model_of(tiny_model)), remote[0]["signals"][number], strict=True):
        recent, important = map(np.array, expected)
        np.testing.assert_allclose(actual[0], recent, atol=1e-5)
        # every query has attended to some key in every row
        assert (recent.sum(axis=2) > 0).all()
        # at the threshold, rounding decides whether a key is important
        assert (actual[1] != important).mean() < 0.002
        assert len(np.unique(important)) > 3


def test_a_server_that_does_not_answer_is_an_error():
    # use another process, because llama.cpp ends its process if it cannot connect
    with reserved_port() as port:
        endpoint = f"127.0.0.1:{port}"
        code = f"from kvtool.llama.libllama.workers import add_rpc; add_rpc({endpoint!r})"
        done = fork_server.run([sys.executable, "-c", code], cwd=fork_server.ROOT)
    assert done.returncode == 1, done.stderr[-3000:]
    line = done.stderr.strip().rpartition("\n")[2]
    assert line.endswith(
        f"LibraryError: no worker answers at {endpoint}; start one there: "
        f"kvtool worker --host 127.0.0.1 --port {port}"
    )


if __name__ == "__main__":
    client(*sys.argv[1:])
