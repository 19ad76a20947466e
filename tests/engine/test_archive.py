"""The archive in the command line: its options, its messages, and how a session saves it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pytest

from kvtool import Engine, Settings, load_model, load_policy, open_run
from kvtool.config import archive, sizes
from kvtool.config.report import archive_limit
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.llama.libllama import devices
from kvtool.measure import perplexity
from kvtool.options import declared
from kvtool.system import memory
from kvtool.units import format_bytes, parse_bytes
from tests import tiny_kinds
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import RECALL_LINE, assert_one_line, drop_cut_lines, run_kvtool
from tests.cli.terminal import terminals
from tests.cli.test_chat_session import TURNS
from tests.cli.test_cli import kvtool
from tests.serve.subprocess_server import start_server

RECALL = ["--policy", "recall", "--budget", "96", "--temp", "0"]


@pytest.fixture
def talk(chat_model, tmp_path):
    """talk(turns, *options) chats in the session chat.kvs and returns the result. Replies have 12 tokens."""

    def run(turns, *options, **kwargs):
        defaults = ["-m", chat_model, "-n", 12, "-t", 1, "--session", tmp_path / "chat.kvs"]
        command = ["chat", *defaults, *options]
        typed = "".join(f"{turn}\n" for turn in turns)
        return drop_cut_lines((kvtool if kwargs else run_kvtool)(*command, stdin=typed, **kwargs))

    return run


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("20000", {"archive": 20000}),
        (" 7 ", {"archive": 7}),
        # a limit in tokens is accepted even if it exceeds any memory
        ("9" * 15, {"archive": 10**15 - 1}),
        ("2MiB", {"archive_bytes": 2**21}),
        ("0.000001TiB", {"archive_bytes": 1099511}),
        ("1KB", {"archive_bytes": 1000}),
    ],
)
def test_archive_limit_is_read_as_tokens_or_bytes(text, settings):
    assert archive.limit(text) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"tokens \(20000\) or bytes \(2GiB\), got ''"),
        ("1.5", "got '1.5'"),
        ("-1", "got '-1'"),
        ("10%", "got '10%'"),
        ("9" * 5000, "tokens"),
        ("0", "0 is too small; give at least 1 token, or choose the policy streamingllm"),
        ("0GiB", "0GiB is too small; give at least 1 token"),
        ("2TiB", r"2TiB is more than this machine's memory \(1.0 TiB\)"),
    ],
)
def test_invalid_archive_limits_are_refused(monkeypatch, text, words):
    monkeypatch.setattr(memory, "total_bytes", lambda: 2**40)
    with pytest.raises(UsageError, match=words):
        archive.limit(text)


def test_session_does_not_continue_if_the_archive_is_too_small(talk, tmp_path):
    assert talk(TURNS[:4], *RECALL, "--archive", 5000).returncode == 0
    path = tmp_path / "chat.kvs"
    before = path.read_bytes()
    done = talk(TURNS[4:5], "--archive", 9)
    assert done.returncode == 9
    n = int(done.stderr.split("--archive ")[1].split()[0])
    assert n > 100
    assert done.stderr == (
        f"kvtool: {path} has {n} archived tokens, and this chat's archive takes 9; "
        f"start the chat with --archive {n} or more\n"
    )
    assert talk(TURNS[4:5], "--archive", n - 1).returncode == 9
    assert path.read_bytes() == before
    assert talk(TURNS[4:5], "--archive", n).returncode == 0


@pytest.mark.parametrize(
    "table", [None, np.zeros(3), np.zeros(2, np.int64), np.zeros((3, 3), np.int64)], ids=str
)
def test_invalid_archive_tables_count_as_zero_tokens(table):
    assert Archive.n_saved({} if table is None else {"archive": table}) == 0
    assert Archive.n_saved({"archive": np.array([3, 10, 0])}) == 7


def test_inspect_counts_archived_and_forgotten_tokens_separately(chat_model):
    # without --policy, inspect uses recall, the default policy of chats
    options = ["-m", chat_model, "-t", 1, "--budget", 32, "--evict-every", 8, "--archive", 20]
    result = json.loads(run_kvtool("inspect", *options, "--json", stdin="word " * 20).stdout)
    assert (result["tokens"], result["archived"], result["share"].count(0)) == (100, 20, 72)
    assert result["forgotten"] == 52
    assert result["archive_bytes"] > 0
    output = run_kvtool("inspect", *options, stdin="word " * 20).stdout
    assert "100 tokens: 28 held by every row, 0 by some, 20 archived, 52 forgotten\npolicy recall, " in output


def test_session_show_prints_the_size_of_the_archive(talk, tmp_path):
    path = tmp_path / "chat.kvs"
    assert talk(TURNS[:4], *RECALL).returncode == 0
    summary = json.loads(run_kvtool("session", "show", "--json", path).stdout)
    # all tokens but sinks and window are archived
    assert 0 < summary["tokens"] - summary["archived"] < 96
    assert summary["archive_bytes"] > 0
    lines = dict(line.split(None, 1) for line in run_kvtool("session", "show", path).stdout.splitlines())
    assert (
        lines["archive"].strip()
        == f"{summary['archived']:,} tokens, {format_bytes(summary['archive_bytes'])}"
    )
    path.unlink()
    assert talk(TURNS[:1], "--policy", "h2o", "--budget", 96).returncode == 0
    assert "archive" not in run_kvtool("session", "show", path).stdout


def test_generate_reports_the_archive(chat_model):
    options = ["-m", chat_model, "-t", 1, "-n", 2, "--temp", 0, *RECALL, "--archive", 100]
    result = json.loads(run_kvtool("generate", *options, "--json", stdin="word " * 60).stdout)
    assert (result["archived"], result["archive_limit"]) == (100, 100)
    stderr = run_kvtool("generate", *options, "-v", stdin="word " * 60).stderr
    assert re.search(r"tokens in .*, archive 100 of at most 100 tokens, [0-9.]+ KiB of host memory\n", stderr)
    without = run_kvtool(
        "generate", *options[:6], "--policy", "h2o", "--budget", 96, "-v", stdin="word " * 60
    )
    assert "archive" not in re.search("\nread .* tokens in .*", without.stderr)[0]


def test_pipe_reports_the_first_loss_of_a_full_archive_once(chat_model, talk):
    lost = "the archive is full (30 tokens): from now on, the oldest tokens are forgotten; a larger --archive"
    done = talk(TURNS[:4], *RECALL, "--archive", 30, "-v")
    assert done.stderr.count(lost) == 1
    assert re.search(
        r"\n[0-9,]+ tokens, [1-9][0-9,]* forgotten.*, archive 30 of at most 30 tokens", done.stderr
    )
    assert "the archive is full" not in talk(TURNS[:1], *RECALL, "--archive", 500).stderr
    options = ["-m", chat_model, "-t", 1, "-n", 60, "--temp", 0, *RECALL, "--archive", 30, "-v"]
    done = drop_cut_lines(run_kvtool("generate", *options, stdin="word " * 18))
    assert done.stderr.count(lost) == 1
    assert re.search(r"\nread .* [1-9][0-9]* tokens forgotten, ", done.stderr)
    # before a long prompt is read, another line says that its oldest tokens are forgotten
    done = run_kvtool("generate", *options, stdin="word " * 90)
    assert "are forgotten (--archive sets that)" in done.stderr
    assert "the archive is full" not in done.stderr


@pytest.mark.parametrize(
    ("write", "options", "reason"),
    [
        (tiny_kinds.write_refact, [], "in this model (ALiBi)"),
        (None, ["--positions", "in-cache"], "with --positions in-cache"),
        (None, ["--prefill", "whole"], None),
        (None, [], None),
    ],
)
def test_generate_falls_back_to_h2o_where_recall_does_not_work(tiny_model, tmp_path, write, options, reason):
    model = tmp_path / "kind.gguf" if write else tiny_model()
    if write:
        write(model)
    command = ["generate", "--raw", "-m", model, "-n", 1, "-t", 1, "--budget", 96, "--json", *options]
    done = run_kvtool(*command, stdin="word " * 150)
    result = json.loads(done.stdout)
    message = f"recall does not work {reason}; the policy is h2o\n"
    assert (result["policy"], message in done.stderr) == (("h2o", True) if reason else ("recall", False))
    assert bool(result["archived"]) == (reason is None)
    # a policy that the user asked for is never replaced: with recall or one of its options, the command fails
    of_recall = ["--policy", "recall"], ["-o", "chunk=1"], ["--archive", 10], ["--prefill", "exact"]
    for typed in of_recall if reason else ():
        refused_done = run_kvtool(*command, *typed, stdin="word " * 150)
        assert (refused_done.returncode, refused_done.stdout) == (2, "")
        assert re.fullmatch(r"kvtool: Recall [^\n]*; choose [^\n]*\n", refused_done.stderr)


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--positions", "in-cache"], "with --positions in-cache"), (["--prefill", "whole"], None), ([], None)],
)
def test_chat_and_serve_fall_back_to_h2o_where_recall_does_not_work(
    talk, chat_model, tmp_path, options, reason
):
    done = talk(TURNS[:2], *options, "-v")
    first, *_, last = done.stderr.splitlines(keepends=True)
    pattern = f"recall does not work {reason}; the policy is h2o\n" if reason else RECALL_LINE
    assert re.fullmatch(pattern, first)
    # recall has 512 cells by default. h2o has 1,024, but the trained context limits them to 512
    assert "/512 cells per row" in last
    assert ("archive" in last) == (reason is None)
    summary = json.loads(run_kvtool("session", "show", "--json", tmp_path / "chat.kvs").stdout)
    assert summary["policy"] == ("h2o" if reason else "recall")
    # a continued session keeps its policy
    resumed = talk(TURNS[2:3], *options)
    assert (resumed.returncode, "recall does not work" in resumed.stderr) == (0, False)
    with start_server(chat_model, *options) as server:
        assert re.fullmatch(
            pattern.replace(r"\)\n", r"\) for each of 2 parallel requests\n"), server.lines[0]
        )
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            assert http.get("/props").json()["policy"] == summary["policy"]
            answer = http.post("/v1/completions", json={"prompt": "Hello.", "max_tokens": 2}).json()
        assert answer["kvtool"]["policy"] == summary["policy"]


def test_chat_prints_the_size_limit_of_its_archive_at_its_start(talk, tmp_path, monkeypatch):
    file = tmp_path / "file"
    stderr = talk(TURNS[:1], "--archive-file", file).stderr
    assert re.fullmatch(
        RECALL_LINE.replace("in host memory", rf"on disk \({file}\), with an index in host memory,"), stderr
    )
    (tmp_path / "chat.kvs").unlink()
    # with --explain, the size of the archive is printed in another line
    assert "text that leaves" not in talk(TURNS[:1], "--explain").stderr
    (tmp_path / "chat.kvs").unlink()
    assert talk(TURNS[:1], "--policy", "h2o").stderr == ""
    (tmp_path / "chat.kvs").unlink()
    monkeypatch.setenv("KVTOOL_CHAT_POLICY", "h2o")
    assert talk(TURNS[:1]).stderr == ""


def test_default_archive_limit_is_a_quarter_of_memory_or_half_of_the_disk(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtool.llama.cache.archive.free_bytes", lambda: 2**30)
    monkeypatch.setattr("kvtool.llama.cache.archive.free_disk_bytes", lambda file: 2**32)
    for file, most in ((None, 2**28), (str(tmp_path / "file"), 2**31)):
        run = RunOptions(model=str(tiny_model()), archive_file=file, threads=1)
        with open_run(run) as opened:
            limit = opened.engine.context.archive
            assert most - limit.slab_bytes < limit.max_bytes <= most


def test_too_little_free_memory_or_disk_space_for_an_archive_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtool.llama.cache.archive.free_bytes", lambda: 2**12)
    monkeypatch.setattr("kvtool.llama.cache.archive.free_disk_bytes", lambda file: 2**11)
    file = str(tmp_path / "file")
    for place, start, end in (
        (None, "a quarter of the free memory", "free some memory, or choose a file with --archive-file"),
        (file, f"half of the free space on the disk of {file}", "free some space, or choose .* another disk"),
    ):
        run = RunOptions(model=str(tiny_model()), archive_file=place, threads=1)
        words = rf"^{start} is too small for the archive: .* at least two steps \([0-9]+ KiB\); {end}$"
        with pytest.raises(UsageError, match=words), open_run(run):
            pass
    # a limit in tokens does not depend on the free space
    with open_run(RunOptions(model=str(tiny_model()), archive="20000", threads=1)) as opened:
        assert opened.engine.context.archive.n_max == 20000


def test_few_archived_tokens_may_take_two_steps_as_the_help_says(tiny_model):
    with open_run(RunOptions(model=str(tiny_model()), archive="100", threads=1)) as opened:
        limit = opened.engine.context.archive
        assert limit.max_bytes == 2 * limit.slab_bytes
        assert f" grows in steps of {limit.n_block} tokens" in declared(RunOptions)["archive"].help


def test_policy_of_a_session_or_settings_file_is_never_replaced(talk, tiny_model, tmp_path, monkeypatch):
    # the policy of a session is never replaced
    assert talk(TURNS[:1], *RECALL).returncode == 0
    refused_done = talk(TURNS[1:2], "--positions", "in-cache")
    assert (refused_done.returncode, refused_done.stdout) == (2, "")
    assert re.fullmatch(r"kvtool: Recall needs the distances of the text; [^\n]*\n", refused_done.stderr)
    # the policy of a settings file is never replaced
    (tmp_path / "config.toml").write_text('policy = "recall"\n')
    monkeypatch.setenv("KVTOOL_CONFIG", str(tmp_path / "config.toml"))
    done = run_kvtool("generate", "-m", tiny_model(), "--raw", "--positions", "in-cache", stdin="word " * 9)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Recall needs the distances of the text" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="terminals of Unix")
def test_chat_shows_archived_and_forgotten_tokens(chat_model):
    with terminals(chat_model, "-n", 4, *RECALL, "--archive", 30) as start:
        chat = start()
        greeting = chat.text.removesuffix("\n> ")
        assert re.search(
            r"\nchat with policy recall, a cache of 96 tokens; trained for 512 tokens\n"
            r"text that leaves the cache is kept in host memory and still used: up to [0-9.]+ KiB "
            r"\(30 tokens\)\n"
            r"/help shows help, Ctrl-D leaves\n$",
            greeting,
        )
        full = "the archive is full (30 tokens): from now on, the oldest tokens are forgotten; a larger"
        outputs = [chat.say(f"{'word ' * 20}{i}") for i in range(10)]
        # the line is shown once, after the first turn with which tokens are forgotten
        first = next(i for i, text in enumerate(outputs) if " 0 % forgotten" not in text)
        assert [full in text for text in outputs] == [i == first for i in range(10)]
        stats = chat.say("/stats")
        assert re.search(
            r"in the cache +\d+ tokens per row and \d+ places for archived text, at most 96", stats
        )
        assert re.search(r"archived +30 of at most 30 tokens, [0-9.]+ .iB of host memory", stats)
        (forgotten,) = re.findall(r"forgotten +([0-9,]+) tokens", stats)
        assert f"30 archived, {forgotten} forgotten" in chat.say("/cells").replace("\n", "")
        # a new system prompt empties the archive, so it is accepted even if the archive is full
        assert "started over under the new system prompt" in chat.say("/system Be brief.")
        # the archive has room again, so the loss is reported again
        assert full in chat.say("word " * 20)
        assert full not in chat.say("word " * 20)
    with terminals(chat_model, "-n", 4, "--policy", "h2o", "--budget", 96) as start:
        assert "\ntext that leaves the cache is forgotten\n" in start().text
    with terminals(chat_model, "-n", 4, "--policy", "full") as start:
        assert "text that leaves the cache" not in start().text


@pytest.mark.parametrize(
    ("archive_type", "sizes", "gpu", "options", "expected"),
    [
        ("auto", (64, 64), False, {}, "iq4_nl"),
        ("auto", (64, 64), True, {}, "q8_0"),
        ("auto", (64, 64), True, {"gpu_layers": 0}, "iq4_nl"),
        ("auto", (64, 64), True, {"rpc": "there:50052"}, "iq4_nl"),
        ("auto", (64, 64), False, {"prefill": "exact"}, "q8_0"),
        ("auto", (80, 64), True, {}, "f16"),
        ("auto", (64, 80), False, {}, "f16"),
        ("f32", (80, 80), True, {}, "f32"),
    ],
)
def test_archive_type_depends_on_model_and_device(monkeypatch, archive_type, sizes, gpu, options, expected):
    monkeypatch.setattr(devices, "has_gpu", lambda: gpu)
    info = SimpleNamespace(head_size_k=sizes[0], head_size_v=sizes[1])
    run = RunOptions(archive_type=archive_type, **options)
    assert archive.with_type(run, info).archive_type == expected


def test_python_and_perplexity_have_the_same_default_archive_type(chat_model, tmp_path):
    (tmp_path / "text").write_text("word " * 60)
    options = ("-m", chat_model, "-t", 1, "--policy", "recall", "--budget", 48, "--json")
    result = json.loads(run_kvtool("perplexity", tmp_path / "text", *options).stdout)
    settings = Settings(n_batch=64, n_output=64, over_budget=False, n_threads=1)
    with (
        closing(load_model(chat_model)) as model,
        closing(Engine(model, load_policy("recall", 48), settings)) as engine,
    ):
        nll = perplexity.stream(engine, model.tokenize("word " * 60))
        assert engine.n_archived == result["archived"] > 0
        assert engine.settings.archive_type == result["archive_type"]
    assert nll.mean() == pytest.approx(result["nll"])


def test_limit_of_the_archive_is_not_above_the_longest_stream(chat_model):
    with open_run(RunOptions(model=str(chat_model), budget=48, n_ctx=96, threads=1)) as opened:
        tokens = [archive_limit(opened.engine, 2, n).rpartition("(")[2] for n in (None, 96)]
        assert int(tokens[0].partition(" ")[0].replace(",", "")) > 96
        assert tokens[1] == "96 tokens) for each of 2 parallel requests"
        # the budget holds the whole stream
        assert archive_limit(opened.engine, 2, 48) is None


def test_compare_applies_archive_options_to_policies_with_an_archive(chat_model, tmp_path):
    (tmp_path / "text").write_text("word " * 60)
    options = ["-m", chat_model, "-t", 1, "--budgets", 48, "--types", "f16", "--json"]
    args = ["--policies", "recall,h2o", "--archive", 50, "--archive-type", "f16"]
    done = run_kvtool("compare", tmp_path / "text", *options, *args)
    recall, h2o = map(json.loads, done.stdout.splitlines())
    assert (recall["archived"], recall["archive"], recall["archive_type"]) == (50, {"archive": 50}, "f16")
    assert (h2o["archived"], h2o["archive_bytes"], h2o["archive"], h2o["archive_type"]) == (0, 0, None, None)
    done = run_kvtool("compare", tmp_path / "text", *options, "--policies", "recall")
    assert json.loads(done.stdout)["archive_type"] == "iq4_nl"
    for wrong, words in (
        (["--policies", "h2o,tova", "--archive", 50], "`h2o`, `tova` have no archive; leave out --archive"),
        (["--archive-type", "q9"], "--archive-type must be one of"),
        (["--archive", ""], "--archive is a number of tokens"),
    ):
        assert_one_line(run_kvtool("compare", tmp_path / "text", *options, *wrong), 2, words)


def test_eval_runs_again_with_another_archive_limit(chat_model, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["-m", chat_model, "-t", 1, "--budget", 48, "--records", out, "--resume", "--limit", 1]
    options += ["--set", "lengths=450", "--set", "repeats=1", "--raw"]
    for arguments, n in (
        (["--policy", "recall"], 1),
        (["--policy", "recall", "--archive", 50], 2),
        (["--policy", "recall", "--archive", "50"], 2),
        (["--policy", "h2o"], 3),
    ):
        done = run_kvtool("eval", "passkey", *options, *arguments)
        assert done.returncode == 0, done.stderr
        assert len(out.read_text().splitlines()) == n


def wrong_files(folder):
    """Paths that --archive-file refuses, and the message for each."""
    (folder / "there").write_text("mine")
    (folder / "link").symlink_to("nowhere")
    return {
        folder: "is a folder",
        folder / "there": "exists already",
        folder / "link": "exists already",
        folder / "no" / "file": f"cannot be created: there is no folder {folder / 'no'}",
        folder / "there" / "file": f"cannot be created: there is no folder {folder / 'there'}",
    }


@pytest.mark.parametrize("command", ["chat", "generate", "perplexity", "inspect", "compare", "eval"])
def test_invalid_archive_files_are_refused_with_one_line(command, tmp_path):
    (tmp_path / "text").write_text("word " * 60)
    argument = {"eval": ["passkey"], "perplexity": ["-"], "inspect": ["-"], "compare": ["-"]}.get(command, [])
    for path, reason in wrong_files(tmp_path).items():
        policy = ["--policies" if command == "compare" else "--policy", "recall"]
        done = run_kvtool(command, *argument, *policy, "--archive-file", path, stdin="word " * 60)
        assert done.stderr == f"kvtool: --archive-file {str(path)!r} {reason}; name a new file\n"
        assert (done.returncode, done.stdout) == (2, "")
    assert (tmp_path / "there").read_text() == "mine"
    done = run_kvtool(command, *argument, "--archive-file", "", stdin="word " * 60)
    assert (done.returncode, done.stderr) == (2, "kvtool: the archive-file's name is empty; name a file\n")


def test_archive_file_in_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        UsageError, match=f"cannot be created: no permission to write to {tmp_path}; name a new"
    ):
        sizes.check_archive_file(str(tmp_path / "file"))


def test_archive_file_is_refused_on_windows(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(UsageError, match="^--archive-file does not work on Windows yet; leave it out$"):
        sizes.check_archive_file("file")


def test_limit_of_an_archive_file_is_compared_with_free_disk_space(monkeypatch, tmp_path):
    file = str(tmp_path / "file")
    monkeypatch.setattr(memory, "total_bytes", lambda: 2**20)
    monkeypatch.setattr("kvtool.system.files.free_disk_bytes", lambda path: 2**30 if path == file else 0)
    assert archive.limit("2MiB", file) == {"archive_bytes": 2**21}
    with pytest.raises(UsageError, match=f"2GiB is more than the disk of {file} has free \\(1.0 GiB\\)"):
        archive.limit("2GiB", file)


def test_commands_report_the_archive_file(chat_model, tmp_path):
    path = tmp_path / "file"
    options = ["-m", chat_model, "-t", 1, "--archive-file", path]
    words = {"stdin": "word " * 100}
    generate = [*options, "-n", 2, *RECALL]
    done = run_kvtool("generate", *generate, "--json", **words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["archive_file"] == str(path)
    # the default limit is half of the disk's free space
    free = shutil.disk_usage(tmp_path).free
    assert 0.4 * free < result["archive_limit"] / result["archived"] * result["archive_bytes"]
    stderr = run_kvtool("generate", *generate, "-v", "--explain", **words).stderr
    # the tolerance is wide, because other programs may write to this disk meanwhile
    (limit,) = re.findall(rf" tokens \((\S+ .iB) as \S+\) in {path}\n", stderr)
    assert parse_bytes(limit.replace(" ", "")) == pytest.approx(free / 2, rel=0.5)
    assert f"the others go to {path} and are still used" in stderr
    assert re.search(
        rf", archive [0-9]+ of at most [0-9,]+ tokens, [0-9.]+ .iB on disk \({path}\), with an index in",
        stderr,
    )
    for command in ("perplexity", "inspect"):
        done = run_kvtool(command, "-", *options, *RECALL[:-2], "--json", **words)
        assert json.loads(done.stdout)["archive_file"] == str(path)
    runs = ["--policies", "recall,h2o", "--budgets", "48,64", "--types", "f16", "--json"]
    done = run_kvtool("compare", "-", *options, *runs, **words)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["archive_file"] for run in results] == [str(path), None] * 2
    ask = ["--raw", "--limit", 2, "--set", "lengths=450", "--set", "repeats=1", "--budget", 48]
    done = run_kvtool("eval", "passkey", *options, *ask, "--policy", "recall")
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []


def test_chat_with_a_full_disk_keeps_its_last_complete_turn(talk, tmp_path):
    path, file = tmp_path / "chat.kvs", tmp_path / "file"
    options = [*RECALL, "--archive-type", "f32", "--archive-file", file]
    assert talk(TURNS[:4], *options).returncode == 0
    before = path.read_bytes(), (tmp_path / "chat.kvs.archive").read_bytes()
    assert b"archive_file" not in before[0]
    limit = max(map(len, before)) + 4096
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    done = talk(TURNS[4:], "--archive-file", file, preexec_fn=full)
    assert done.returncode == 6
    assert done.stderr.splitlines()[-1].startswith(
        "kvtool: no room for the archive on the disk: File too large; choose a smaller --archive"
    )
    assert (path.read_bytes(), (tmp_path / "chat.kvs.archive").read_bytes()) == before
    assert sorted(os.listdir(tmp_path)) == ["chat.kvs", "chat.kvs.archive"]
    # the chat continues with an archive in host memory
    assert talk(TURNS[4:5]).returncode == 0


def test_killed_process_leaves_no_archive_file(chat_model, tmp_path):
    with terminals(chat_model, "-n", 4, *RECALL, "--archive-file", tmp_path / "file") as start:
        chat = start()
        assert f" on disk ({tmp_path / 'file'})" in chat.text.replace("\n", "")
        chat.say("word " * 60)
        assert f"on disk ({tmp_path / 'file'})" in chat.say("/stats").replace("\n", "")
        assert os.listdir(tmp_path) == []
    assert os.listdir(tmp_path) == []
