"""Recall with layers on a worker: the client has the archive, and results are the same as without a worker.

The tests run this file as a module in another process, because devices are registered for a whole process.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from kvtool import policies
from kvtool.llama.libllama.workers import add_rpc
from kvtool.measure import perplexity
from lab.benchmarks import wire
from tests.engine import rpc_server, saved_state
from tests.engine.exact_engines import open_engine, random_tokens
from tests.engine.test_spares import RECOMPUTE
from tests.engine.test_worker import working

# recall's option, type of the archive, flash attention, type of the cache, number of layers on the server
RUNS = [
    ("search=all", "f32", "off", "f32", 99),
    ("search=all", "f16", "on", "f16", 99),
    ("search=all", "q8_0", "off", "f32", 3),
    ("search=clusters", "f32", "on", "q8_0", 99),
    ("search=clusters", "q8_0", "on", "f16", 99),
    ("search=clusters", "q8_0", "off", "f32", 3),
]
# flash attention, type of the cache, KV heads. A q8_0 cell of 1 head has 34 bytes, which is no multiple of 4
CACHES = [("on", "f16", 2), ("off", "f16", 2), ("off", "f32", 2), ("on", "q8_0", 2), ("on", "q8_0", 1)]
N_LAYER, N_DIM = 4, 32
N_FIRST, N_LATER = 170, 50
# limit of the archive in tokens. More tokens are evicted, so the oldest are forgotten
N_ARCHIVE = 100
LEAVING = [17, 3, 41, 40, 8]


def model_of(tiny_model, n_head_kv=2):
    return tiny_model(n_layer=N_LAYER, n_head_kv=n_head_kv, n_ctx_train=130)


def start_engine(path, search, archive_type, flash, kind, n_gpu_layers, **more):
    policy = policies.fit("recall", 48, 16, [search])
    settings = {"flash": flash, "type_k": kind, "type_v": kind, "archive_type": archive_type}
    return open_engine(path, policy, n_gpu_layers, archive=N_ARCHIVE, **settings, **more)


def run(path, *arguments, **more):
    """Return (results of a stream, its state after N_FIRST tokens). See start_engine for `arguments`."""
    tokens, results = random_tokens(N_FIRST + N_LATER), {}
    with start_engine(path, *arguments, **more) as engine:
        archive = engine.context.archive
        first = perplexity.stream(engine, tokens[:N_FIRST])
        state = {name: array.copy() for name, array in engine.save()}
        results["nll"] = np.concatenate([first, perplexity.stream(engine, tokens[N_FIRST:])]).tolist()
        results["logits"] = engine.context.logits()[-1].tolist()
        results["span"] = [archive.span.start, archive.span.stop]
        results["bytes"] = archive.n_bytes
        results["stored"] = archive.read(archive.span.start, archive.end).tolist()
        assert engine.n_restart > 0
        engine.restore(state)
        results["again"] = perplexity.stream(engine, tokens[N_FIRST:]).tolist()
    return results, state


def goes_on(path, state, *arguments):
    """Return the NLL of the tokens after N_FIRST, from a state that `run` returned."""
    with start_engine(path, *arguments) as engine:
        engine.restore(state)
        return perplexity.stream(engine, random_tokens(N_FIRST + N_LATER)[N_FIRST:]).tolist()


def resized(path, n_gpu_layers):
    """Return the NLL of each token of a stream whose cache is resized."""
    nll = []
    with open_engine(path, policies.fit("recall", 48, 16), n_gpu_layers) as engine:
        for part, n_cell in zip(np.split(random_tokens(220), [100, 160]), (0, 512, 256), strict=True):
            if n_cell:
                engine.context.resize(np.full(len(engine.context.layer_cells), n_cell))
            nll += perplexity.stream(engine, part).tolist()
    return nll


def leave(path, flash, kind, n_head_kv, n_gpu_layers, meter=None):
    """Archive a few cells, in another order than the cache stores them.

    Return (True if the archive has the same bytes as the cache, [bytes received, bytes of graphs sent]).
    """
    policy = policies.fit("recall", 96, 16)
    settings = {"flash": flash, "type_k": kind, "type_v": kind, "archive_type": "f32"}
    with open_engine(path, policy, n_gpu_layers, **settings) as engine:
        engine.read(random_tokens(48))
        archive = engine.context.archive
        cells = saved_state.parse(engine.context.state())
        expected = [
            np.stack([cells.keys(layer, n_head_kv), cells.values(layer, n_head_kv)], axis=2)[LEAVING]
            for layer in range(N_LAYER)
        ]
        # the client sends one graph for each number of cells. These pushes send both graphs before the bytes
        # are counted
        archive.push(np.array(LEAVING[:3]), 0)
        archive.push(np.array(LEAVING), 3)
        before = meter.read() if meter else ()
        archive.push(np.array(LEAVING), archive.end)
        n_bytes = []
        if meter:
            sent, received = (new - old for new, old in zip(meter.read(), before, strict=True))
            n_bytes = [received["get"], sent["graph"]]
        archived = archive.read(archive.end - len(LEAVING), archive.end).view(np.float32)
        return np.array_equal(archived.reshape(-1), np.array(expected).reshape(-1)), n_bytes


def client(endpoint, file, *paths):
    """Print the results of the runs as JSON."""
    meter = wire.Meter(endpoint)
    add_rpc(meter.endpoint)
    results = []
    for each in RUNS:
        without_server = *each[:-1], 0
        result, state = run(paths[1], *each)
        result["here"] = goes_on(paths[1], state, *without_server)
        # the server continues a state that was saved without the server
        _, state = run(paths[1], *without_server)
        result["there"] = goes_on(paths[1], state, *each)
        results.append(result)
    printed = {"results": results, "resized": resized(paths[1], 99)}
    printed["in_file"] = run(paths[1], *RUNS[0], archive_file=file)[0]
    printed["left"] = [leave(paths[cache[-1] - 1], *cache, 99, meter) for cache in CACHES]
    printed["left_of_some"] = [leave(paths[cache[-1] - 1], *cache, 3)[0] for cache in CACHES]
    print(json.dumps(printed))


@contextmanager
def serving(kind):
    """Yield the endpoint of `kvtool worker`, or of ggml's own server."""
    if kind == "rpc-server":
        with rpc_server.running() as endpoint:
            yield endpoint
    else:
        with working() as worker:
            yield worker.endpoint


@pytest.fixture(scope="module")
def path(tiny_model):
    return model_of(tiny_model)


@pytest.fixture(scope="module", params=["worker", "rpc-server"])
def remote(request, tiny_model, tmp_path_factory):
    """Output of the client that uses the server."""
    paths = [str(model_of(tiny_model, n)) for n in (1, 2)]
    file = tmp_path_factory.mktemp("archive") / "file"
    with serving(request.param) as endpoint:
        printed = rpc_server.client("tests.engine.test_remote_recall", endpoint, str(file), *paths)[0]
    return printed | {"server": request.param}


@cache
def run_locally(path, number):
    """Return the results of a run without a server."""
    *options, _ = RUNS[number]
    return run(path, *options, 0)[0]


@pytest.fixture(params=range(len(RUNS)), ids=[" ".join(map(str, run)) for run in RUNS])
def both(request, remote, path):
    """Return (results of the client that uses the server, results in this process)."""
    return remote["results"][request.param], run_locally(path, request.param)


def test_recall_over_rpc_gives_the_local_results(both):
    remote, local = both
    assert len(local["nll"]) == N_FIRST + N_LATER - 2
    assert np.abs(np.subtract(remote["nll"], local["nll"])).max() < 1e-4
    assert np.abs(np.subtract(remote["logits"], local["logits"])).max() < 1e-3
    assert np.argmax(remote["logits"]) == np.argmax(local["logits"])


def test_archive_equals_the_local_archive(both):
    remote, local = both
    assert local["span"][1] - local["span"][0] == N_ARCHIVE
    assert (remote["span"], remote["bytes"]) == (local["span"], local["bytes"])
    # up to 1 % of the stored bytes may differ because of rounding
    assert np.mean(np.not_equal(remote["stored"], local["stored"])) < 0.01


def test_saved_stream_continues_over_rpc_and_locally(both):
    remote, local = both
    later_nll = remote["nll"][N_FIRST - 1 :]
    assert remote["again"] == later_nll
    assert np.abs(np.subtract(remote["here"], later_nll)).max() < 1e-4
    assert np.abs(np.subtract(remote["there"], local["again"])).max() < 1e-4


def test_archive_file_over_rpc_gives_the_local_results(remote, path):
    in_memory = run_locally(path, 0)
    assert np.abs(np.subtract(remote["in_file"]["nll"], in_memory["nll"])).max() < 1e-4


def test_resized_cache_over_rpc_gives_the_local_results(remote, path):
    assert np.abs(np.subtract(remote["resized"], resized(path, 0))).max() < 1e-4


@pytest.mark.parametrize("number", range(len(CACHES)), ids=[" ".join(map(str, cache)) for cache in CACHES])
def test_evicted_cells_are_sent_unchanged_and_without_others(remote, number):
    flash, kind, n_head_kv = CACHES[number]
    same, (n_bytes, n_graph) = remote["left"][number]
    assert same
    assert remote["left_of_some"][number]
    # the server sends cells in the type of the cache. If the size of a cell is no multiple of 4 bytes, it
    # sends f32
    is_words = kind != "q8_0" or n_head_kv > 1
    size = {"f16": 2, "f32": 4, "q8_0": 34 / 32 if is_words else 4}[kind]
    n = int(len(LEAVING) * N_LAYER * 2 * n_head_kv * N_DIM * size)
    # the answer for each layer has 8 bytes for its size, and up to 256 bytes of padding between keys and
    # values
    assert n <= n_bytes <= n + N_LAYER * (8 + 256)
    # kvtool's worker keeps the graph, so the client only asks to compute it again; ggml's server gets the
    # whole graph
    assert n_graph == RECOMPUTE if remote["server"] == "worker" else n_graph > 100 * RECOMPUTE


if __name__ == "__main__":
    client(*sys.argv[1:])
