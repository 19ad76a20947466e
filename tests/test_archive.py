"""The archive as a user meets it: its flags, what is said of it, and what a session keeps of it."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
import tiny

from kvtool.cli.archive import archive_of
from kvtool.errors import UsageError
from kvtool.llama.archive import Archive
from kvtool.system import memory
from tests.terminal import Terminal
from tests.test_chat_session import TEMPLATE, TURNS
from tests.test_cli import kvtool

RECALL = ["--policy", "recall", "--budget", "96", "--temp", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "chat.gguf"
    tiny.write_llama(path, chat_template=TEMPLATE, n_ctx_train=512)
    return path


@pytest.fixture
def talk(model, tmp_path):
    """talk(turns, *options): a chat of 12 tokens a reply, kept in chat.kvs."""

    def run(turns, *options):
        own = ["-m", model, "-n", 12, "-t", 1, "--session", tmp_path / "chat.kvs"]
        return kvtool("chat", *own, *options, stdin="".join(f"{turn}\n" for turn in turns))

    return run


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("20000", {"archive": 20000}),
        (" 7 ", {"archive": 7}),
        # more tokens than any memory holds: a cap
        ("9" * 15, {"archive": 10**15 - 1}),
        ("2MiB", {"archive_bytes": 2**21}),
        ("0.000001TiB", {"archive_bytes": 1099511}),
        ("1KB", {"archive_bytes": 1000}),
    ],
)
def test_an_archive_is_tokens_or_bytes(text, settings):
    assert archive_of(text) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"tokens \(20000\) or bytes \(2GiB\), got ''"),
        ("1.5", "got '1.5'"),
        ("-1", "got '-1'"),
        ("10%", "got '10%'"),
        ("9" * 5000, "tokens"),
        ("0", "0 holds no token; give at least 1, or choose --policy streamingllm"),
        ("0GiB", "0GiB holds no token"),
        ("2TiB", r"2TiB is more than this machine's memory \(1.0 TiB\)"),
    ],
)
def test_what_is_no_archive_is_refused(monkeypatch, text, words):
    monkeypatch.setattr(memory, "total_bytes", lambda: 2**40)
    with pytest.raises(UsageError, match=words):
        archive_of(text)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("generate", ["--archive", "2GiB"], "`h2o` has no archive; leave out --archive, or choose"),
        ("perplexity", ["-", "--archive-type", "q8_0"], "`h2o` has no archive; leave out --archive-type, or"),
        ("chat", ["--policy", "full", "--archive", "9"], "`full` has no archive; leave out --archive, or"),
        (
            "inspect",
            ["--policy", "tova", "--archive-type", "f16", "--archive", "9"],
            "`tova` has no archive; leave out --archive and --archive-type, or choose --policy recall",
        ),
    ],
)
def test_a_policy_without_an_archive_takes_no_flag_of_it(command, arguments, words):
    done = kvtool(command, *arguments, stdin="a text")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.engine
def test_a_session_is_not_continued_with_an_archive_that_is_too_small(talk, tmp_path):
    assert talk(TURNS[:4], *RECALL, "--archive", 5000).returncode == 0
    path = tmp_path / "chat.kvs"
    before = path.read_bytes()
    refused = talk(TURNS[4:5], "--archive", 9)
    assert refused.returncode == 9
    n = int(refused.stderr.split("--archive ")[1].split()[0])
    assert n > 100
    assert refused.stderr == (
        f"kvtool: {path} has {n} archived tokens, and this chat's archive takes 9; "
        f"start the chat with --archive {n} or more\n"
    )
    assert talk(TURNS[4:5], "--archive", n - 1).returncode == 9
    assert path.read_bytes() == before
    assert talk(TURNS[4:5], "--archive", n).returncode == 0


@pytest.mark.parametrize(
    "table", [None, np.zeros(3), np.zeros(2, np.int64), np.zeros((3, 3), np.int64)], ids=str
)
def test_what_is_no_table_of_an_archive_has_no_tokens(table):
    assert Archive.n_saved({} if table is None else {"archive": table}) == 0
    assert Archive.n_saved({"archive": np.array([3, 10, 0])}) == 7


@pytest.mark.engine
def test_inspect_says_what_is_archived_apart_from_what_is_forgotten(model):
    own = ["-m", model, "-t", 1, "--policy", "recall", "--budget", 32, "--evict-every", 8, "--archive", 20]
    result = json.loads(kvtool("inspect", *own, "--json", stdin="word " * 20).stdout)
    assert (result["tokens"], result["archived"], result["share"].count(0)) == (100, 20, 80)
    assert result["forgotten"] == 60
    assert result["archive_bytes"] > 0
    shown = kvtool("inspect", *own, stdin="word " * 20).stdout
    assert "100 tokens: 20 held by every row, 0 by some, 20 archived, 60 forgotten" in shown


@pytest.mark.engine
def test_a_session_says_how_much_it_has_archived(talk, tmp_path):
    path = tmp_path / "chat.kvs"
    assert talk(TURNS[:4], *RECALL).returncode == 0
    shown = json.loads(kvtool("session", "show", "--json", path).stdout)
    # all that was read, less sinks and window
    assert 0 < shown["tokens"] - shown["archived"] < 96
    assert shown["archive_bytes"] > 0
    lines = dict(line.split(None, 1) for line in kvtool("session", "show", path).stdout.splitlines()[:-1])
    assert lines["archived"] == str(shown["archived"])
    assert lines["archive_bytes"].endswith("iB")
    path.unlink()
    assert talk(TURNS[:1], "--budget", 96).returncode == 0
    assert "archive" not in kvtool("session", "show", path).stdout


@pytest.mark.engine
def test_generate_says_what_is_archived(model):
    own = ["-m", model, "-t", 1, "-n", 2, "--temp", 0, *RECALL, "--archive", 100]
    result = json.loads(kvtool("generate", *own, "--json", stdin="word " * 60).stdout)
    assert (result["archived"], result["archive_limit"]) == (100, 100)
    said = kvtool("generate", *own, "-v", stdin="word " * 60).stderr
    assert re.search(r"tokens in .*, archive 100 of at most 100 tokens, [0-9.]+ KiB of host memory\n", said)
    without = kvtool("generate", *own[:6], "--budget", 96, "-v", stdin="word " * 60)
    assert "archive" not in re.search("\nread .* tokens in .*", without.stderr)[0]


@pytest.mark.engine
@pytest.mark.skipif(os.name != "posix", reason="terminals of Unix")
def test_a_chat_says_what_is_archived(model):
    chat = Terminal(model, "-n", 4, *RECALL, "--archive", 30)
    try:
        assert "96 cells, an archive of at most 30 tokens, /help" in chat.wait_for("\n> ")
        chat.say("word " * 60)
        stats = chat.say("/stats")
        assert re.search(r"archive +30 of at most 30 tokens, [0-9.]+ .iB of host memory", stats)
        (forgotten,) = re.findall(r"forgotten +(\d+) tokens", stats)
        assert f"30 archived, {forgotten} forgotten" in chat.say("/cells").replace("\n", "")
    finally:
        chat.kill()
        os.close(chat.master)


@pytest.mark.engine
def test_compare_takes_an_archive_for_the_policies_that_have_one(model, tmp_path):
    (tmp_path / "text").write_text("word " * 60)
    own = ["-m", model, "-t", 1, "--budgets", 48, "--types", "f16", "--json", "-"]
    args = ["--policies", "recall,h2o", "--archive", 50, "--archive-type", "f16"]
    done = kvtool("compare", tmp_path / "text", *own, *args)
    recall, h2o = map(json.loads, done.stdout.splitlines())
    assert (recall["archived"], recall["archive"], recall["archive_type"]) == (50, {"archive": 50}, "f16")
    assert (h2o["archived"], h2o["archive_bytes"], h2o["archive"], h2o["archive_type"]) == (0, 0, None, None)
    for wrong, words in (
        (["--policies", "h2o,tova", "--archive", 50], "`h2o`, `tova` have no archive; leave out --archive"),
        (["--archive-type", "q9"], "--archive-type must be one of"),
        (["--archive", ""], "--archive is a number of tokens"),
    ):
        refused = kvtool("compare", tmp_path / "text", *own, *wrong)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.engine
def test_an_evaluation_with_another_archive_is_another_one(model, tmp_path):
    out = tmp_path / "out.jsonl"
    own = ["-m", model, "-t", 1, "--budget", 48, "--json", out, "--resume", "--limit", 1]
    own += ["--set", "lengths=450", "--set", "repeats=1", "--raw"]
    for arguments, n in (
        (["--policy", "recall"], 1),
        (["--policy", "recall", "--archive", 50], 2),
        (["--policy", "recall", "--archive", "50"], 2),
        (["--policy", "h2o"], 3),
    ):
        done = kvtool("eval", "passkey", *own, *arguments)
        assert done.returncode == 0, done.stderr
        assert len(out.read_text().splitlines()) == n
