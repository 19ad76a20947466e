"""The archive of layers on a worker lies in the worker's memory, and tokens are chosen there.

Run as a module, this is the client: devices are registered for a whole process.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import StreamEnd
from kvtool.llama.library import library_path
from kvtool.llama.log import set_verbose
from kvtool.llama.workers import add_rpc
from kvtool.measure import holdings, perplexity
from tests import forked, rpc_server
from tests.running import open_engine, text

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import wire  # noqa: E402

pytestmark = pytest.mark.engine

# index, type of the archive, flash attention, type of the cache, how many layers the worker has
RUNS = [
    ("keys", "f32", "off", "f32", 99),
    ("q8", "f16", "on", "f16", 99),
    ("q4", "q8_0", "on", "q8_0", 99),
    ("q4", "q8_0", "off", "f32", 3),
]
N_LATER = 50
# older tokens are forgotten, and positions start over
N_ARCHIVE = 100


def run(path, index, archive_type, flash, kind, n_gpu_layers, n_first, meter=None, **more):
    """What a stream gives, and what goes on from its state after n_first tokens: here, or on a worker."""
    policy = policies.fit("recall", 48, 16, [f"index={index}"])
    settings = {"flash": flash, "type_k": kind, "type_v": kind, "archive_type": archive_type}
    settings |= {"archive": N_ARCHIVE} | more
    tokens, found = text(n_first + N_LATER), {}
    with open_engine(path, policy, n_gpu_layers, **settings) as engine:
        archive = engine.context.archive
        first = perplexity.stream(engine, tokens[:n_first])
        saved = {name: array.copy() for name, array in engine.save()}
        before = meter.read() if meter else ()
        found["nll"] = np.concatenate([first, perplexity.stream(engine, tokens[n_first:])]).tolist()
        if meter:
            sent, received = (new - old for new, old in zip(meter.read(), before, strict=True))
            found["sent"], found["received"] = sent["set"], received["get"]
        found["recalled"] = holdings.recalled_last(engine).tolist()
        found["machines"] = [free > 0 for _, free in archive._machines()]
        found["span"] = [archive.span.start, archive.span.stop]
        found["bytes"] = archive.n_bytes
        found["stored"] = archive.read(archive.span.start + 3, archive.end).tolist()
        assert engine.n_restart > 0
        engine.restore(saved)
        found["again"] = perplexity.stream(engine, tokens[n_first:]).tolist()
        archive.keep(20)
        found["kept"] = [archive.n, archive.n_bytes]
    found["saved"] = {name: saved[name].tolist() for name in saved if name.startswith("archive")}
    return found, saved, settings, policy


def goes_on(path, saved, settings, policy, n_gpu_layers, n_first):
    with open_engine(path, policy, n_gpu_layers, **settings) as engine:
        engine.restore(saved)
        return perplexity.stream(engine, text(n_first + N_LATER)[n_first:]).tolist()


def resized(path, n_gpu_layers):
    """The log-likelihoods of a stream whose cache changes its size."""
    nll = []
    with open_engine(path, policies.fit("recall", 48, 16), n_gpu_layers) as engine:
        for part, n_cell in zip(np.split(text(220), [100, 160]), (0, 256, 96), strict=True):
            if n_cell:
                engine.context.resize(np.full(len(engine.context.layer_cells), n_cell))
            nll += perplexity.stream(engine, part).tolist()
    return nll


def grown(path):
    """The bytes of an archive on the worker, one after the other."""
    policy = policies.fit("recall", 48, 16)
    for _ in range(6):
        with open_engine(path, policy, 99, archive_type="f32") as engine:
            engine.read(text(60))
            for _ in range(10):
                engine.context.archive.push(np.zeros(2000, np.int32), engine.context.archive.end)
            yield engine.context.archive.n_bytes


def without_memory(path, pid):
    """Why a worker cannot archive more, and whether it then has what it had before."""
    import resource

    with open_engine(path, policies.fit("recall", 48, 16), 99, archive_type="f32") as engine:
        engine.read(text(60))
        archive, before = engine.context.archive, []
        n_page = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limits = resource.prlimit(pid, resource.RLIMIT_AS)
        most = n_page * resource.getpagesize() + 8 * archive.slab_bytes
        resource.prlimit(pid, resource.RLIMIT_AS, (most, limits[1]))
        try:
            while archive.n < 200_000:
                before[:] = [archive.span, archive.n_bytes]
                archive.push(np.zeros(100, np.int32), archive.end)
        except StreamEnd as error:
            said = str(error)
        resource.prlimit(pid, resource.RLIMIT_AS, limits)
        same = before == [archive.span, archive.n_bytes]
        n_read = len(archive.read(archive.span.start, archive.end))
        archive.push(np.zeros(100, np.int32), archive.end)
        return said, same and n_read == len(before[0]) * sum(archive.layer_bytes), archive.n - len(before[0])


def client(endpoint, path, n_first, file=None, n_first_in_file=0, pid=0):
    """Prints what the runs give, as JSON; llama.cpp's log goes to stderr. Without a file: one run."""
    set_verbose(True)
    meter = wire.Meter(endpoint)
    add_rpc(meter.endpoint)
    results = []
    for each in RUNS if file else RUNS[1:2]:
        sys.stderr.write(f"\nrun {' '.join(map(str, each))}\n")
        found, saved, settings, policy = run(path, *each, int(n_first), meter)
        found["here"] = goes_on(path, saved, settings, policy, 0, int(n_first))
        results.append(found)
    printed = {"results": results}
    if file:
        sys.stderr.write("\nrun others\n")
        printed["in_file"] = run(path, *RUNS[0], int(n_first_in_file), meter, archive_file=file)[0]
        printed["resized"] = resized(path, 99)
        printed["bytes"] = list(grown(path))
        printed["full"] = without_memory(path, int(pid)) if Path("/proc/self/statm").exists() else None
    print(json.dumps(printed))


class Serving:
    """What a worker's client has printed, and the most memory that the worker took meanwhile."""

    def __init__(self, path, n_first, file, n_first_in_file):
        if not (library_path().parent / "libggml-rpc.so").exists():
            pytest.skip("the library is built without RPC")
        # what that imports is not where the client looks for it
        from tests.test_worker import Worker

        worker = Worker()
        try:
            self.printed, _ = rpc_server.client(
                "tests.test_remote_archive",
                worker.serves().endpoint,
                *map(str, (path, n_first, file, n_first_in_file, worker.process.pid)),
            )
            self.peak = None
            status = Path(f"/proc/{worker.process.pid}/status")
            if status.exists():
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                self.peak = int(lines["VmHWM"].split()[0]) * 1024
        finally:
            worker.end()


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(n_layer=4, n_head_kv=2, n_ctx_train=130)


@pytest.fixture(scope="module")
def n_first(share_of):
    """Tokens of a stream before its state is saved."""
    return share_of(170, 250)


@pytest.fixture(scope="module")
def n_first_in_file(share_of):
    """The same where the archive is a file here: the worker sends every cell by itself."""
    return share_of(90, 250)


@pytest.fixture(scope="module")
def remote(path, n_first, n_first_in_file, tmp_path_factory):
    return Serving(path, n_first, tmp_path_factory.mktemp("archive") / "file", n_first_in_file)


@pytest.fixture(scope="module", params=range(len(RUNS)), ids=[" ".join(map(str, run)) for run in RUNS])
def both(request, remote, path, n_first):
    """(what the worker gives, what is here)"""
    *how, _ = RUNS[request.param]
    return remote.printed["results"][request.param], run(path, *how, 0, n_first)[0]


def test_a_worker_recalls_what_is_recalled_here(both, n_first):
    there, here = both
    assert len(here["nll"]) == n_first + N_LATER - 2
    assert np.abs(np.subtract(there["nll"], here["nll"])).max() < 1e-4
    assert there["recalled"] == here["recalled"]


def test_a_worker_keeps_the_same_tokens(both):
    there, here = both
    assert True in there["machines"]
    assert here["machines"] == [False]
    assert here["span"][1] - here["span"][0] == N_ARCHIVE
    assert there["span"] == here["span"]
    assert there["kept"] == here["kept"]
    assert there["saved"]["archive"] == here["saved"]["archive"]
    # a stored number may be rounded the other way
    assert np.mean(np.not_equal(there["stored"], here["stored"])) < 0.01


def test_a_saved_stream_goes_on_on_a_worker_and_here(both, n_first):
    there, _ = both
    rest = there["nll"][n_first - 1 :]
    assert there["again"] == rest
    assert np.abs(np.subtract(there["here"], rest)).max() < 1e-4


def test_no_keys_and_values_go_over_the_wire(remote):
    logits = 4 * N_LATER * 320
    # of one token in all layers
    cells = 2 * 4 * 2 * 32 * 4
    worker, in_file = remote.printed["results"][0], remote.printed["in_file"]
    # where cells are archived, the worker says what it has now
    assert logits < worker["received"] < logits + 8000
    # what is archived comes here, and what is recalled goes back
    assert in_file["received"] > logits + 30 * cells
    n_recalled = (N_LATER // 16) * 16
    assert in_file["sent"] > worker["sent"] + n_recalled * cells


def test_an_archive_in_a_file_is_here(remote, path, n_first_in_file):
    in_file, in_memory = remote.printed["in_file"], run(path, *RUNS[0][:-1], 0, n_first_in_file)[0]
    assert np.abs(np.subtract(in_file["nll"], in_memory["nll"])).max() < 1e-4


def test_a_cache_that_changes_its_size_is_archived_on(remote, path):
    assert np.abs(np.subtract(remote.printed["resized"], resized(path, 0))).max() < 1e-4


def test_the_memory_of_an_archive_goes_with_its_context(remote):
    n_bytes = remote.printed["bytes"]
    assert min(n_bytes) > 2**24
    if remote.peak is None:
        pytest.skip("reads the memory of a process as Linux tells it")
    assert len(n_bytes) == 6
    assert remote.peak < 4 * n_bytes[0]


def test_a_worker_without_memory_for_more_changes_nothing(remote):
    if remote.printed["full"] is None:
        pytest.skip("limits memory as Linux counts it")
    said, same, n_more = remote.printed["full"]
    assert re.fullmatch("no memory for [0-9]+ KiB more of the archive, on a worker", said)
    assert same
    assert n_more == 100


def test_a_device_whose_memory_is_not_its_hosts_recalls_the_same(remote, path, n_first):
    with rpc_server.running() as behind, rpc_server.running(behind) as endpoint:
        printed, _ = rpc_server.client("tests.test_remote_archive", endpoint, str(path), str(n_first))
    there, want = printed["results"][0], remote.printed["results"][1]
    assert there["machines"] == [True]
    for what in ("nll", "recalled", "stored", "again"):
        assert there[what] == want[what]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("llama_kvtool_recalling(None)", "dev must not be null"),
        ("llama_kvtool_use_archive(None, None)", "dev and archive must not be null"),
    ],
)
def test_a_device_that_is_none_is_refused(call, line):
    # in a process of its own, as it would be one of a worker's
    code = (
        "import ctypes; from kvtool.llama.library import bind, error_text, lib; pointer = ctypes.c_void_p;"
        "bind('llama_kvtool_recalling', pointer, pointer);"
        "bind('llama_kvtool_use_archive', ctypes.c_int32, pointer, pointer);"
        f"assert lib.{call} in (None, -1); print(error_text())"
    )
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{line}\n"


if __name__ == "__main__":
    client(*sys.argv[1:])
