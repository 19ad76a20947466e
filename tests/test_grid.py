"""Grids: which cells there are, what they are compared with, and how a run goes on elsewhere."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.measure import cell as one
from kvtool.measure import divergence, grid, perplexity, records, statistics
from kvtool.models.header import read
from tests.running import open_engine, text

N = 150
TIMES = {
    "tokens_per_s",
    "seconds",
    "cpu_s",
    "plan_s",
    "edit_s",
    "peak_rss_bytes",
}
"""What differs from run to run."""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(divergence, "_folder", lambda: tmp_path / "logits")


@pytest.fixture
def model(tiny_model):
    return tiny_model(n_ctx_train=512)


@pytest.fixture
def common(model):
    what = {"model": str(model), "model_sha256": "m", "text": "t", "text_sha256": "t"}
    versions = dict.fromkeys(("kvtool", "llama_cpp_python", "patch"), "1")
    return grid.Common(what | versions, model, N, 512, 64, "auto", "auto", 1)


def make(common, wanted, budgets, types=("f16",), **options):
    return grid.cells(common, read(common.model), wanted, budgets, types, **options)


def named(cells):
    return [f"{cell.label} {cell.asked or '-'} {cell.type_k}" for cell in cells]


@pytest.mark.parametrize(
    ("typed", "name", "options"),
    [
        ("h2o", "h2o", ()),
        ("h2o:decay=0.999:window=64", "h2o", ("decay=0.999", "window=64")),
        ("C:/mine.py:x=1", "C:/mine.py", ("x=1",)),
    ],
)
def test_a_policy_has_its_parameters_behind_colons(typed, name, options):
    assert grid.split_policy(typed) == (name, options)


def test_the_grid_goes_budget_by_budget(common):
    found = make(common, ["h2o", "full", "corm"], ["64", "25%"], ["f16", "q8_0"])
    assert named(found) == [
        "full - f16",
        "full - q8_0",
        "corm - f16",
        "h2o 64 f16",
        "corm 64 f16",
        "h2o 25% f16",
        "corm 25% f16",
    ]
    assert [cell.budget for cell in found] == [N, N, 512, 64, 64, 128, 128]
    assert found[0].evict_every is None
    assert found[3].evict_every == 8


def test_everything_is_combined_when_asked(common):
    found = named(make(common, ["full", "h2o"], ["64"], ["q8_0", "f16"], combine=True))
    assert found == ["full - q8_0", "full - f16", "h2o 64 q8_0", "h2o 64 f16"]
    assert named(make(common, ["h2o"], ["64"], ["q8_0", "f16"])) == ["h2o 64 q8_0"]


def test_what_is_named_twice_is_one_cell(common):
    assert named(make(common, ["h2o", "h2o", "h2o:window=28"], ["64", "64"])) == ["h2o 64 f16"]
    assert len(make(common, ["h2o", "h2o:window=30"], ["64"])) == 2


def test_bytes_are_for_cells_and_the_batch(common):
    (cell,) = make(replace(common, n_batch=100), ["h2o"], ["128KiB"])
    assert (cell.asked, cell.budget, cell.n_batch) == ("128KiB", 256, 64)
    found = make(common, ["h2o"], ["128KiB"], ["f16", "q8_0"], combine=True)
    assert [cell.budget for cell in found] == [256, 256]


@pytest.mark.parametrize(
    ("wanted", "budget", "kind", "change", "words"),
    [
        ("nope", "64", "f16", {}, "no policy"),
        ("h2o:sinkz=1", "64", "f16", {}, "no parameter"),
        ("streamingllm", "3", "f16", {}, "smallest budget that works"),
        ("h2o", "many", "f16", {}, "a budget is cells"),
        ("h2o", "513", "f16", {}, "the context is 512 tokens"),
        ("h2o", "64", "q8_0", {"flash": "off"}, "flash attention"),
        ("h2o", "64", "q4_0", {"positions": "in-cache"}, "do not outlive"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_run(common, wanted, budget, kind, change, words):
    with pytest.raises(UsageError, match=words):
        make(replace(common, **change), [wanted], [budget], [kind])


def test_full_is_never_turned(common):
    (cell,) = make(replace(common, positions="in-cache"), ["full"], [], ["q4_0"])
    assert cell.positions == "auto"


def test_shards_are_the_grid_between_them(common):
    found = make(common, ["full", "h2o", "buzz"], ["64", "128"])
    parts = [grid.shard(found, f"{i}/3") for i in (1, 2, 3)]
    assert [len(part) for part in parts] == [2, 2, 1]
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, found))
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(UsageError, match="a shard is"):
            grid.shard(found, wrong)


# records


def record(common, cell, sums, **more):
    what = {"nll": sum(sums) / N, "nll_blocks": sums, "n_scored": N - 1}
    return grid.identity(common, cell) | what | more


def blocks(seed):
    n = len(statistics.block_counts(N - 1))
    return np.random.default_rng(seed).random(n).tolist()


def test_a_difference_is_that_of_blocks_to_the_best_other_of_the_group(common):
    cells = make(common, ["full", "h2o", "buzz", "local"], ["64", "128"])
    results = grid.Results(common, cells)
    sums = {cell: blocks(i) for i, cell in enumerate(cells)}
    results.of_cell = {cell: record(common, cell, sums[cell]) for cell in cells}
    found = dict(zip(cells, results.finished(), strict=True))
    assert found[cells[0]]["best_other"] is None
    for cell in cells[1:]:
        others = [other for other in cells if other.asked == cell.asked and other is not cell]
        best = min(others, key=lambda other: sum(sums[other]))
        assert found[cell]["best_other"] == best.label
        difference = np.subtract(sums[cell], sums[best])
        mean, error = statistics.mean_error(difference, statistics.block_counts(N - 1))
        assert found[cell]["nll_minus_best"] == mean
        assert found[cell]["nll_minus_best_stderr"] == error


def test_a_file_gives_back_the_grid_s_cells_and_keeps_the_others(common):
    cells = make(common, ["h2o", "buzz"], ["64"])
    stranger = record(replace(common, n_tokens=N + 1), cells[0], blocks(0))
    failed = grid.identity(common, cells[1]) | {"error": "no"}
    mended = record(common, cells[1], blocks(1))
    results = grid.Results(common, cells)
    results.take([stranger, failed, mended, failed])
    assert results.others == [stranger]
    assert results.missing() == [cells[0]]
    assert results.failed() == []
    assert results.of_cell == {cells[1]: mended}
    results.take([grid.identity(common, cells[0]) | {"error": "no"}])
    assert results.missing() == results.failed() == [cells[0]]
    assert results.finished()[0]["error"] == "no"


def test_what_has_no_divergence_is_missing_where_that_is_wanted(common):
    (cell,) = make(common, ["h2o"], ["64"])
    without, whole = (record(common, cell, blocks(0), kl=kl) for kl in (None, 0.5))
    for there in ([without], [without, whole], [whole, without]):
        results = grid.Results(common, [cell])
        results.take(there)
        assert results.missing() == []
        assert results.missing(kl=True) == ([] if whole in there else [cell])
        assert results.of_cell == {cell: there[0] if whole not in there else whole}


def test_a_policy_s_own_file_is_known_by_what_is_in_it(common, tmp_path):
    path = tmp_path / "mine.py"
    keys = []
    for comment in "ab":
        path.write_text(f"from kvtool.policies.local import POLICY  # {comment}\n")
        (cell,) = make(common, [str(path)], ["64"])
        keys.append(records.key(grid.identity(common, cell), grid.KEY))
    assert keys[0] != keys[1]
    # while it runs, the file may be edited or go
    path.unlink()
    assert records.key(grid.identity(common, cell), grid.KEY) == keys[1]


def test_another_device_is_another_cell(common):
    (cell,) = make(common, ["h2o"], ["64"])
    keys = [records.key(grid.identity(replace(common, gpu_layers=n), cell), grid.KEY) for n in (None, 0)]
    assert keys[0] != keys[1]


# running


def measured(common, cells, tokens=None, **options):
    """Each cell's record, and the events before it."""
    found, seen = {}, {}
    with grid.Runner(common, text(N) if tokens is None else tokens) as runner:
        for event in runner.run(cells, **options):
            if event.record:
                found[event.cell] = event.record
            else:
                seen.setdefault(event.cell, []).append(event)
    return found, seen


@pytest.mark.engine
def test_a_cell_has_the_numbers_of_perplexity(common):
    cells = make(common, ["full", "h2o"], ["64", "256"])
    path = grid.reference(common)
    of_full, _ = measured(common, cells[:1], against=path, writes=True)
    found, seen = measured(common, cells[1:], against=path)
    found |= of_full
    nll = {}
    for cell in cells:
        policy = policies.fit(cell.policy, cell.budget)
        settings = {"type_k": "f16", "type_v": "f16", "flash": "auto", "over_budget": False}
        with open_engine(common.model, policy, **settings) as engine:
            nll[cell] = perplexity.stream(engine, text(N))
            assert found[cell]["cells"] == engine.mean_kv
            assert found[cell]["kv_bytes"] == found[cell]["kv_peak_bytes"] == engine.cache_bytes
            assert found[cell]["state_bytes"] == engine.host_bytes
        assert found[cell]["nll"] == pytest.approx(nll[cell].mean(), abs=1e-12)
        assert found[cell]["perplexity"] == math.exp(found[cell]["nll"])
        assert found[cell]["perplexity_low"] < found[cell]["perplexity"] < found[cell]["perplexity_high"]
        assert found[cell]["peak_rss_bytes"] > 10_000_000
    full, h2o, roomy = (found[cell] for cell in cells)
    assert (full["kl"], full["top1"], full["nll_minus_full"], full["plan_s"]) == (0, 1, 0, 0)
    assert h2o["kl"] > 0.01
    assert roomy["kl"] == pytest.approx(0, abs=1e-6)
    assert roomy["edit_s"] < h2o["edit_s"]
    assert 0 < h2o["top1"] < 1
    assert h2o["plan_s"] > 0 < h2o["edit_s"]
    counts = statistics.block_counts(N - 1)
    mean, error = statistics.mean_error(statistics.block_sums(nll[cells[1]] - nll[cells[0]]), counts)
    assert (h2o["nll_minus_full"], h2o["nll_minus_full_stderr"]) == (
        pytest.approx(mean),
        pytest.approx(error),
    )
    # 256 cells of f16 keys and values in two layers of two heads of 32, of which 64 are the budget's
    assert h2o["kv_bytes"] == 4 * h2o["budget_bytes"] == 256 * 2 * 2 * 2 * 32 * 2
    assert [event.n for event in seen[cells[1]]][-1] == N - 1
    assert seen[cells[1]][-1].nll == pytest.approx(h2o["nll"])


BREAKS = {
    "ends": ("raise SystemExit(3)", "exit status 3"),
    "raises": ("raise ValueError('no luck')", "no luck"),
    "dies": ("import os; os.kill(os.getpid(), 9)", "signal 9; the system may be out of memory"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "llama.cpp has crashed"),
    "prints": ('print(\'{"n": "x"}\')', None),
}


@pytest.mark.engine
@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
def test_a_cell_that_fails_is_a_record_and_not_the_end(common, tmp_path):
    names = []
    for name, (what, _) in BREAKS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(
            "from dataclasses import dataclass\n"
            "from kvtool.policies.local import Local\n"
            "@dataclass(frozen=True)\n"
            "class Mine(Local):\n"
            "    def plan(self, view, state):\n"
            f"        {what}\n"
            "        return Local.plan(self, view, state)\n"
            "POLICY = Mine\n"
        )
        names.append(str(path))
    cells = make(common, [*names, "local"], ["64"])
    found, _ = measured(common, cells, jobs=2)
    for cell, (_, words) in zip(cells, BREAKS.values(), strict=False):
        said = found[cell].get("error")
        assert (said is None) if words is None else (words in said), (cell.policy, said)
        assert found[cell]["policy"] == cell.policy
    # prints as well as local itself, which comes last
    assert found[cells[4]]["nll"] == found[cells[5]]["nll"]


@pytest.mark.engine
@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
def test_no_process_outlives_its_runner(common):
    (cell,) = make(common, ["h2o"], ["64"])
    with grid.Runner(replace(common, n_tokens=100_000), np.tile(text(N), 1000)) as runner:
        events = runner.run([cell])
        next(events)
        (process,) = runner._running.values()
        assert process.poll() is None
    # not by itself, which would take a while
    assert process.returncode == -signal.SIGKILL


def test_a_job_survives_its_way(common):
    (cell,) = make(common, ["h2o:window=30"], ["64"])
    job = one.Job("m", "t", cell.policy, cell.options, 64, 8, "f16", "f16", "auto", 512, 64, "auto", 1)
    assert one.decode(json.loads(one.encode(job))) == job
