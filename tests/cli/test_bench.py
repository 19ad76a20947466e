"""kvtool bench: rows, measured streams, errors and interruption."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvtool import __version__, policies
from kvtool.cli.bench import table as bench_table
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.loaded.model import Model
from kvtool.measure import bench, depths, machine
from kvtool.system.cpu import cpu_name
from tests.cli.in_process_command import run_kvtool
from tests.cli.test_cli import kvtool

ROWS = ["full, flash off", "full, flash on", "full, q8_0, flash on", "recall, 64", "h2o, 64"]
SPEEDS = ("read_tokens_per_s", "write_tokens_per_s", "first_s")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(n_ctx_train=512)


@pytest.fixture
def loaded(model):
    with closing(Model(model)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def whole(model):
    """Result of a run with --json at two depths. The second depth is beyond the trained context."""
    options = "-m", model, "-t", 1, "--budget", 64, "-b", 64
    return kvtool("bench", *options, "--depths", "64,2k", "--rounds", 2, "--json")


def read(text):
    return [json.loads(line) for line in text.splitlines()]


def words_of(docstring):
    """Return the names in a docstring's list of fields."""
    lines = re.findall(r"^        ([a-z_0-9, ]+)$", docstring, re.M)
    return {name for line in lines for name in line.split(", ")}


def test_bench_prints_a_row_per_configuration_and_depth(whole, model):
    assert whole.returncode == 0, whole.stderr
    rows = read(whole.stdout)
    assert [(row["what"], row["depth"]) for row in rows] == [
        (config, n) for n in (64, 2048) for config in ROWS
    ]
    documented = words_of(bench.Row.record.__doc__)
    assert len(documented) == 16
    assert all(row.keys() == documented | {"model", "machine"} for row in rows)
    assert {row["model"] for row in rows} == {model.stem}
    beyond = [row for row in rows if row["policy"] == "full" and row["depth"] == 2048]
    assert {row["why"] for row in beyond} == {"beyond the trained context (512 tokens)"}
    assert {row["rounds"] for row in beyond} == {0}
    for row in rows:
        if row not in beyond:
            assert (row["why"], row["n_read"]) == (None, 16 if row["depth"] == 64 else 64)
            assert all(0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"] for name in SPEEDS)
            assert row["rounds"] in (1, 2)


def test_bytes_equal_the_sizes_of_the_caches(whole):
    rows = {(row["what"], row["depth"]): row for row in read(whole.stdout)}
    full, _, quantized = (rows[config, 64]["device_bytes"] for config in ROWS[:3])
    # a block of 32 numbers has 34 bytes in q8_0 and 64 in f16
    assert quantized == full * 34 // 64
    for row in rows.values():
        assert row["why"] or row["host_bytes"] > row["device_bytes"] > 0
    # h2o also stores 16 bytes per cell: position, rotation, sum and signal. There are 256 cells for each of 2
    # KV heads in 2 layers.
    h2o = rows["h2o, 64", 64]
    assert h2o["host_bytes"] - h2o["device_bytes"] == 4 * 4 * 256 * 2 * 2
    near, far = (rows["recall, 64", n] for n in (64, 2048))
    assert near["device_bytes"] == far["device_bytes"]
    # the archive has the evicted tokens; it stores 32 numbers of a key in 22 bytes, and 32 numbers of a value
    # in 18 bytes
    token_bytes = full * (22 + 18) // 128 // 256
    assert far["host_bytes"] - near["host_bytes"] >= (2048 - 64 - 64) * token_bytes


def test_the_first_line_names_the_machine(model):
    options = "-m", model, "-t", 1, "--budget", 64, "-b", 64
    done = kvtool("bench", *options, "--depths", "64,1024", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    first, _, second, *_ = done.stdout.splitlines()
    assert first == machine.line(machine.machine())
    assert first.startswith(f"{cpu_name()}, ")
    assert f"kvtool {__version__}; llama-cpp-python " in first
    assert second == f"{model.stem}, 1 thread"
    assert done.stdout.count("full, flash on        beyond the trained context (512 tokens)") == 1
    # in a pipe, the command writes nothing to stderr
    assert done.stderr == ""


@pytest.mark.parametrize("has_numba", [True, False])
def test_table_fits_80_and_120_columns(whole, monkeypatch, has_numba):
    if has_numba:
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        monkeypatch.delitem(sys.modules, "numba", raising=False)
    records = read(whole.stdout)
    header = {"model": records[0]["model"], "machine": records[0]["machine"]}
    for width in (80, 120):
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=True, color_system=None)
        bench_table.show(console, records, header, has_device=False)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert [line for line in lines if line.startswith("recall, 64")]
        assert ("process: all memory" in out.getvalue()) == (width == 120)
        assert ("and numba with" in out.getvalue()) == (width == 120 and has_numba)


@pytest.mark.parametrize("is_known", [True, False])
def test_table_says_if_device_memory_is_unknown(whole, is_known):
    records = read(whole.stdout)
    if not is_known:
        records = [row | {"device_bytes": None} for row in records]
    out = io.StringIO()
    header = {"model": records[0]["model"], "machine": records[0]["machine"]}
    bench_table.show(Console(file=out, width=120), records, header, has_device=True)
    assert ("not known, as the devices' counters stand still" in " ".join(out.getvalue().split())) != is_known


def test_row_says_if_memory_is_too_small(loaded, monkeypatch):
    rows = [bench.sized(config, 256, 64) for config in bench.cache_configs({"recall": 64})]
    monkeypatch.setattr(bench, "free_bytes", lambda: 2000)
    benchmark = bench.Bench(loaded, Settings(n_batch=64), rows, rounds=1, row_s=1.0)
    assert list(benchmark.measure()) == rows
    assert all(row.why.endswith(", 2.0 KiB are free") for row in rows)
    assert rows[-1].why.startswith("its archive needs ")
    assert not any(row.write for row in rows)


@pytest.mark.parametrize(
    ("arch", "wrong"),
    [
        ("gemma2", {}),
        ("lfm2", {}),
        ("deepseek2", {}),
        ("deepseek32", {("full", 768): "attends only to 512 cells that its index chooses"}),
        ("refact", {("recall", 64): "but in this model distance counts as well (ALiBi)"}),
    ],
)
def test_bench_measures_other_architectures(tiny_model, arch, wrong):
    """A row that fails does not affect the other rows."""
    budgets = {"recall": 64, "h2o": 64}
    with closing(Model(tiny_model(arch))) as model:
        configs = bench.cache_configs(budgets)
        rows = [bench.sized(config, n, 32) for n in (64, 768) for config in configs]
        list(bench.Bench(model, Settings(n_batch=32, n_threads=1), rows, rounds=1, row_s=9.0).measure())
    for row in rows:
        why = [why for (policy, n), why in wrong.items() if policy == row.config.policy and n <= row.depth]
        assert all(words in row.why for words in why)
        assert bool(row.write) == (row.why is None) == (not why), row


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_filled_cache_repeats_the_tokens_read(loaded, cache_type):
    settings = Settings(n_batch=64, type_k=cache_type, type_v=cache_type, flash="on", n_threads=1)
    with closing(Engine(loaded, policies.fit("full", 400), settings)) as engine:
        n_seed = depths.N_SEED
        depths.fill(engine, depths.text(loaded), 300)
        assert (engine.n_past, engine.n_kv, engine.rows.next_rot) == (300, 300, 300)
        assert (engine.cells().pos == np.arange(300)).all()
        for layer in range(len(engine.context.layer_cells)):
            for part in engine.context.cells(layer, 300).reshape(2, 300, -1):
                assert part[:n_seed].any()
                assert (part[n_seed:] == part[: 300 - n_seed]).all()
        engine.step(np.array([7], np.int32))
        assert np.isfinite(engine.context.logits()).all()
        assert engine.n_past == 301


@pytest.mark.parametrize("name", ["recall", "h2o"])
def test_lengthened_stream_continues_like_a_read_stream(loaded, name):
    """`lengthened` changes the counters, the window and the archive as if more tokens had been read."""
    policy, settings = policies.fit(name, 64), Settings(n_batch=64, n_threads=1)
    tokens = depths.text(loaded)[: depths.n_start(policy)]
    saved = depths.start(loaded, policy, settings, tokens, lambda: False)
    longer = depths.lengthened(saved, 1600, 512)
    n = len(tokens) + 1600
    assert depths.n_past(longer) == n
    with closing(Engine(loaded, policy, settings)) as engine:
        engine.restore(longer)
        assert engine.n_past == n
        if name == "recall":
            archive, pos = engine.context.archive, engine.cells().pos[0]
            # every token is either archived or in the cache
            assert archive.n + engine.n_kv == n
            assert sorted([*archive.span, *pos.tolist()]) == list(range(n))
            assert [first for first, _ in archive.frames] == sorted({first for first, _ in archive.frames})
        before = engine.n_evicted
        engine.read(tokens[:100])
        assert engine.n_past == n + 100
        assert engine.n_evicted > before
        assert np.isfinite(engine.context.logits()).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_prints_the_measured_rows(model, monkeypatch, number):
    whole_round, done_rounds = bench.Bench._round, []

    def interrupted(self, row, saved):
        if len(done_rounds) == 2:
            signal.raise_signal(number)
        done_rounds.append(row)
        whole_round(self, row, saved)

    monkeypatch.setattr(bench.Bench, "_round", interrupted)
    options = "-m", model, "-t", 1, "--budget", 64, "-b", 64
    done = run_kvtool("bench", *options, "--depths", "64,128", "--rounds", 1, "--json")
    assert done.returncode == 128 + number
    assert [row["what"] for row in read(done.stdout)] == ROWS[:2]
    assert done.stderr.split("\n")[-3:-1] == [
        "stopping after the current step ...",
        "kvtool: stopped; 2 of 10 rows are measured",
    ]


def test_an_interrupt_before_the_first_row_prints_no_table(model, monkeypatch):
    monkeypatch.setattr(bench.Bench, "_round", lambda *_: signal.raise_signal(signal.SIGINT))
    done = run_kvtool("bench", "-m", model, "-t", 1, "--budget", 64, "--depths", 64, "--rounds", 1)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "kvtool: stopped; 0 of 5 rows are measured"


def test_without_a_measured_row_there_is_no_legend(whole):
    records = [record for record in read(whole.stdout) if record["why"]]
    out, header = io.StringIO(), {"model": records[0]["model"], "machine": records[0]["machine"]}
    bench_table.show(Console(file=out, width=120), records, header, has_device=False)
    assert "full, flash on        beyond the trained context" in out.getvalue()
    assert "batches" not in out.getvalue()


@pytest.mark.parametrize("n_bytes", [128 * 2**10, 256 * 2**10])
def test_a_budget_in_bytes_bounds_the_caches_with_a_policy(model, n_bytes):
    options = "-m", model, "-t", 1, "--budget", f"{n_bytes}B", "--depths", 512, "--rounds", 1
    done = run_kvtool("bench", *options, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in read(done.stdout)}
    for policy in ("recall", "h2o"):
        assert 0 < rows[policy]["device_bytes"] <= n_bytes
        # a batch has at most a quarter of the 256 or 512 cells that fit
        assert rows[policy]["n_read"] == n_bytes // 2048


def test_cpu_name_is_never_empty(monkeypatch):
    assert cpu_name()
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    assert cpu_name()
