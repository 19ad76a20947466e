"""Commands stream texts from files, pipes, named pipes and stdin. They read no more than they need."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from select import select
from threading import Thread

import numpy as np
import pytest

from kvtool.cli import texts
from kvtool.cli.texts import first_tokens, source
from kvtool.errors import InputError, UsageError
from kvtool.llama.loaded.model import Model
from kvtool.system import texts as system_texts
from kvtool.system.paths import cache_dir, expanded
from kvtool.system.texts import TextSource
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import RUN
from tests.cli.test_cli import KVTOOL

PROSE = "The tide came in, twice a day; na\u00efve \u4e16\u754c, 12345.\r\n\n\tand went out.  "
KINDS = {
    "prose": PROSE * 400,
    "one word": "tide" * 8000,
    "one letter": "a" * 30_000,
    "blanks": "x" + " " * 30_000,
    "line breaks": "x" + "\n" * 30_000,
    "no blanks": "\u4e16\u754c\u548c\u5e73" * 4000,
    "digits": "0123456789" * 3000,
}
STREAMS = {"perplexity": (), "inspect": (), "compare": ("--policies", "local", "--budgets", 16, "--json")}
SAME = {"tokens", "perplexity", "nll", "n_scored", "text_sha256", "share", "forgotten", "output", "item"}
"""Fields of a result that depend only on the text."""


@pytest.fixture(scope="module")
def models(smollm2, talker):
    """Two models with different kinds of vocabulary: byte-pair encoding and SentencePiece."""
    models_by_kind = {"BPE": Model(smollm2, no_weights=True), "SPM": Model(talker, no_weights=True)}
    yield models_by_kind
    for model in models_by_kind.values():
        model.close()


@pytest.mark.parametrize("vocabulary", ["BPE", "SPM"])
@pytest.mark.parametrize("kind", KINDS)
def test_first_tokens_equal_those_of_the_whole_text(models, tmp_path, monkeypatch, kind, vocabulary):
    # Read one byte at a time. A block of the usual size would hold any of these short texts.
    monkeypatch.setattr(system_texts, "_BLOCK", 1)
    monkeypatch.setattr(texts, "_TOKEN_BYTES", 1)
    model, file = models[vocabulary], tmp_path / "text"
    file.write_bytes(KINDS[kind].encode())
    with closing(source(str(file))) as text:
        whole = first_tokens(model, text, None)
        assert text.is_whole
    for n in (2, 3, 50, 333, 334):
        with closing(source(str(file))) as text:
            assert np.array_equal(first_tokens(model, text, n), whole[:n])


class Endless:
    """A stdin that never ends. Reading more than `most` bytes is an error."""

    def __init__(self, line, most):
        self.line, self.left = line, most
        self.buffer = self

    def isatty(self):
        return False

    def fileno(self):
        raise io.UnsupportedOperation

    def read(self, n=-1):
        assert 0 <= n <= self.left, "more is read than is needed"
        self.left -= n
        return (self.line * (n // len(self.line) + 1))[:n]


def test_first_tokens_reads_only_as_much_as_needed(models, monkeypatch):
    # the first read gets 8 bytes per needed token, and each further read doubles the amount
    monkeypatch.setattr(sys, "stdin", Endless(b"hello\n", 2**17))
    assert len(first_tokens(models["BPE"], source(None), 50)) == 50
    n = 40_000
    monkeypatch.setattr(sys, "stdin", Endless(b"hello, the tide comes in twice a day\r\n", 16 * n))
    assert len(first_tokens(models["BPE"], source("-"), n)) == n


@pytest.mark.parametrize("command", STREAMS)
def test_commands_with_max_tokens_read_only_a_part_of_the_text(
    default_talker, tmp_path, monkeypatch, command
):
    file, read = tmp_path / "text", []
    file.write_text(PROSE * 20_000)
    whole = file.stat().st_size
    monkeypatch.setattr(
        TextSource, "start", lambda self, n=None, start=TextSource.start: read.append(n) or start(self, n)
    )
    done = run_kvtool(command, file, "--max-tokens", 40, "-t", 1, *STREAMS[command])
    assert done.returncode == 0, done.stderr
    assert all(n is not None and n < whole / 4 for n in read)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_text_read_in_parts_equals_the_whole_text(tmp_path, size):
    file = tmp_path / "text"
    file.write_bytes("\ufeffna\u00efve\r\n\u4e16\u754c\r".encode())
    with closing(TextSource(str(file))) as text:
        assert text.start() == text.start() == "na\u00efve\r\n\u4e16\u754c\r"
    expected = "na\u00efve\r\n\u4e16\u754c\r"
    for n in range(0, 40, size):
        with closing(TextSource(str(file))) as text:
            # a part of a text never ends inside a character
            assert expected.startswith(text.start(n))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n \t", "has only white space; it must be a text$"),
        (b"a\0b", "is binary"),
        ("\ufeffabc".encode("utf-16-le"), "is UTF-16, not UTF-8; convert it first"),
        ("\ufeff\u00ef".encode("utf-16-be"), "is UTF-16, not UTF-8; convert it first"),
        (b"abc\xff", r"is not UTF-8 \(byte 3\)"),
        # these faults come after the part of the file that is read first
        (b"a" * 2**16 + b"\xff", r"is not UTF-8 \(byte 65536\)"),
        ("\u00ef".encode() * 2**15 + b"\xc3", r"is not UTF-8 \(byte 65536\)"),
    ],
)
def test_empty_binary_or_non_utf8_files_are_refused(tmp_path, data, words):
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(InputError, match=words), closing(TextSource(str(file))) as text:
        text.start()


def of_text(done):
    """Return the fields of a command's output that depend only on the text."""
    assert done.returncode == 0, done.stderr
    records = [
        {name: value for name, value in json.loads(line).items() if name in SAME}
        for line in done.stdout.splitlines()
    ]
    assert records[0]
    return records


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of Unix")
@pytest.mark.parametrize("command", STREAMS)
def test_file_pipe_and_named_pipe_give_the_same_results(default_talker, tmp_path, command):
    file, fifo = tmp_path / "text", tmp_path / "fifo"
    file.write_text(PROSE * 3)
    os.mkfifo(fifo)
    more = ("--max-tokens", 60, "-t", 1, *STREAMS[command], *["--json"] * (command != "compare"))
    expected = of_text(run_kvtool(command, file, *more))
    assert of_text(run_kvtool(command, *more, stdin=PROSE * 3)) == expected
    assert of_text(run_kvtool(command, "-", *more, stdin=PROSE * 3)) == expected
    writer = Thread(target=fifo.write_text, args=[PROSE * 3])
    writer.start()
    assert of_text(run_kvtool(command, fifo, *more)) == expected
    writer.join()


@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="a name of Linux and macOS")
def test_dev_stdin_and_dev_fd_are_read_like_stdin(talker, tmp_path):
    file = tmp_path / "text"
    file.write_text("Say hello.")

    def read(*words, **kwargs):
        options = ("-n", "1", "-t", "1", "--json", "-m", talker)
        done = fork_server.run([*KVTOOL, "generate", *words, *options], **kwargs)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["prompt_tokens"]

    expected = read("-f", "-", input="Say hello.")
    for name in ("/dev/stdin", "/dev/fd/0"):
        assert read("-f", name, input="Say hello.") == expected
    with file.open() as stdin:
        assert read("-f", "/dev/stdin", stdin=stdin) == expected
    # the file may also be a pipe, like a shell's <(...)
    reader, writer = os.pipe()
    os.write(writer, b"Say hello.")
    os.close(writer)
    assert read("-f", f"/dev/fd/{reader}", pass_fds=[reader], stdin=subprocess.DEVNULL) == expected
    os.close(reader)


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.parametrize("words", [("perplexity",), ("compare",), ("inspect",)])
def test_command_without_a_text_in_a_terminal_gets_one_line(words):
    import pty

    master, slave = pty.openpty()
    done = fork_server.run([*KVTOOL, *words], stdin=slave)
    os.close(master)
    os.close(slave)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "in a pipe" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="waits for a pipe")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("generate", "--raw", "Hello", "-n", 1), "waiting for the end of stdin; `</dev/null` gives none\n"),
        (
            ("generate", "--raw", "-f", "-", "-n", 1),
            "waiting for the end of stdin; `</dev/null` gives none\n",
        ),
        (("perplexity",), "waiting for the end of stdin\n"),
        (("compare", "-", "--policies", "full"), "waiting for the end of stdin\n"),
    ],
)
def test_command_that_waits_for_stdin_says_so(talker, words, line):
    code = f"from kvtool.cli import texts; texts._PATIENCE_S = 0; {RUN}"
    arguments = [sys.executable, "-c", code, *map(str, words), "-m", str(talker), "-t", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with fork_server.Popen(arguments, text=True, **pipes) as process:
        # the text is written only after the line has come
        assert select([process.stderr], [], [], TIMEOUT_S)[0]
        assert process.stderr.readline() == line
        _, errors = process.communicate("Say hello, and say it again.")
    assert process.returncode == 0, errors
    assert "waiting" not in errors


def test_names_that_begin_with_a_tilde_are_names_unless_there_is_such_a_user(tmp_path, monkeypatch, talker):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~text").write_text("hello")
    (tmp_path / "~m.gguf").symlink_to(talker)
    (tmp_path / "~c.toml").write_text("")
    assert system_texts.read_text("~text") == "hello"
    system_texts.check_file("~text")
    done = run_kvtool("models", "pull", "~m.gguf")
    assert (done.returncode, done.stdout, done.stderr) == (0, "~m.gguf\n", "")
    assert run_kvtool("config", "--path", env={"KVTOOL_CONFIG": "~c.toml"}).stdout == "~c.toml\n"
    with pytest.raises(InputError, match="cannot read ~none: No such file"):
        system_texts.read_text("~none")
    monkeypatch.setenv("KVTOOL_CACHE", "~cache")
    assert cache_dir() == tmp_path / "~cache"
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/text") == Path("/home/me/text")


def test_closed_stdin_is_not_read_as_a_pipe(monkeypatch):
    monkeypatch.setattr(texts.sys, "stdin", None)
    with pytest.raises(UsageError, match="name a text file"):
        source(None)
