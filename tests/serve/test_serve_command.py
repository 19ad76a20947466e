"""Tests of kvtool serve: limits of answers, files of chats, refused requests, missing packages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import fork_server, tiny
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import run_kvtool
from tests.fork_server import ROOT
from tests.serve.client_packages import openai
from tests.serve.http_requests import message, request
from tests.serve.subprocess_server import ONE_THREAD, start_server

pytestmark = pytest.mark.engine


def test_answer_ends_when_the_cache_or_context_is_full(chat_model, connect):
    with start_server(chat_model, "--policy", "full", "-c", "96", "--temp", "0") as server:
        client = connect(f"{server.url}/v1")
        answer = client.chat.completions.create(
            model="chat", messages=[message("user", "Hello.")], logit_bias={"2": -100}
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content
        assert answer.usage.total_tokens == 96
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="chat", messages=[message("user", "Hello. " * 50)])
        assert raised.value.body["n_prompt_tokens"] > 300
        assert raised.value.body["n_ctx"] == 96
    # with --overflow error, an answer ends at 96 tokens, although the policy could evict tokens and continue
    with start_server(
        chat_model, "--budget", "64", "-c", "96", "--overflow", "error", "--temp", "0"
    ) as server:
        assert any("and still used: up to " in line and " (96 tokens) for " in line for line in server.lines)
        client = connect(f"{server.url}/v1")
        answer = client.completions.create(model="chat", prompt="Hello.", logit_bias={"2": -100}, echo=True)
        assert answer.choices[0].text.startswith("Hello.")
        assert answer.usage.total_tokens == 96
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="chat", prompt="Hello. " * 50)
        assert raised.value.body["type"] == "exceed_context_size_error"


def test_changed_chat_longer_than_the_context_is_refused(chat_model):
    options = ("--policy", "h2o", "--budget", "128", "-c", "512", "--overflow", "error", "--temp", "0")
    with start_server(chat_model, *options) as server:
        chat = [message("user", "A tide. " * 20)]
        for text in ("A wave. " * 30, "A wave. " * 28 + "A boat. " * 30):
            status, answer = request(server.url, {"messages": chat, "max_tokens": 4})
            assert status == 200
            reply = chat[1] if len(chat) > 1 else answer["choices"][0]["message"]
            chat = [chat[0], reply, message("user", text)]
        # the cache is rewound to a checkpoint, and the tokens after the checkpoint are read again
        status, answer = request(server.url, {"messages": chat, "max_tokens": 4})
        assert (status, answer["error"]["type"]) == (400, "exceed_context_size_error")
        assert answer["error"]["n_prompt_tokens"] > 512


def test_echoed_text_has_no_bos_that_the_client_did_not_send(tmp_path, connect):
    path = tmp_path / "bos.gguf"
    tiny.write_llama(path, add_bos=True)
    with start_server(path, "--budget", "64", "--temp", "0") as server:
        client = connect(f"{server.url}/v1")
        for prompt, start in (("Hello.", "Hello."), ([1, 75, 108], "<s>Hi")):
            answer = client.completions.create(model="bos", prompt=prompt, max_tokens=2, echo=True)
            assert answer.choices[0].text.startswith(start)
        assert answer.usage.prompt_tokens == 3


def test_stored_chats_are_sessions_of_kvtool_chat(chat_model, tmp_path, connect):
    chats, other = tmp_path / "chats", tmp_path / "file"
    other.write_text("x")
    options = ("-m", str(chat_model), "--budget", "64", "--temp", "0")
    with start_server(chat_model, *options[2:], "-v", "--sessions", str(chats)) as server:
        client = connect(f"{server.url}/v1")
        first = client.chat.completions.create(
            model="chat",
            messages=[message("system", "Be kind."), message("user", "What is a lamp?")],
            max_tokens=8,
        )
        code, stderr = server.stop()
    n = first.usage.prompt_tokens
    assert re.match(
        rf"\S+ \S+ 127\.0\.0\.1 POST /v1/chat/completions 200 \d+ ms, {n} tokens \(0 cached\) read in "
        r"[\d.]+ s, 8 written in [\d.]+ s \(length\)\n",
        stderr,
    )
    (file,) = chats.glob("*.kv")

    def kvtool(*arguments, typed=""):
        command = [sys.executable, "-m", "kvtool", *map(str, arguments)]
        return fork_server.run(command, input=typed, env=os.environ | ONE_THREAD)

    done = kvtool("session", "show", "--json", file)
    assert done.returncode == 0, done.stderr
    done = json.loads(done.stdout)
    assert (done["tokens"], done["system"]) == (first.usage.total_tokens, "Be kind.")
    went_on = kvtool("chat", "-t", "1", "--session", file, "-n", "4", typed="And a candle?\n")
    assert went_on.returncode == 0, went_on.stderr
    assert went_on.stdout
    # a server keeps files that it cannot continue, and reports how many there are
    with start_server(chat_model, "--budget", "48", "--sessions", str(chats)) as server:
        pass
    assert any(line.endswith(f" in {chats}: 1; they stay\n") for line in server.lines)
    assert file.exists()
    refused_done = kvtool("serve", *options, "--sessions", other)
    assert refused_done.stderr == f"kvtool: {other} is not a folder; name another one\n"
    # The pinned text does not fit. recall would archive it, but h2o must refuse it.
    long = kvtool("serve", *options, "--policy", "h2o", "--port", "0", "--system", "It is long. " * 30)
    assert (long.returncode, long.stderr.count("\n")) == (2, 1)
    assert "the pinned text has" in long.stderr


def test_missing_packages_are_named_with_the_install_command(tmp_path):
    def served():
        return fork_server.run_python(
            "-m",
            "kvtool",
            "serve",
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )

    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError(name='starlette')")
    done = served()
    assert done.returncode == 4
    assert done.stderr == f"kvtool: starlette is missing; install it: pip install '{ROOT}[serve]'\n"

    # A missing llama.cpp is reported before the server's missing packages, which are of no use without it.
    (tmp_path / "kvtool_llama.py").write_text("raise ModuleNotFoundError(name='kvtool_llama')")
    assert "there is no llama.cpp yet; build it" in served().stderr


def test_serve_has_no_stop_loops_option():
    # no API has a finish reason for a loop
    assert "--stop-loops" not in run_kvtool("serve", "--help").stdout
    assert "--stop-loops" in run_kvtool("generate", "--help").stdout


def test_chat_and_server_cannot_use_the_same_session(talker, tmp_path, connect):
    def command(path):
        call = [sys.executable, "-m", "kvtool", "chat", "-m", str(talker), "-t", "1", "--budget", "256"]
        return [*call, "-n", "4", "--temp", "0", "--session", str(path)]

    def chat(path, typed="Hello\n"):
        return fork_server.run(command(path), input=typed)

    options = ("--budget", "256", "--temp", "0", "--sessions", str(tmp_path))
    with start_server(talker, *options) as server:
        connect(f"{server.url}/v1").chat.completions.create(
            model="talker", messages=[message("user", "What is a lamp?")], max_tokens=4
        )
        (path,) = tmp_path.glob("*.kv")
        before = path.read_bytes()
        done = chat(path)
        assert (done.returncode, done.stdout) == (9, "")
        assert f"in use by the server that runs with --sessions {tmp_path}; end that server" in done.stderr
        assert path.read_bytes() == before
        # `kvtool chat` can use a session that the server did not store
        assert chat(tmp_path / "mine.kv").returncode == 0
        server.stop(signal.SIGKILL)
    chatting = fork_server.Popen(command(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        chatting.stdin.write(b"Hello\n")
        chatting.stdin.flush()
        assert chatting.stdout.readline()
        raises_in_use = pytest.raises(AssertionError, match=f"{path.name} is in use by a chat; end that chat")
        with raises_in_use, start_server(talker, *options):
            pass
    finally:
        chatting.communicate(timeout=TIMEOUT_S)
    with start_server(talker, *options):
        pass
