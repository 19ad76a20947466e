"""Grids: their runs, the baseline of each comparison, and resuming."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.config.run import ScoreOptions
from kvtool.errors import UsageError
from kvtool.llama.loaded.model import Model
from kvtool.measure import divergence, grid, perplexity, records, statistics
from kvtool.measure.results import ComparisonResults
from kvtool.measure.run import outcome
from kvtool.models.header import read
from kvtool.models.layers import Kind, Layer, Layers
from tests.engine.exact_engines import open_engine, random_tokens

N = 150


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
    run = ScoreOptions(model=str(model), n_ctx=512, n_batch=64, threads=1, archive_type="q8_0")
    return grid.Common(what | versions, run, N)


def changed(common, **change):
    """Return `common` with other options."""
    return replace(common, options=replace(common.options, **change))


def make(common, policies, budgets, types=("f16",), **options):
    info = read(Path(common.options.model))
    return grid.runs(common, info.n_ctx_train, info.plain_layers, policies, budgets, types, **options)


def named(runs):
    return [f"{run.label} {run.typed_budget or '-'} {run.options.type_k}" for run in runs]


@pytest.mark.parametrize(
    ("typed", "name", "options"),
    [
        ("h2o", "h2o", ()),
        ("h2o:decay=0.999:window=64", "h2o", ("decay=0.999", "window=64")),
        ("C:/mine.py:x=1", "C:/mine.py", ("x=1",)),
    ],
)
def test_policy_parameters_follow_colons(typed, name, options):
    assert grid.split_policy(typed) == (name, options)


def test_grid_orders_runs_by_budget(common):
    runs = make(common, ["h2o", "full", "corm"], ["64", "25%"], ["f16", "q8_0"])
    assert named(runs) == [
        "full - f16",
        "full - q8_0",
        "corm - f16",
        "h2o 64 f16",
        "corm 64 f16",
        "h2o 25% f16",
        "corm 25% f16",
    ]
    assert [run.budget for run in runs] == [N, N, 512, 64, 64, 128, 128]
    assert runs[0].options.evict_every is None
    assert runs[3].options.evict_every == 8


def test_combine_runs_each_policy_with_each_cache_type(common):
    names = named(make(common, ["full", "h2o"], ["64"], ["q8_0", "f16"], combine=True))
    assert names == ["full - q8_0", "full - f16", "h2o 64 q8_0", "h2o 64 f16"]
    assert named(make(common, ["h2o"], ["64"], ["q8_0", "f16"])) == ["h2o 64 q8_0"]


def test_duplicate_policies_and_budgets_give_one_run(common):
    assert named(make(common, ["h2o", "h2o", "h2o:window=28"], ["64", "64"])) == ["h2o 64 f16"]
    assert len(make(common, ["h2o", "h2o:window=30"], ["64"])) == 2


def test_runs_with_two_names_are_reported(common):
    notes = []
    make(common, ["h2o", "h2o", "h2o:decay=1"], ["128", "25%"], say=notes.append)
    same = " is the same run as h2o 128"
    assert notes == [f"h2o:decay=1 128{same}; h2o 25%{same}; h2o:decay=1 25%{same}"]


def test_budgets_that_hold_the_whole_text_are_reported(common):
    notes, n = [], common.n_tokens
    make(common, ["full", "h2o", "local"], ["64", str(n), "50%", "256KiB"], say=notes.append)
    assert notes == [
        f"nothing is evicted where the budget holds the text ({n} tokens): {n}, "
        "50% of the trained context (256 tokens), 256KiB"
    ]
    # these bytes are 256 tokens of h2o and fewer of recall
    make(replace(common, n_tokens=240), ["h2o", "recall"], ["140KiB"], say=notes.append)
    assert notes.pop() == "nothing is evicted where the budget holds the text (240 tokens): 140KiB (h2o)"
    make(common, ["full", "h2o"], [str(n - 1)], say=notes.append)
    make(common, ["full", "corm"], [str(n)], say=notes.append)
    assert len(notes) == 1


def test_records_have_the_parameters_that_the_engine_uses(common):
    (run,) = make(common, ["recall"], ["64"])
    params = grid.identity(common, run)["params"]
    with open_engine(common.options.model, run.policy) as engine:
        assert params == policies.chosen(engine.policy)
    assert params["recalled"] > 0


def test_byte_budget_sets_cells_and_batch(common):
    (run,) = make(changed(common, n_batch=100), ["h2o"], ["128KiB"])
    assert (run.typed_budget, run.budget, run.options.n_batch) == ("128KiB", 256, 64)
    runs = make(common, ["h2o"], ["128KiB"], ["f16", "q8_0"], combine=True)
    assert [run.budget for run in runs] == [256, 256]


def test_byte_budget_includes_recurrent_states(common):
    rows = read(Path(common.options.model)).plain_layers.all
    # a cell takes 512 bytes, and the state of the recurrent layer takes as many bytes as 256 cells
    layers = Layers((*rows, Layer(2, Kind.RECURRENT, 2, 0, 0, 0, 256 * 512)))
    runs = grid.runs(common, 512, layers, ["h2o"], ["256KiB", "384KiB"], ["f16"])
    assert [run.budget for run in runs] == [256, 512]
    with pytest.raises(UsageError, match=r"its smallest cache \(256 tokens\) takes 256\.0 KiB"):
        grid.runs(common, 512, layers, ["h2o"], ["255KiB"], ["f16"])


@pytest.mark.parametrize(
    ("policy", "budget", "words"),
    [
        # --policies h2o:window=16,sinks=4 names two policies, of which the second is "sinks=4"
        ("sinks=4", "64", "^'sinks=4' is not a policy; parameters follow colons, as in h2o:"),
        ("h2o:sinkz=1", "64", "no parameter"),
        ("h2o:window:8", "64", "^h2o: a parameter is NAME=VALUE, got 'window:8'; write it as in h2o:"),
        ("h2o:window:sinks=4", "64", "^h2o: a parameter is NAME=VALUE, got 'window'; write it as in h2o:"),
        ("streamingllm", "3", "a budget of 3 is too small for streamingllm; use at least 6"),
        ("h2o", "513", "the context is 512 tokens"),
        ("h2o", "1KiB", "1KiB is too small for this model: its smallest cache .256 tokens. takes 128"),
        ("buzz:kept=true", "256KiB", "--budget 256KiB: .* bytes would not bound it; give it in tokens"),
        ("recall:chunk=400", "128KiB", "^--budget 128KiB is too small: recall also fills cells in each"),
        ("buzz:kept=true", "200", "a budget of at most that, not 200, which takes 525"),
    ],
)
def test_impossible_runs_are_refused_before_they_start(common, policy, budget, words):
    with pytest.raises(UsageError, match=words):
        make(common, [policy], [budget], ["f16"])


def test_types_that_need_another_option_are_refused(common):
    with pytest.raises(UsageError, match="flash attention"):
        make(changed(common, flash="off"), ["h2o"], ["64"], ["q8_0"])
    with pytest.raises(UsageError, match="lose too much precision"):
        make(changed(common, positions="in-cache"), ["h2o"], ["64"], ["q4_0"])


def test_cache_type_must_fit_the_head_size(common):
    small = Layers((Layer(0, Kind.ROWS, 0, 2, 48, 32, 0),))
    with pytest.raises(
        UsageError, match="^K cannot be q8_0: the model's head size of 48 is not a multiple of"
    ):
        grid.runs(common, 512, small, ["h2o"], ["64"], ["q8_0"])


def test_full_always_uses_positions_auto(common):
    (run,) = make(changed(common, positions="in-cache"), ["full"], [], ["q4_0"])
    assert run.options.positions == "auto"


def record(common, run, sums, **more):
    what = {"nll": sum(sums) / N, "nll_blocks": sums, "n_scored": N - 1}
    return grid.identity(common, run) | what | more


def blocks(seed):
    n = len(statistics.block_counts(N - 1))
    return np.random.default_rng(seed).random(n).tolist()


def test_nll_minus_best_compares_with_the_best_other_run_of_the_budget(common):
    runs = make(common, ["full", "h2o", "buzz", "local"], ["64", "128"])
    results = ComparisonResults(common, runs)
    sums = {run: blocks(i) for i, run in enumerate(runs)}
    results.of_run = {run: record(common, run, sums[run]) for run in runs}
    by_run = dict(results.compared())
    assert by_run[runs[0]]["best_other"] is None
    for run in runs[1:]:
        other_runs = [other for other in runs if other.typed_budget == run.typed_budget and other is not run]
        best = min(other_runs, key=lambda other: sum(sums[other]))
        assert by_run[run]["best_other"] == best.label
        difference = np.subtract(sums[run], sums[best])
        names = [f"nll_minus_best{end}" for end in ("", "_stderr", "_margin")]
        assert [by_run[run][name] for name in names] == [*statistics.mean_of_text(difference, N - 1)]


def test_records_of_the_grid_are_reused_and_other_records_ignored(common):
    runs = make(common, ["h2o", "buzz"], ["64"])
    of_other_text = record(replace(common, n_tokens=N + 1), runs[0], blocks(0))
    failed = grid.identity(common, runs[1]) | {"error": "no"}
    succeeded = record(common, runs[1], blocks(1))
    results = ComparisonResults(common, runs)
    results.add([of_other_text, failed, succeeded, failed])
    assert results.missing() == [runs[0]]
    assert results.failed() == []
    assert results.of_run == {runs[1]: succeeded}
    results.add([grid.identity(common, runs[0]) | {"error": "no"}])
    assert results.missing() == results.failed() == [runs[0]]
    assert results.compared()[0][1]["error"] == "no"


def test_record_without_kl_is_missing_if_kl_is_wanted(common):
    (run,) = make(common, ["h2o"], ["64"])
    without, whole = (record(common, run, blocks(0), kl=kl) for kl in (None, 0.5))
    for stored in ([without], [without, whole], [whole, without]):
        results = ComparisonResults(common, [run])
        results.add(stored)
        assert results.missing() == []
        assert results.missing(kl=True) == ([] if whole in stored else [run])
        assert results.of_run == {run: stored[0] if whole not in stored else whole}


def test_record_key_depends_on_the_content_of_a_policy_file(common, tmp_path):
    path = tmp_path / "mine.py"
    keys = []
    for comment in "ab":
        path.write_text(f"from kvtool.policies.local import POLICY  # {comment}\n")
        (run,) = make(common, [str(path)], ["64"])
        keys.append(records.key(grid.identity(common, run), grid.KEY))
    assert keys[0] != keys[1]
    # the key includes the content of the file, because the file may be edited or deleted meanwhile
    path.unlink()
    assert records.key(grid.identity(common, run), grid.KEY) == keys[1]


def test_record_key_depends_on_gpu_layers(common):
    grids = [changed(common, gpu_layers=n) for n in (None, 0)]
    keys = [records.key(grid.identity(each, *make(each, ["h2o"], ["64"])), grid.KEY) for each in grids]
    assert keys[0] != keys[1]


def test_record_key_depends_on_the_archive_only_for_recall(common):
    grids = [changed(common, **change) for change in ({}, {"archive": "100"}, {"archive_type": "f16"})]
    keys = {
        name: {records.key(grid.identity(each, *make(each, [name], ["64"])), grid.KEY) for each in grids}
        for name in ("h2o", "recall")
    }
    assert {name: len(distinct) for name, distinct in keys.items()} == {"h2o": 1, "recall": 3}


def measured(common, runs, reference=None, **options):
    """Measure the runs. Return two dicts with the runs as keys: the run's outcome, and its reports."""
    by_run, scores = {}, {run: [] for run in runs}
    with closing(Model(common.options.model)) as model:
        for run in runs:
            report = partial(lambda run, *scored: scores[run].append(scored), run)
            by_run[run] = outcome(model, run, random_tokens(N), reference, report, **options)
    return by_run, scores


def test_run_has_the_results_of_perplexity(common):
    runs = make(common, ["full", "h2o"], ["64", "256"])
    path = grid.reference(common)
    of_full, _ = measured(common, runs[:1], path, writes=True)
    by_run, scores = measured(common, runs[1:], path)
    by_run |= of_full
    nll = {}
    for run in runs:
        policy = policies.fit(run.options.policy, run.budget)
        settings = {"type_k": "f16", "type_v": "f16", "flash": "auto", "over_budget": False}
        with open_engine(common.options.model, policy, **settings) as engine:
            nll[run] = perplexity.stream(engine, random_tokens(N))
            assert by_run[run]["cells"] == engine.mean_kv
            assert by_run[run]["kv_bytes"] == by_run[run]["kv_peak_bytes"] == engine.cache_bytes
            assert by_run[run]["state_bytes"] == engine.state_bytes
        assert by_run[run]["nll"] == pytest.approx(nll[run].mean(), abs=1e-12)
        assert by_run[run]["perplexity"] == math.exp(by_run[run]["nll"])
        assert by_run[run]["perplexity_low"] < by_run[run]["perplexity"] < by_run[run]["perplexity_high"]
    full, h2o, roomy = (by_run[run] for run in runs)
    assert (full["kl"], full["top1"], full["nll_minus_full"], full["plan_s"]) == (0, 1, 0, 0)
    assert h2o["kl"] > 0.01
    assert roomy["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < h2o["top1"] < 1
    assert h2o["plan_s"] > 0 < h2o["edit_s"]
    sums = statistics.block_sums(nll[runs[1]] - nll[runs[0]])
    names = [f"nll_minus_full{end}" for end in ("", "_stderr", "_margin")]
    assert [h2o[name] for name in names] == pytest.approx([*statistics.mean_of_text(sums, N - 1)])
    # 256 cells are allocated for the budget of 64. Each has f16 keys and values in two layers, with two heads
    # of size 32
    assert h2o["kv_bytes"] == 4 * h2o["budget_bytes"] == 256 * 2 * 2 * 2 * 32 * 2
    n, total = scores[runs[1]][-1]
    assert n == N - 1
    assert total / n == pytest.approx(h2o["nll"])


@pytest.mark.parametrize("convert", [np.ndarray.tolist, np.int64, np.uint32])
@pytest.mark.parametrize(
    "score", [perplexity.stream, partial(perplexity.windows, n_window=40)], ids=["stream", "windows"]
)
def test_perplexity_takes_lists_and_all_types_of_integers(model, score, convert):
    with open_engine(model, policies.fit("h2o", 64), over_budget=False) as engine:
        expected = score(engine, random_tokens(N))
        engine.reset()
        assert score(engine, convert(random_tokens(N))).tolist() == expected.tolist()


def test_budget_bytes_of_rows_of_different_lengths_are_their_mean_at_the_peak(common):
    runs = make(common, ["corm:window=8:history=8"], [])
    (run,), (record,) = zip(*measured(common, runs)[0].items(), strict=True)
    policy = policies.fit("corm", run.budget, int(run.options.evict_every), ["window=8", "history=8"])
    with open_engine(common.options.model, policy, over_budget=False) as engine:
        peak = max(engine.mean_kv for _ in perplexity.steps(engine, random_tokens(N)))
        assert engine.mean_kv < peak < N
    # f16 keys and values in two layers, with two heads of size 32
    assert record["budget_bytes"] == peak * 2 * 2 * 2 * 32 * 2


def test_a_failed_run_is_recorded_and_other_runs_continue(common, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from kvtool.policies.local import Local\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Local):\n"
        "    def plan(self, view, state):\n"
        "        raise ValueError('no luck')\n"
        "POLICY = Mine\n"
    )
    runs = make(common, [str(tmp_path / "mine.py"), "local"], ["64"])
    failed, done = measured(common, runs)[0].values()
    assert failed == {"error": "Mine.plan: ValueError: no luck (mine.py, line 6)", "exit_code": 7}
    assert "error" not in done


def test_a_reference_that_cannot_be_written_is_recorded(common, tmp_path):
    (tmp_path / "file").touch()
    by_run, _ = measured(common, make(common, ["full"], []), tmp_path / "file" / "a.ref", writes=True)
    (failed,) = by_run.values()
    assert failed == {"error": f"cannot write {tmp_path / 'file'}: File exists", "exit_code": 1}
