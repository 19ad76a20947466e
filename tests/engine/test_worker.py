"""Workers: what --rpc finds at an endpoint, chats over two workers, and what happens when one is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtool.chats import session
from kvtool.errors import LibraryError, UsageError
from kvtool.llama.libllama import endpoints
from lab.benchmarks.servers import reserved_port
from tests import fork_server, tiny
from tests.blocking_policy import TIMEOUT_S, until
from tests.cli.in_process_command import CUT_LINE, RECALL_LINE, run_kvtool
from tests.cli.test_cli import KVTOOL, TEXT, kvtool
from tests.engine.rpc_server import skip_without_rpc

EXACT = ["--temp", "0", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
TURNS = ["line one of the chat, and some more words", "line two, with other ones"]
ROOT = Path(__file__).parents[2]


# devices of an endpoint


@contextmanager
def answering(answer):
    """Yield the endpoint of a server that sends these bytes and then waits.

    If `answer` is None, the server closes the connection instead.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = []

        def take():
            connection = listener.accept()[0]
            if answer is None:
                # read the request first. Otherwise closing the connection would reset it
                connection.recv(100)
                connection.close()
            else:
                connection.sendall(answer)
                connections.append(connection)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(TIMEOUT_S)
        for connection in connections:
            connection.close()


def hello(major, minor):
    return struct.pack("<Q4B24x", 28, major, minor, 0, 0)


def test_worker_with_the_same_protocol_is_accepted():
    with answering(hello(*endpoints.PROTOCOL)) as endpoint, endpoints.reached([endpoint]) as addresses:
        assert addresses == [endpoint]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "does not answer; it serves one client at a time"),
        (hello(7, 0)[:9], "does not answer"),
        (hello(6, 0), "speaks version 6.0 of ggml's RPC protocol, this llama.cpp 7.0"),
        (hello(7, 1), "speaks version 7.1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a worker"),
        (None, "is not a worker, or its llama.cpp has another version"),
    ],
)
def test_servers_that_are_no_usable_worker_are_refused(answer, words, monkeypatch):
    # only the tests of silent workers have a short time limit. Other workers may be slow to answer
    monkeypatch.setattr(endpoints, "ANSWER_S", 0.3 if "does not answer" in words else TIMEOUT_S)
    with answering(answer) as endpoint:
        with pytest.raises(LibraryError, match=words) as raised, endpoints.reached([endpoint]):
            pass
        assert endpoint in str(raised.value)


def test_unused_port_error_says_how_to_start_a_worker():
    with reserved_port() as port:
        words = f"kvtool worker --host 127.0.0.1 --port {port}"
        with pytest.raises(LibraryError, match=words), endpoints.reached([f"127.0.0.1:{port}"]):
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no worker"),
        (" , ", "names no worker"),
        ("somewhere", "a worker is host:port"),
        (":50052", "a worker is host:port, host:50052 for example"),
        ("here:", "a worker is host:port, here:50052 for example"),
        ("here:0", "a worker is host:port"),
        ("here:65536", "a worker is host:port"),
        ("here:\u00b2", "a worker is host:port"),
        ("[::1]:50052", "IPv4 only"),
        ("::1:50052", "IPv4 only"),
    ],
)
def test_invalid_endpoints_are_refused(text, words):
    with pytest.raises(UsageError, match=words):
        endpoints.parse(text)


def test_endpoints_are_separated_by_commas():
    assert endpoints.parse("a:1, 10.0.0.2:50052,") == ["a:1", "10.0.0.2:50052"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["127.0.0.1:1", "127.0.0.1:1"], "127.0.0.1:1 names a worker a second time"),
        (["127.0.0.1:1", "localhost:1"], "localhost:1 names a worker a second time"),
        (["no-such-host.invalid:1"], "no-such-host.invalid cannot be resolved"),
    ],
)
def test_duplicate_and_unknown_hosts_are_refused_before_connecting(named, words):
    with pytest.raises(UsageError, match=words), endpoints.reached(named):
        pass


@pytest.mark.parametrize("command", ["chat", "generate", "perplexity", "compare", "eval", "inspect"])
def test_every_command_that_runs_a_model_takes_workers(command):
    assert "--rpc HOST:PORT,..." in run_kvtool(command, "--help").stdout


# workers


class Worker:
    """A running `kvtool worker`.

    stderr_lines: the lines that it has printed on stderr so far.
    """

    def __init__(self, port, *options, host="127.0.0.1"):
        self.port = port
        self.endpoint = f"127.0.0.1:{self.port}"
        self.stderr_lines = []
        command = [*KVTOOL, "worker", "--host", host, "--port", str(self.port), "-t", "1", *options]
        pipe = subprocess.PIPE
        self.process = fork_server.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with self.process.stderr as lines:
            self.stderr_lines.extend(line.rstrip("\n") for line in lines)

    def serves(self):
        until(lambda: any("serving" in line for line in self.stderr_lines) or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr_lines
        return self

    def end(self, number=signal.SIGTERM):
        """Send a signal; return (exit code, stdout, stderr)."""
        self.process.send_signal(number)
        code = self.process.wait(TIMEOUT_S)
        self._thread.join(TIMEOUT_S)
        with self.process.stdout as out:
            return code, out.read(), "\n".join(self.stderr_lines)


@contextmanager
def working(*options):
    """Start a worker on a reserved port, wait until it serves, and yield it."""
    skip_without_rpc()
    with reserved_port() as port:
        worker = Worker(port, *options)
        try:
            yield worker.serves()
        finally:
            worker.end()


@pytest.fixture(scope="module")
def workers():
    """Two workers that offer the same amount of memory."""
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2)]
        started = [Worker(port, "--mem", "64MiB") for port in ports]
        # a test replaces an element of `started`, so the lambda reads the list only after the tests
        stack.callback(lambda: [worker.end() for worker in started])
        for worker in started:
            worker.serves()
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with enough layers for two devices."""
    path = tmp_path_factory.mktemp("model") / "chat.gguf"
    tiny.write_llama(path, n_layer=4, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=2048)
    return path


def rpc_of(workers):
    return ["--rpc", ",".join(worker.endpoint for worker in workers)]


def test_worker_prints_its_device_and_address(workers):
    (line,) = workers[0].stderr_lines
    assert re.fullmatch(
        rf"kvtool: serving CPU \(.+, 64\.0 MiB\) on {workers[0].endpoint}, .* Ctrl-C ends it", line
    )


def test_worker_speaks_the_protocol_of_the_library(workers):
    host, port = workers[0].endpoint.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        assert endpoints._greet(connection) == endpoints.PROTOCOL


def test_worker_reports_the_memory_set_by_mem(workers):
    get_device_memory = 11
    host, port = workers[0].endpoint.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        endpoints._greet(connection)
        connection.sendall(struct.pack("<BQI", get_device_memory, 4, 0))
        size, free, total = struct.unpack("<QQQ", endpoints._receive(connection, 24))
    assert (size, free, total) == (16, 64 * 2**20, 64 * 2**20)


def test_busy_worker_is_reported_after_the_time_limit(workers, monkeypatch):
    monkeypatch.setattr(endpoints, "ANSWER_S", 0.5)
    named = [workers[0].endpoint]
    with socket.create_connection(named[0].split(":"), timeout=TIMEOUT_S) as connection:
        endpoints._greet(connection)
        with pytest.raises(LibraryError, match="may be serving another"), endpoints.reached(named):
            pass


def test_used_port_is_refused_with_one_line(workers):
    done = kvtool("worker", "--port", workers[0].port)
    message = f"kvtool: cannot listen on {workers[0].endpoint}: the port is in use, maybe by another kvtool;"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{message} choose another --port\n"


@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_public_worker_warns_and_ends_on_a_signal(number, code):
    with reserved_port() as port:
        worker = Worker(port, host="0.0.0.0").serves()
        exit_code, out, stderr = worker.end(number)
    assert (exit_code, out) == (code, "")
    assert "there is no authentication" in stderr
    assert stderr.endswith("kvtool: stopped")


# chats


def chat(model, path, turns, policy, *options):
    command = ["chat", "-m", model, "--session", path, "--policy", policy, "--budget", 96, *EXACT]
    return kvtool(*command, *options, stdin="".join(f"{turn}\n" for turn in turns))


def session_parts(path):
    """Return the parts of a session that must be equal in two sessions of the same chat."""
    meta, _ = session.read(path)
    return {name: meta[name] for name in ("n_turn", "n_past", "cells", "messages")}


@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
@pytest.mark.parametrize("policy", ["h2o", "recall"])
def test_killed_worker_loses_only_the_current_reply(workers, model, tmp_path, policy):
    long = ["-n", "200"]
    local, remote = tmp_path / "here.kvs", tmp_path / "there.kvs"
    whole = chat(model, local, TURNS, policy, *long)
    assert whole.returncode == 0
    start = RECALL_LINE if policy == "recall" else ""
    assert re.fullmatch(start, whole.stderr)

    command = [*KVTOOL, "chat", "-m", model, "--session", remote, "--policy", policy, "--budget", "96"]
    pipe = subprocess.PIPE
    process = fork_server.Popen(
        [*command, *EXACT, *long, *rpc_of(workers)], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe
    )
    out = []
    reader = threading.Thread(target=lambda: out.extend(iter(lambda: process.stdout.read1(), b"")))
    with process:
        reader.start()
        process.stdin.write(TURNS[0].encode() + b"\n")
        process.stdin.flush()
        # the session is saved before the end of the turn is printed
        until(lambda: (remote.exists() and remote.stat().st_size) or process.poll() is not None)
        before = len(b"".join(out))
        process.stdin.write(TURNS[1].encode() + b"\n")
        process.stdin.flush()
        until(lambda: len(b"".join(out)) > before + 8 or process.poll() is not None)
        workers[1].end(signal.SIGKILL)
        stderr = process.stderr.read().decode()
        assert process.wait(TIMEOUT_S) == 4, stderr
        reader.join()
    (line,) = re.sub(f"{start}{CUT_LINE}", "", stderr).strip().split("\n")
    names = f"{workers[0].endpoint}, {workers[1].endpoint}"
    assert line.startswith(f"kvtool: one of {names} does not answer; restart it, then repeat this command")
    assert session_parts(remote)["n_turn"] == 1

    done = chat(model, remote, TURNS[1:], policy, *long, *rpc_of(workers))
    assert done.returncode == 4
    assert f"no worker answers at {workers[1].endpoint}; start one there" in done.stderr

    workers[1] = Worker(workers[1].port, "--mem", "64MiB").serves()
    resumed = chat(model, remote, TURNS[1:], policy, *long, *rpc_of(workers), "-vv")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert session_parts(remote) == session_parts(local)
    assert session_parts(local)["n_past"] > 400
    # both workers hold keys and values
    both = {f"RPC0[{worker.endpoint}]" for worker in workers}
    assert set(re.findall(r"(RPC\S+) KV buffer size", resumed.stderr)) == both


def test_compare_over_two_workers_gives_the_local_results(workers, model, tmp_path):
    (tmp_path / "tide.txt").write_text(TEXT)
    options = ["--policies", "full,snapkv", "--budgets", "48", "--types", "f16", "--max-tokens", "120"]
    results = []
    for more in ([], [*rpc_of(workers), "-vv"]):
        command = ["compare", tmp_path / "tide.txt", "-m", model, "-t", 1, "-fa", "off", *options, *more]
        done = kvtool(*command, "--json")
        assert done.returncode == 0, done.stderr
        assert (f"RPC0[{workers[1].endpoint}] KV buffer" in done.stderr) == bool(more)
        results.append([json.loads(line) for line in done.stdout.splitlines()])
    for local, remote in zip(*results, strict=True):
        assert (local["rpc"], remote["rpc"]) == ([], [worker.endpoint for worker in workers])
        assert remote["nll"] == pytest.approx(local["nll"], abs=1e-4)
        assert remote["kl"] == pytest.approx(local["kl"], abs=1e-4)
