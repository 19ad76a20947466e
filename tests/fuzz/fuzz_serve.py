"""Send random requests to a server, which must answer, refuse in its API's form, or hang up on broken HTTP.

    python -m tests.fuzz.fuzz_serve --requests 10000 --seed 0
    python -m tests.fuzz.fuzz_serve --api messages
    make fuzz-serve

At the end the server must still give the same answer to a plain chat. It must have written nothing to stderr,
and it must not need more memory or files than in the second quarter of the run. `random_bodies` and
`random_messages` draw the bodies. This file draws the ways to send them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tests import tiny
from tests.blocking_policy import TIMEOUT_S
from tests.fuzz.random_bodies import MESSAGES, PATHS, Bodies
from tests.fuzz.random_messages import MessageBodies
from tests.serve.subprocess_server import start_server

N_THREAD = 4
READ_TIMEOUT_S = 2

N_FILE = 30
"""An idle server has fewer open files than this."""

MAX_GROWTH = 1.25
"""Limit of the memory in the last quarter of a long run, as a multiple of the memory in the second quarter.

The smallest values are compared, because large requests double the server's memory for a short time.
"""

PLAIN = {"messages": [{"role": "user", "content": "What is a stone?"}], "max_tokens": 8, "temperature": 0}

APIS = {"all": Bodies, "messages": MessageBodies}
"""Classes that draw requests. The keys are the values of --api."""

# The statuses that are allowed for a proper and for a broken request. 0: the connection was closed without an
# answer.
PROPER = {200, 400, 404, 405, 408, 413, 429}
BROKEN = {0, 200, 400, 403, 404, 405, 408, 413}


class Answer(NamedTuple):
    """An HTTP answer. Its status is 0 if there was no answer."""

    status: int = 0
    headers: Mapping[str, str] = {}
    body: bytes = b""


class _Incoming(socket.SocketIO):
    """The bytes from a connection. They end if the connection breaks."""

    def readinto(self, buffer):
        with suppress(ConnectionError):
            return super().readinto(buffer)
        return 0


class _Kept(io.BufferedReader):
    """A reader that HTTPResponse cannot close, because further answers may follow."""

    def close(self):
        pass


class Wire:
    """A connection that sends given bytes and parses the answers."""

    def __init__(self, url):
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)
        self._file = _Kept(_Incoming(self._socket, "r"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def send(self, data, *, pause_s=0.0, step=0):
        """Send bytes, in parts of `step` bytes if step is not 0.

        Ignore errors: the server may have hung up.
        """
        with suppress(OSError):
            for offset in range(0, len(data), step or max(len(data), 1)):
                self._socket.sendall(data[offset : offset + step] if step else data)
                if pause_s:
                    time.sleep(pause_s)

    def end(self):
        """Close the sending side of the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def makefile(self, _):
        """Return the file from which HTTPResponse reads."""
        return self._file

    def answer(self, method="GET"):
        response = HTTPResponse(self, method=method)
        try:
            response.begin()
        except RemoteDisconnected:
            return Answer()
        if method == "HEAD":
            return Answer(response.status)
        return Answer(response.status, response.headers, response.read())


def request(path, body, method="POST", headers=(), version="1.1"):
    """Return a well-formed request as bytes."""
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + (body or b"")


def check(answer, allowed, sent):
    """Check the answer to the bytes `sent`. Raises AssertionError with the reason if the answer is wrong."""
    assert answer.status in allowed, f"status {answer.status}: {answer.body[:300]!r}"
    if not answer.headers or answer.body == b"Invalid HTTP request received.":
        return
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        check_stream(answer.body.decode())
    elif kind.startswith("application/json"):
        body = json.loads(answer.body)
        is_message = sent.partition(b" ")[2].startswith(MESSAGES.encode())
        if answer.status != 200:
            check_error(body)
        if is_message:
            kinds = ("message",) if answer.status == 200 else ("error",)
            assert body.get("type") in kinds or body.keys() == {"input_tokens"}, body
            assert answer.headers["request-id"], answer.headers
    else:
        assert answer.status == 200, answer.body[:300]


def check_error(body):
    error = body["error"]
    names = {"message", "type"} if body.get("type") == "error" else {"message", "type", "param", "code"}
    assert names <= error.keys(), error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert error["message"].isprintable(), error


def check_stream(text):
    """Check that a stream ends with its final event, and that each event before it is JSON."""
    events = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    data = [part[part.index("data: ") + 6 :] for part in events]
    if data[-1] == "[DONE]":
        data.pop()
    else:
        kind = json.loads(data[-1])["type"]
        assert kind in ("response.completed", "response.incomplete", "message_stop", "error"), kind
    for record in map(json.loads, data):
        if "error" in record and isinstance(record["error"], dict):
            check_error(record)


class Fuzz:
    """A client that sends one random request, which depends on the seed.

    counts: number of answers for each (kind of request, status).
    """

    def __init__(self, url, seed, drawn=Bodies):
        self.url, self.seed, self.counts = url, seed, Counter()
        self.rng = random.Random(seed)
        self.bodies = drawn(self.rng)

    def go(self):
        kinds = [self.right] * 60 + [self.mutated] * 10 + [self.lengths, self.chunks, self.heads] * 4
        kinds += [self.gone, self.targets, self.pipelined, self.old] * 3 + [self.slow, self.owed, self.noise]
        kind = self.rng.choice(kinds)
        sent = []
        try:
            for i, (answer, allowed) in enumerate(kind(sent)):
                check(answer, allowed, sent[i])
                self.counts[kind.__name__, answer.status] += 1
        except (AssertionError, LookupError, ValueError, OSError, HTTPException) as error:
            data = b"".join(sent)
            what = f"{data[:1500]!r}{f' and {len(data) - 1500} bytes' if len(data) > 1500 else ''}"
            name = f"request {self.seed}, {kind.__name__}"
            raise AssertionError(f"{name}: {type(error).__name__}: {error}\nsent: {what}") from error

    def random_request(self):
        path, body = self.bodies.any()
        return path, body if isinstance(body, bytes) else self.bodies.text(body)

    def ask(self, sent, data, allowed=PROPER, *, ends=False, method="POST", **options):
        sent.append(data)
        start = time.monotonic()
        with Wire(self.url) as wire:
            wire.send(data, **options)
            if ends:
                wire.end()
            # on a busy machine, this client may be so slow that the server closes the connection
            is_slow = time.monotonic() - start > READ_TIMEOUT_S / 2
            yield wire.answer(method), allowed | BROKEN if is_slow else allowed

    # the methods below send requests, each in its own way

    def right(self, sent):
        """Send a body of any kind in well-formed HTTP."""
        path, body = self.random_request()
        name = self.rng.choice(
            [
                *([], [], [], ["X-Session-Id: \u00e9\u00ff x"], [f"X-Session-Id: {'n' * 5000}"]),
                *(["anthropic-version: 2023-06-01", "x-api-key: \u00ff"], [f"anthropic-beta: {'a,' * 5000}"]),
            ]
        )
        step = self.rng.choice([0, 0, 0, 1 + len(body) // 5])
        return self.ask(sent, request(path, body, headers=name), step=step)

    def mutated(self, sent):
        """Change a few bytes of a body."""
        path, body = self.random_request()
        data = bytearray(body[:20_000])
        for _ in range(self.rng.randint(1, 8)):
            offset = self.rng.randint(0, len(data))
            kind = self.rng.randrange(3)
            if kind == 0:
                data[offset : offset + 1] = bytes([self.rng.randrange(256)])
            elif kind == 1:
                del data[offset : offset + self.rng.randint(1, 20)]
            else:
                parts = [b"\xff", b"\0", b"\xed\xa0\x80", b'"', b"{", b"]", b"\\ud800", b"1e999"]
                data[offset:offset] = self.rng.choice(parts)
        return self.ask(sent, request(path, bytes(data)))

    def lengths(self, sent):
        """Send a wrong Content-Length."""
        path, body = self.random_request()
        body = body[:20_000]
        n = len(body)
        length = self.rng.choice([0, n // 2, n + 1, n + 10_000, -1, "x", "", f"{n}, {n}", f"+{n}", "1" * 30])
        data = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n".encode()
        if self.rng.random() < 0.3:
            data += self.rng.choice([b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n"])
        return self.ask(sent, data + b"\r\n" + body, BROKEN, ends=True)

    def chunks(self, sent):
        """Send a body in chunks, which may be cut or malformed."""
        path, body = self.random_request()
        data = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        offset = 0
        while offset < len(body):
            part = body[offset : offset + self.rng.choice([1, 10, 1000, 100_000])][: max(len(body) // 50, 10)]
            data += b"%x\r\n%s\r\n" % (len(part), part)
            offset += len(part)
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.ask(sent, data + b"0\r\n\r\n")
        if kind == 1:
            return self.ask(sent, data[: self.rng.randint(0, len(data))], BROKEN, ends=True)
        wrong = [b"zz\r\n", b"-5\r\n", b"f" * 100 + b"\r\n", b"5;x\r\nab", b"\r\n\r\n", b"1" * 70_000]
        return self.ask(sent, data + self.rng.choice(wrong), BROKEN, ends=True)

    def heads(self, sent):
        """Send a huge or malformed head."""
        line = self.rng.choice(
            [
                b"A: " + b"x" * self.rng.choice([1000, 60_000, 70_000, 1_000_000]),
                b"\r\n".join(b"A%d: x" % i for i in range(self.rng.choice([100, 1000, 10_000]))),
                *(b"A: \0", b"A: \xff\xfe", b"\xc3\xa9: x", b"A", b": x", b"A : x", b"A: x\r\n folded"),
                b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
                *(b"Host: y", b"Expect: 100-continue", b"Authorization: Bearer \xff", b"Origin: null"),
                *(b"Origin: http://localhost:1", b"Accept: x/y", b"Content-Type: image/png"),
                *(b"Content-Encoding: gzip", b"Expect: a cake"),
            ]
        )
        name = self.rng.choice([b"localhost", b"localhost", b"x", b"[", b"\xff", b"a/b?c", b""])
        host = name and b"Host: " + name
        data = b"\r\n".join(each for each in (b"GET /health HTTP/1.1", host, line) if each) + b"\r\n\r\n"
        return self.ask(sent, data, BROKEN, ends=True)

    def targets(self, sent):
        """Use a method or an address that the server does not have."""
        methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "get", "X" * 500, "G\u00e9T"]
        method = self.rng.choice(methods)
        nasty = ["/", "*", "//", "http://evil/health", "/%00", "/%ff%fe", "/../../etc/passwd", "/#x", "x"]
        nasty += ["/ y", "/v1/models/", "/v1/models/%ed%a0%80", "/" + "a" * 5000, "/?" + "a=b&" * 1000]
        path = self.rng.choice([*PATHS, *nasty])
        body = self.rng.choice([None, None, b"{}"])
        data = request(path, body, method, ["Connection: close"])
        return self.ask(sent, data, BROKEN, method=method, ends=True)

    def pipelined(self, sent):
        """Send several requests at once. The server must send as many answers, in the same order."""
        n = self.rng.randint(2, 4)
        data = [request(*self.random_request()) for _ in range(n)]
        sent += data
        with Wire(self.url) as wire:
            wire.send(b"".join(data))
            for _ in range(n):
                answer = wire.answer("POST")
                yield answer, PROPER
                if answer.status in (400, 413) and answer.headers.get("connection") == "close":
                    return

    def old(self, sent):
        """Use an older or a newer version of HTTP."""
        path, body = self.random_request()
        version = self.rng.choice(["1.0", "1.0", "0.9", "2.0", "1.7", "9" * 50, "x"])
        return self.ask(sent, request(path, body, version=version), BROKEN, ends=version != "1.0")

    def slow(self, sent):
        """Send a few bytes at a time."""
        data = request(self.rng.choice(PATHS), json.dumps(PLAIN).encode(), headers=["Connection: close"])
        return self.ask(sent, data, step=7, pause_s=0.002)

    def owed(self, sent):
        """Send a request without its end. The server must stop waiting after READ_TIMEOUT_S."""
        path, body = self.random_request()
        data = request(path, body)
        return self.ask(sent, data[: self.rng.randint(0, len(data) - 1)], {0, 408})

    def gone(self, sent):
        """Disconnect at any time."""
        path, body = self.random_request()
        sent.append(request(path, body))
        with Wire(self.url) as wire:
            wire.send(sent[0])
            time.sleep(self.rng.choice([0, 0, 0.005, 0.05]))
        yield Answer(), {0}

    def noise(self, sent):
        """Send bytes that are not HTTP."""
        begins = [b"", b"\r\n" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
        data = self.rng.choice(begins)
        return self.ask(sent, data + self.rng.randbytes(self.rng.randrange(300)), BROKEN, ends=True)


def memory_and_files(process):
    """Return (memory in MiB, number of open files) of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20, len(os.listdir(f"/proc/{process.pid}/fd"))


def plain(url):
    with Wire(url) as wire:
        wire.send(request("/v1/chat/completions", json.dumps(PLAIN).encode()))
        answer = wire.answer("POST")
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"][0]["message"]["content"]


def run(model, n, seed=0, *, api="all", every=0, options=()):
    """Send n random requests. Return (counts, least, n_file).

    counts: number of answers for each (kind of request, status).
    least: the server's smallest memory in each quarter of the run, in MiB.
    n_file: number of the server's open files at the end.
    api: a key of APIS.
    every: number of requests after which the server's memory and files are printed; 0 for never.
    Raises AssertionError for the first wrong answer.
    """
    counts, numbers, least = Counter(), iter(range(n)), [float("inf")] * 4
    lock = threading.Lock()
    limits = ("--budget", "64", "-n", "8", "--read-timeout", str(READ_TIMEOUT_S), "--sessions-bytes", "4MiB")
    with start_server(model, *limits, "--temp", "0", "--metrics", *options) as server:
        before = plain(server.url)

        def work(_):
            while True:
                with lock:
                    i = next(numbers, None)
                if i is None:
                    return
                # each request has its own seed, so it can be sent again
                fuzz = Fuzz(server.url, seed + i, APIS[api])
                fuzz.go()
                with lock:
                    counts.update(fuzz.counts)
                if i % 50 == 0:
                    now = plain(server.url)
                    assert now == before, f"request {seed + i}: a plain chat is answered otherwise"
                memory, files = memory_and_files(server.process)
                least[4 * i // n] = min(least[4 * i // n], memory)
                if every and i % every == 0:
                    print(f"{i}: {memory:.0f} MiB, {files} files", flush=True)

        try:
            with ThreadPoolExecutor(N_THREAD) as pool:
                # If a thread fails, `numbers` is emptied: the remaining threads end after their current
                # request. Then the error is raised.
                for done in as_completed([pool.submit(work, number) for number in range(N_THREAD)]):
                    if done.exception():
                        numbers = iter(())
                    done.result()
            assert plain(server.url) == before, "a plain chat is answered otherwise"
        except AssertionError as error:
            ended = server.stop() if server.process.poll() is None else server.process.returncode
            raise AssertionError(f"{error}\nthe server: {ended}") from None
        # the server closes connections that are still open after a while
        give_up = time.monotonic() + TIMEOUT_S
        while (n_file := memory_and_files(server.process)[1]) >= N_FILE and time.monotonic() < give_up:
            time.sleep(0.1)
        assert server.stop() == (130, "kvtool: stopped\n")
    return counts, least, n_file


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first request")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--api", choices=APIS, default="all", help="what is asked for")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.gguf"
        tiny.write_llama(path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=512)
        policy = ("--policy", args.policy)
        try:
            result = run(path, args.requests, args.seed, api=args.api, every=500, options=policy)
        except AssertionError as error:
            sys.exit(str(error))
    counts, least, n_file = result
    for (name, status), count in sorted(counts.items()):
        print(f"{count:7} {name} {status or 'closed'}")
    print(f"memory {least[1]:.0f} -> {least[3]:.0f} MiB, {n_file} files")
    if least[3] > MAX_GROWTH * least[1] or n_file >= N_FILE:
        sys.exit("the server holds more than it did")


if __name__ == "__main__":
    main()
