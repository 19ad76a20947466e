"""Texts, names and streams that are not UTF-8, and empty prompts. Each causes at most one message line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from kvtool.chats import session
from kvtool.errors import UsageError
from kvtool.system.texts import json_text, shown, utf8
from tests import fork_server
from tests.cli.in_process_command import drop_cut_lines

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bytes as arguments, as Unix has them")

CAFE = b"caf\xe9"
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LOCALES = {"UTF-8": {"PYTHONUTF8": "1"}, "ascii": ASCII, "latin-1 streams": {"PYTHONIOENCODING": "latin-1"}}


def kvtool(*arguments, stdin=b"", env=None, **kwargs):
    command = [sys.executable, "-m", "kvtool", *arguments]
    return drop_cut_lines(
        fork_server.run(command, input=stdin, env=os.environ | (env or {}), text=False, **kwargs)
    )


CHAT = ("chat", "--policy", "h2o", "-n", 2, "-t", 1)


def one_line(done, code):
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(b"kvtool: ")
    return line.decode("ascii", "replace")


@pytest.fixture(params=LOCALES.values(), ids=LOCALES.keys())
def env(request):
    return request.param


@pytest.mark.parametrize("typed", ["generate -p", "generate -p hi --system", "chat --system"])
def test_an_option_that_is_not_utf8_is_a_usage_error(env, typed):
    done = kvtool(*typed.split(), CAFE, env=env)
    assert f"the text of {typed.split()[-1]} is not UTF-8" in one_line(done, 2)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "-p", "hi", "-m", CAFE),
        ("generate", "-p", "hi", "--policy", CAFE),
        ("generate", "-p", "hi", "--policy", CAFE + b".py"),
        ("generate", "-p", "hi", "-o", CAFE + b"=1"),
        ("generate", "-p", "hi", "--budget", CAFE),
        ("generate", "-p", "hi", "-ctk", CAFE),
        ("generate", "-p", "hi", "--rpc", CAFE),
        ("chat", "--session", CAFE + b"/x"),
        ("perplexity", CAFE),
        ("inspect", CAFE),
        ("inspect", "x", "--html", CAFE + b"/x"),
        ("compare", CAFE),
        ("eval", CAFE),
        ("session", "show", CAFE),
        ("session", "export", "--json", CAFE),
        ("models", "show", CAFE),
        ("models", "pull", CAFE),
        ("policies", CAFE),
        ("worker", CAFE),
    ],
    ids=lambda command: " ".join(str(part) for part in command if part != CAFE),
)
def test_names_that_are_not_utf8_cause_no_traceback(command):
    done = kvtool(*command, env=ASCII)
    assert done.returncode in (2, 3, 5, 9), done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 4


def test_a_turn_that_is_not_utf8_ends_a_pipe_with_one_line(env, talker):
    done = kvtool(*CHAT, "-m", talker, stdin=b"hello\n" + CAFE + b"\n", env=env)
    assert "stdin is not UTF-8 (line 2, byte 3)" in one_line(done, 5)
    # the first line was answered
    assert done.stdout.count(b"\n") == 1


def test_a_pipe_is_utf8_whatever_the_locale_is(env, talker):
    stdin = "\ufeffna\u00efve \u4e16\r\n".encode()
    with tempfile.TemporaryDirectory() as folder:
        session_path = Path(folder) / "chat.kv"
        done = kvtool(*CHAT, "-m", talker, "--session", session_path, stdin=stdin, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        assert session.read_meta(session_path)["messages"][0]["content"] == "na\u00efve \u4e16"


def test_characters_that_stdout_cannot_encode_become_question_marks(env, talker):
    # the model's tokens are single bytes of these characters
    grammar = 'root ::= "\u4f60\u597d\uff0c\u4e16\u754c\u3002"'
    arguments = ("generate", "--raw", "-n", 20, "-t", 1, "-m", talker, "--grammar", grammar)
    done = kvtool(*arguments, stdin=b"Hello.", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    text = json.loads(kvtool(*arguments, "--json", stdin=b"Hello.", env=env).stdout)["text"]
    assert text == "\u4f60\u597d\uff0c\u4e16\u754c\u3002"
    assert done.stdout.decode("utf-8").rstrip("\n") in (text, text.encode("ascii", "replace").decode())


@pytest.mark.parametrize("arguments", [("policies",), ("eval", "--help"), ("models", "list"), ("doctor",)])
def test_tables_can_be_printed_to_an_ascii_stdout(arguments):
    done = kvtool(*arguments, env={"PYTHONIOENCODING": "ascii"})
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 1)


def test_model_and_session_names_may_be_non_utf8(talker, tmp_path, env):
    folder = os.fsencode(tmp_path)
    model, session_path = folder + b"/" + CAFE + b"[bold].gguf", folder + b"/" + CAFE + b"[/bold].kv"
    os.makedirs(os.path.dirname(session_path))
    shutil.copy(talker, model)
    for line in (b"one\n", b"two\n"):
        done = kvtool(*CHAT, "-m", model, "--session", session_path, stdin=line, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
    shown_ = json.loads(kvtool("session", "show", "--json", session_path, env=env).stdout)
    assert shown_["turns"] == 2
    assert shown_["model"].endswith("/caf\ufffd[bold].gguf")
    assert b"[bold].gguf" in kvtool("session", "show", session_path, env=env).stdout
    generated = kvtool("generate", "-m", model, "-p", "hi", "-n", 2, "-t", 1, "--json", env=env)
    assert json.loads(generated.stdout)["model"].endswith("/caf\ufffd[bold].gguf")


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (["-p", ""], b"", 2),
        (["-p", " \n\t"], b"", 2),
        (["--raw", "-p", ""], b"", 2),
        (["--raw", "-p", ""], b"\n\n", 2),
        (["-p", "", "--system", "Be brief."], b"", 2),
        ([], b"", 5),
        ([], b"\n\n", 5),
        (["--raw"], b"\n", 5),
        ([], b"  \n ", 5),
    ],
)
def test_an_empty_prompt_is_refused(arguments, stdin, code):
    words = {2: "the prompt is empty", 5: "there is nothing to read"}[code]
    assert words in one_line(kvtool("generate", *arguments, stdin=stdin), code)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"one\0two\n", "is binary; it must be a text"),
        ("\ufeffone".encode("utf-16-le"), "is UTF-16, not UTF-8; "),
    ],
)
@pytest.mark.parametrize("command", [("generate",), ("generate", "-f", "-"), ("perplexity",)])
def test_commands_refuse_stdin_that_is_not_text_with_the_same_words(command, data, words):
    assert f"kvtool: stdin {words}" in one_line(kvtool(*command, stdin=data), 5)


def test_uncaught_unicode_error_gets_one_line():
    code = (
        "from kvtool.cli import generate\n"
        "def read(): raise UnicodeDecodeError('utf-8', b'\\xe9', 0, 1, 'invalid')\n"
        "generate.read_stdin = read\n"
        "from kvtool.__main__ import main; main()"
    )
    done = fork_server.run_python("-c", code, "generate", text=False)
    assert "a text is not UTF-8" in one_line(done, 5)


def test_raw_prompt_may_be_a_single_blank(talker):
    done = kvtool("generate", "--raw", "-p", " ", "-n", 2, "--temp", 0, "-t", 1, "-m", talker)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_option_in_an_ascii_locale_is_read_as_utf8():
    assert utf8("-p", "na\udcc3\udcafve") == "na\u00efve"
    assert utf8("-p", "\u4e16") == "\u4e16"
    assert utf8("-p", None) is None
    with pytest.raises(UsageError, match="-p is not UTF-8"):
        utf8("-p", "caf\udce9")


def test_json_text_replaces_lone_surrogates():
    value = {"caf\udce9": ["caf\udce9", ("na\u00efve", 1, None)], "\U0001f600": 1.5}
    text = json_text(value)
    assert text.isascii()
    assert json.loads(text) == {"caf\ufffd": ["caf\ufffd", ["na\u00efve", 1, None]], "\U0001f600": 1.5}
    assert "\\ud83d\\ude00" in text
    assert shown("caf\udce9") == "caf\ufffd"
