"""kvtool compare: its table, the file that --resume continues, and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.cli import output
from kvtool.cli.compare import table as compare_table
from kvtool.cli.compare.command import _run
from kvtool.cli.console import table_console
from kvtool.config.run import ScoreOptions
from kvtool.errors import UsageError
from kvtool.measure import divergence, grid, records
from kvtool.measure import run as one
from kvtool.measure.grid import Run
from kvtool.measure.results import ComparisonResults
from kvtool.system.paths import cache_dir
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S, BlockingPolicy
from tests.cli.in_process_command import run_kvtool
from tests.cli.test_cli import KVTOOL, TEXT, kvtool


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(n_ctx_train=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tide.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment variables with a new cache folder, which has links to the usual kernels and models.

    With PYTHONPATH, Python finds the package from any folder.
    """
    cache = tmp_path_factory.mktemp("cache")
    for name in ("kernels", "models"):
        (cache / name).symlink_to(cache_dir() / name)
    return os.environ | {"KVTOOL_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def compare(model, folder, environment):
    def run(*arguments, check=True, environment=environment, **options):
        command = ["compare", "tide.txt", "-m", model, "-t", 1, "--max-tokens", 200, *arguments]
        done = kvtool(*command, cwd=folder, env=environment, **options)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


GRID = ("--policies", "full,h2o:window=20,local", "--budgets", "64", "--types", "f16,q8_0")


@pytest.fixture(scope="module")
def whole(compare, folder):
    """The file of an uninterrupted comparison."""
    path = folder / "whole.jsonl"
    done = compare(*GRID, "--records", path)
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return path


def test_records_are_in_grid_order_and_resume_repeats_no_run(compare, whole, folder):
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    records = read(whole)
    assert [(record["policy"], record["budget"], record["type_k"]) for record in records] == [
        ("full", 200, "f16"),
        ("full", 200, "q8_0"),
        ("h2o", 64, "f16"),
        ("local", 64, "f16"),
    ]
    assert (records[0]["kl"], records[0]["top1"], records[0]["nll_minus_full"]) == (0, 1, 0)
    assert 0 < records[1]["kl"] < records[2]["kl"]
    assert records[2]["params"]["window"] == 20
    # stderr has one line about all runs, then one line per run
    lines = stderr.splitlines()
    assert lines.pop(0).startswith("4 runs of 200 tokens each; fewer --policies, --budgets or --types")
    assert len(lines) == 4
    assert all(
        re.search(r": perplexity [\d.]+, \d+ tokens/s \(\d/4, \d+ min left\)$", line) for line in lines
    )
    assert "199 tokens of tide.txt scored" in stdout
    assert max(map(len, stdout.splitlines())) <= 125
    # all runs are done, so --resume runs nothing
    before = whole.read_text()
    resumed = compare(*GRID, "--records", whole, "--resume")
    assert resumed.stderr == "", resumed.stderr
    assert resumed.stdout == stdout
    assert whole.read_text() == before
    # `best_other` depends on the runs that a command compares, so --json prints it, but the file does not
    # have it
    resumed = compare(*GRID, "--records", whole, "--resume", "--json")
    printed = list(map(json.loads, resumed.stdout.splitlines()))
    assert [record["best_other"] for record in printed[2:]] == ["local", "h2o:window=20"]
    assert printed[2]["nll_minus_best"] == pytest.approx(-printed[3]["nll_minus_best"])
    assert all(record.items() <= line.items() for record, line in zip(records, printed, strict=True))


def test_joined_files_are_one_file_of_which_other_lines_are_ignored(compare, whole, folder):
    joined, out = folder / "joined.jsonl", (folder / "stdout").read_text()
    lines = [json.dumps({"policy": "another grid's"}), *reversed(whole.read_text().splitlines())]
    joined.write_text("\n".join(lines) + "\n")
    before = joined.read_text()
    done = compare(*GRID, "--records", joined, "--resume")
    assert (done.stdout, done.stderr) == (out, "")
    assert joined.read_text() == before


@pytest.fixture
def outcomes(monkeypatch):
    """Replace the measurement of runs by a function of the run, its reference, and `writes`."""
    plain = one.outcome

    def replaced(outcome):
        monkeypatch.setattr(
            one,
            "outcome",
            lambda model, run, tokens, reference, report, writes=False: (
                outcome(run, reference, writes) or plain(model, run, tokens, reference, report, writes=writes)
            ),
        )

    return replaced


def test_missing_kl_is_computed_once_full_has_succeeded(monkeypatch, outcomes, tmp_path):
    calls, fails = [], True

    def outcome(run, reference, writes):
        calls.append((run.label, reference is not None))
        if writes and fails:
            return {"error": "no"}
        return {"perplexity": 1.0, "tokens_per_s": 1.0, "kl": 0.5 if reference else None}

    outcomes(outcome)
    model = SimpleNamespace(n_vocab=100)
    monkeypatch.setattr("kvtool.config.model.loaded_model", lambda *_, **options: nullcontext(model))
    monkeypatch.setattr("kvtool.cli.compare.command._n_cell", lambda run, n_ctx: 64)
    monkeypatch.setattr(grid, "reference", lambda common: tmp_path / "none")
    monkeypatch.setattr(grid, "identity", lambda common, run: {})
    common = grid.Common({}, ScoreOptions(n_ctx=512), 100)
    results, full = ComparisonResults(common, [run("local", "64")]), run("full")
    for tried in ([("full", True), ("local", False)], [("full", True)]):
        # In the second round, only `full` runs, and it fails again. `local` lacks only its KL. It does not
        # run, because the KL needs the results of `full`.
        calls.clear()
        assert not _run(results, full, Path(), None, None)
        assert [record["kl"] for record in results.of_run.values()] == [None]
        assert calls == tried
    fails = False
    calls.clear()
    assert _run(results, full, Path(), None, None)
    assert calls == [("full", True), ("local", True)]
    assert [record["kl"] for record in results.of_run.values()] == [0.5]


def test_failed_reference_exits_1_after_the_results(outcomes, model, folder, environment):
    outcomes(lambda run, reference, writes: {"error": "no luck"} if writes else None)
    arguments = ("-m", model, "-t", 1, "--policies", "local", "--budgets", "64", "--max-tokens", 199)
    done = run_kvtool("compare", "tide.txt", *arguments, "--json", cwd=folder, env=environment)
    assert done.returncode == 1
    assert done.stderr.endswith("kvtool: the run of the full cache failed; see above\n")
    assert json.loads(done.stdout)["kl"] is None


def test_without_a_writable_cache_folder_runs_are_compared_with_full(compare, environment, tmp_path):
    for name in ("kernels", "models"):
        (tmp_path / name).symlink_to(Path(environment["KVTOOL_CACHE"]) / name)
    # a file in place of the folder, because root can write to all folders
    (tmp_path / "logits").touch()
    changed = environment | {"KVTOOL_CACHE": str(tmp_path)}
    done = compare("--policies", "local", "--budgets", "64", "--json", environment=changed)
    assert json.loads(done.stdout)["kl"] > 0


def test_compare_and_perplexity_give_the_same_results(whole, model, folder, environment):
    record = read(whole)[2]
    options = ("--policy", "h2o", "--budget", 64, "-o", "window=20", "-m", model, "-t", 1)
    options += ("--max-tokens", 200, "--json")
    single_run = json.loads(kvtool("perplexity", "tide.txt", *options, cwd=folder, env=environment).stdout)
    assert record["nll"] == pytest.approx(single_run["nll"], abs=1e-12)
    for name in ("cells", "kv_bytes", "state_bytes", "params", "budget", "policy"):
        assert record[name] == single_run[name], name


def test_text_longer_than_the_context_is_not_compared_with_full(compare):
    done = compare("-c", "128", "--policies", "full,local", "--budgets", "64")
    assert (
        "does not fit in the full cache (128), so KL, top-1 and differences to `full` are missing"
        in done.stderr
    )
    assert re.search(r"local +\d+ .* - +- +- +- +\d+ *\n", done.stdout)
    assert "full " not in done.stdout.split("scored")[1].split("to full,")[0].replace("to full", "")


BREAKS = """
from dataclasses import dataclass
from kvtool.policies.local import Local

@dataclass(frozen=True)
class Breaks(Local):
    def plan(self, view, state):
        print(f"{view.n_kv} cells")
        raise ValueError("no luck")

POLICY = Breaks
"""


def test_resume_runs_failed_runs_again(compare, folder):
    (folder / "mine.py").write_text(BREAKS)
    arguments = ("--policies", "mine.py,local", "--budgets", "64", "--records", "failed.jsonl")
    done = compare(*arguments, check=False)
    assert done.returncode == 1
    assert "64 cells\nmine.py 64: failed: Breaks.plan: ValueError: no luck" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "kvtool: 1 of 2 runs failed; --resume tries them again"
    assert ["error" in record for record in read(folder / "failed.jsonl")] == [True, False]
    assert re.search(r"mine.py +- .*\n", done.stdout)
    resumed = compare(*arguments, "--resume", "-v", check=False)
    assert resumed.returncode == 1
    assert re.search(
        r'^Traceback .*:\n +File ".*mine.py", line 9, in plan\n +raise Value', resumed.stderr, re.M
    )
    assert "1 of 2 runs are done already" in resumed.stderr
    # the best record of a run counts
    assert ["error" in record for record in read(folder / "failed.jsonl")] == [True, False, True]


def test_announced_number_of_runs_includes_the_full_cache(compare):
    # no other test has 101 tokens, so the reference does not exist yet
    options = ("--policies", "local,h2o", "--budgets", "64", "--max-tokens", 101)
    first, *runs = compare(*options).stderr.splitlines()
    assert first.startswith("3 runs of 101 tokens each, one with the full cache; fewer --policies")
    assert [re.search(r"\((\d/\d), ", line)[1] for line in runs] == ["1/3", "2/3", "3/3"]
    first, *runs = compare(*options).stderr.splitlines()
    assert first.startswith("2 runs of 101 tokens each; fewer --policies")
    assert len(runs) == 2


def test_corm_runs_with_empty_budgets(compare):
    done = compare("--policies", "corm:window=16:history=16", "--budgets", "", "--max-tokens", "64")
    assert "corm" in done.stdout


def test_records_are_written_to_a_file_and_printed_as_json(compare, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--policies", "local", "--budgets", "64", "--max-tokens", 100)
    printed = compare(*options, "--records", out, "--json").stdout
    (line,) = printed.splitlines()
    (record,) = read(out)
    assert json.loads(line) == record | dict.fromkeys(
        ("best_other", "nll_minus_best", "nll_minus_best_stderr", "nll_minus_best_margin")
    )


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_budget_in_bytes_gives_the_run_of_perplexity(model, folder, kind):
    shared = (folder / "tide.txt", "-m", model, "-t", 1, "--max-tokens", 400, "--json", "--budget", "128KiB")
    compared = run_kvtool("compare", *shared, "--policies", "recall,h2o,full", "--types", kind, "--combine")
    runs = {run["policy"]: run for run in map(json.loads, compared.stdout.splitlines())}
    for policy in ("recall", "h2o"):
        options = ("--policy", policy, "-ctk", kind, "-ctv", kind)
        alone = json.loads(run_kvtool("perplexity", *shared, *options).stdout)
        seen = json.loads(run_kvtool("inspect", *shared, *options).stdout)
        assert runs[policy]["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
        for name in ("budget", "kv_bytes", "cells", "archived"):
            assert runs[policy][name] == alone[name] == seen[name], name
        assert alone["kv_bytes"] <= 128 * 2**10
        assert alone["cells"] < 400


@pytest.mark.skipif(os.name != "posix", reason="limits of Unix")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_does_not_lose_the_finished_runs(compare, whole, tmp_path, as_json):
    out, lines = tmp_path / "out.jsonl", whole.read_bytes().splitlines(keepends=True)
    limit = sum(map(len, lines[:2])) + 100, resource.RLIM_INFINITY
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
    options = (*GRID, "--records", out, *["--json"] * as_json)
    for again in ([], ["--resume"]):
        done = compare(*options, *again, check=False, preexec_fn=full)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"kvtool: cannot write {out}: File too large"
        assert [record["policy"] for record in records.read(out)] == ["full", "full"]
        # the third run is finished
        if as_json:
            printed = [json.loads(line)["policy"] for line in done.stdout.splitlines()]
            assert printed == ["full", "full", "h2o"]
        else:
            assert re.search(r"^h2o:window=20 +64 ", done.stdout, re.M)


def test_without_room_for_the_reference_the_runs_have_no_divergence(model, folder, monkeypatch):
    monkeypatch.setattr(divergence, "folder_with_room", lambda path, n, n_vocab: None)
    # no other test has 102 tokens, so the reference does not exist yet
    options = ("--max-tokens", 102, "--policies", "local", "--budgets", 64, "--json")
    done = run_kvtool("compare", folder / "tide.txt", "-m", model, "-t", 1, *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["perplexity"] > 1
    assert (record["kl"], record["top1"], record["nll_minus_full"]) == (None, None, None)
    assert "logits has no room for the full cache's predictions, so KL, top-1 and " in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="limits of Unix")
def test_a_reference_that_cannot_be_written_is_named(compare):
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    # no other test has 103 tokens, so the reference does not exist yet
    options = ("--max-tokens", 103, "--policies", "full,local", "--budgets", 64)
    done = compare(*options, check=False, preexec_fn=full)
    assert done.returncode == 1
    assert re.search(r"full: failed: cannot write \S+/logits/\S+: File too large", done.stderr)


def test_an_interrupt_before_the_first_result_names_no_file(tmp_path):
    assert output.stopped(tmp_path / "out.jsonl", 0, 2, "runs") == "stopped; 0 of 2 runs are done"
    assert "--records FILE" in output.stopped(None, 0, 2, "runs")


@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_finished_runs_and_names_the_records_file(
    model, folder, environment, tmp_path, number
):
    blocking, out = BlockingPolicy(tmp_path, "self.budget == 65"), tmp_path / "out.jsonl"
    command = ["compare", "tide.txt", "-m", str(model), "-t", "1", "--records", str(out)]
    command += ["--policies", str(blocking.policy), "--budgets", "64,65,66"]
    with fork_server.Popen(
        [*KVTOOL, *command],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        blocking.wait()
        process.send_signal(number)
        stderr_lines = iter(process.stderr.readline, "stopping after the current step ...\n")
        assert "" not in stderr_lines
        blocking.go()
        lines = process.stderr.read().splitlines()
        assert process.wait(TIMEOUT_S) == 128 + number
    assert lines[-1] == f"kvtool: stopped; 1 of 3 runs are in {out}; --resume does the rest"
    assert [record["budget"] for record in read(out)] == [64]


def run(label, budget=None, kind="f16"):
    options = ScoreOptions(policy=label.split(":")[0], type_k=kind, type_v=kind)
    return Run(label, options, None, None, {}, budget, 64)


def row(label, budget=None, kind="f16", **values):
    record = {
        "cells": 64.0,
        "n_scored": 8191,
        "perplexity": 30.0,
        "perplexity_low": 28.0,
        "perplexity_high": 32.0,
        "nll": 3.4,
        "kl": 0.5,
        "top1": 0.75,
        "tokens_per_s": 100.0,
        "kv_bytes": 64 * 2**20,
        "budget_bytes": 2**20,
    }
    for name in ("nll_minus_full", "nll_minus_best"):
        record |= {name: 0.25, f"{name}_margin": 0.1}
    return run(label, budget, kind), record | values


ROWS = [
    row("full", kl=0.0, top1=1.0, nll_minus_best=None, nll_minus_best_margin=None),
    row("full", kind="q4_0", kl=0.04, budget_bytes=2**18),
    row("scissorhands", "64", kl=0.9, nll_minus_full=-0.25, nll_minus_full_margin=0.251),
    row("h2o:decay=0.999", "64", perplexity=25.0, top1=0.8, nll_minus_full_margin=None),
    row("h2o", "128", tokens_per_s=50.0, budget_bytes=2**21),
    (run("buzz", "128"), {"error": "no"}),
]


def table_text(rows=ROWS, width=110, **console):
    out = io.StringIO()
    printer = table_console(**({"file": out, "width": width, "_environ": {}} | console))
    compare_table.show(printer, rows, "wiki.test.raw", "SmolLM2-135M-Instruct.Q4_1")
    return out.getvalue()


def line_of(out, label):
    return next(line for line in out.splitlines() if line.startswith(label))


def test_table_shows_a_dash_if_a_perplexity_has_no_interval():
    out = table_text([row("h2o", 32, perplexity_low=None, perplexity_high=None)])
    assert " 30.00 - " in line_of(out, "h2o")


def test_table_marks_the_best_run_of_each_budget():
    out = table_text()
    assert "25.00 (28.00-32.00)*" in line_of(out, "h2o:decay")
    assert "0.5000*  80.0%*" in line_of(out, "h2o:decay")
    assert "*" not in line_of(out, "scissorhands")
    # this run is the only run with its budget, so it is not marked as the best
    assert "*" not in line_of(out, "h2o  ")
    # equal values of a column are not marked
    assert "64.0 MiB*" not in out
    in_colour = table_text(force_terminal=True, color_system="256")
    assert "*" not in in_colour
    assert "bold: best of its budget" in in_colour
    assert re.search(r"\x1b\[1m *25\.00", in_colour)


def test_differences_are_shown_with_their_margin():
    out = table_text()
    assert " -0.250 +-0.251 " in line_of(out, "scissorhands")
    assert " +0.250 +-? " in line_of(out, "h2o:decay")
    assert " +0.250 +-0.100 " in line_of(out, "full q4_0")
    in_colour = table_text(force_terminal=True, color_system="256")
    assert "\x1b[2m-0.250 +-0.251" in in_colour
    assert "\x1b[2m+0.250 +-0.100" not in in_colour


def test_table_groups_runs_by_budget_and_shows_failures_as_dashes():
    lines = [line.split("  ")[0].strip() for line in table_text().splitlines()]
    names = ["no budget", "full", "full q4_0", "budget 64", "scissorhands", "h2o:decay=0.999"]
    names += ["budget 128", "h2o", "buzz"]
    assert [line for line in lines if line in names] == names
    assert re.fullmatch(r"buzz( +-){9} *", line_of(table_text(), "buzz"))


def test_legend_names_the_archives_that_runs_have_in_addition_to_the_cache():
    archived = [row("recall", "64", archive_bytes=176 * 2**10), row("h2o", "64", archive_bytes=0)]
    assert table_text(archived).splitlines()[-1] == "archive, in addition to the cache: recall 176.0 KiB"
    assert "archive" not in table_text()


@pytest.mark.parametrize("width", [80, 110, 120])
def test_table_fits_the_width_of_the_terminal(width):
    out = table_text(width=width, force_terminal=True, color_system=None)
    assert max(map(len, out.splitlines())) <= width
    # no column is cut or wrapped
    assert "\u2026" not in out
    for label in ("full q4_0", "scissorhands", "h2o:decay=0.999"):
        assert len(line_of(out, label).split()) >= 8
    assert ("(28.00-32.00)" in out) == (width > 100)
    assert "*: best of its budget" in out
    assert ("; in parentheses: 95 % interval of the perplexity" in out) == (width > 100)
    # a narrow table shows the allocated bytes, but not the bytes of the budget's cells
    assert ("1.0 MiB  64.0 MiB" in out) == (width == 120)
    assert ("budget: bytes of the budget's cells" in out) == (width == 120)


def test_long_names_are_not_cut_in_a_pipe():
    label = "h2o:decay=0.999:window=16:sinks=4:score=mean:per=layer:group=max:decay_beyond=0.98"
    out = table_text([*ROWS, row(label, "64", kind="q8_0"), (run(f"x{label}", "64"), {"error": "no"})])
    assert line_of(out, f"{label} q8_0 ").split()[-1] == "100"
    assert line_of(out, f"x{label}").split()[1:] == ["-"] * 9
    # one line per run
    assert len(out.splitlines()) == len(table_text().splitlines()) + 2


def test_picture_has_one_line_per_policy(monkeypatch):
    from matplotlib.axes import Axes

    from kvtool.cli.compare import plot as compare_plot

    lines, allocated = {}, []
    plot = Axes.plot

    def record(self, x, y, **style):
        if "label" in style:
            lines[style["label"]] = list(zip(x, y, strict=True))
        else:
            allocated.append((x, y))
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", record)
    data = output.png(compare_plot.picture(ROWS, "wiki.test.raw", "SmolLM2"))
    assert data.startswith(b"\x89PNG")
    # a logarithmic axis cannot show the full cache's KL of 0, so only quantized full caches are drawn
    assert lines["full, quantized"] == [(0.25, 0.04)]
    assert lines["h2o"] == [(2.0, 0.5)]
    # for each run, a line connects the bytes of the budget's cells with the allocated bytes
    assert ((2.0, 64.0), (0.5, 0.5)) in allocated
    assert len(allocated) == 4
    assert set(lines) == {"full, quantized", "scissorhands", "h2o:decay=0.999", "h2o"}
    # a KL of 0 cannot be drawn, so the picture shows the NLL instead
    lines.clear()
    compare_plot.picture([row("h2o", "128", kl=0.0)], "wiki.test.raw", "SmolLM2")
    assert lines["h2o"] == [(1.0, 3.4)]
    # without results there is no legend
    compare_plot.picture(ROWS[-1:], "wiki.test.raw", "SmolLM2")
    for _, values in ROWS:
        values |= {"kl": None} if "kl" in values else {}
    lines.clear()
    compare_plot.picture(ROWS, "wiki.test.raw", "SmolLM2")
    assert lines["h2o"] == [(2.0, 3.4)]


def test_records_path_must_be_a_writable_regular_file(monkeypatch, tmp_path):
    (tmp_path / "out.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    assert output.records_path(tmp_path / "link.jsonl", False) == tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="not a regular file"):
        output.records_path(Path(os.devnull), True)
    for locked in (tmp_path / "out.jsonl", tmp_path):
        monkeypatch.setattr(os, "access", lambda path, mode, locked=locked: path != locked)
        for file in ("out.jsonl", "new.jsonl") if locked == tmp_path else ("out.jsonl",):
            with pytest.raises(UsageError, match="no permission"):
                output.records_path(tmp_path / file, True)


def test_picture_name_must_end_in_png_or_have_no_ending():
    for name in ("out.png", "out.PNG", "out"):
        output.check_picture(Path(name))
    with pytest.raises(UsageError, match=r"end its name in .png, not in .svg"):
        output.check_picture(Path("out.svg"))


def test_without_matplotlib_a_picture_is_refused_at_the_start(monkeypatch, tmp_path):
    output.check_picture(tmp_path / "out.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install '.*\[plot\]'"):
        output.check_picture(tmp_path / "out.png")
