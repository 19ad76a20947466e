"""The archive as a user meets it: its flags, what is said of it, and what a session keeps of it."""

from __future__ import annotations

import pytest

from kvtool.cli import opening
from kvtool.errors import UsageError
from kvtool.system import memory
from tests.test_cli import kvtool


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
    assert opening.archive_of(text) == settings


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
        opening.archive_of(text)


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
