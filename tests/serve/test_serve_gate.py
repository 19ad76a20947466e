"""The HTTP side without an engine: bodies, methods, addresses, origins, and the access log."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import h11
import numpy as np
import pytest
import uvicorn

from kvtool.errors import LibraryError
from kvtool.serve.api import requests
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import parsed
from kvtool.serve.http import app, gate, server
from kvtool.serve.http.app import Site
from kvtool.serve.http.gate import Limits
from kvtool.serve.http.metrics import Counts
from kvtool.serve.queue import JobQueue
from tests.cli.in_process_command import run_kvtool
from tests.serve.http_requests import message
from tests.serve.in_process_server import prepare, send

BODY = json.dumps({"messages": [message("user", "Hi.")], "max_tokens": 4}).encode()
OBSIDIAN = "app://obsidian.md"


def post(content, encoding=None, **site):
    """Send a body to count_tokens. Return (status, error message, headers) of the answer."""
    headers = {"Content-Encoding": encoding} if encoding else {}
    path = "/v1/messages/count_tokens"
    answer = send(path, "POST", content=content, headers=headers, count=lambda request: 7, **site)
    body = answer.json()
    return answer.status_code, body.get("error", {}).get("message"), answer.headers


def test_encoded_body_is_refused():
    assert post(BODY, "identity")[0] == 200
    for encoding in ("gzip", "deflate", "br", "gzip, gzip"):
        assert post(BODY, encoding)[:2] == (415, f"the body has the encoding {encoding}; send it plain")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{{", "the body is not JSON"),
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": NaN}', "not finite"),
        (b'{"a": 1e999}', "not finite"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
    ids=["broken", "empty", "blank", "not UTF-8", "digits", "NaN", "infinity", "deep"],
)
def test_unparsable_body_is_refused_with_the_reason(body, words):
    status, message, _ = post(body)
    assert status == 400
    assert words in message


def test_body_may_not_exceed_the_limit():
    assert post(BODY, limits=Limits(max_bytes=len(BODY)))[0] == 200
    limits = Limits(max_bytes=len(BODY) - 1)
    refusal = (413, f"the body has more than {len(BODY) - 1} bytes")
    assert post(BODY, limits=limits)[:2] == refusal

    async def parts():
        yield BODY

    # the body is sent in chunks, without its length
    assert post(parts(), limits=limits)[:2] == refusal


def test_long_bodies_and_texts_are_processed_outside_the_event_loop(monkeypatch):
    threads = []

    def noted(function):
        return lambda *values: threads.append(threading.current_thread()) or function(*values)

    def thread():
        return threads.pop() is threading.main_thread()

    monkeypatch.setattr(gate, "parsed", noted(gate.parsed))
    monkeypatch.setattr(requests, "check_chat", noted(requests.check_chat))
    post(BODY)
    assert [thread(), thread()] == [True, True]
    assert post(b" " * 2**17 + BODY)[0] == 200
    assert [thread(), thread()] == [False, False]
    model = SimpleNamespace(
        tokenize=lambda *text, **options: threads.append(threading.current_thread()) or np.array([1, 2]),
        piece=lambda token, special: threads.append(threading.current_thread()) or b"a",
        n_vocab=8,
    )
    for path, content in (("tokenize", b'{"content": "a"}'), ("detokenize", b'{"tokens": [1]}')):
        assert send(f"/{path}", "POST", content=content, model=model).status_code == 200
        assert not thread()


@pytest.mark.parametrize(
    ("key", "encoding"),
    [("schl\xfcssel", "utf-8"), ("schl\xfcssel", "latin-1"), ("voil\xe0", "utf-8"), ("\u20ac", "utf-8")],
)
def test_api_key_may_have_any_character(key, encoding):
    limits, sent = Limits((key,)), key.encode(encoding)
    for headers in ({"X-Api-Key": sent}, {"Authorization": b"Bearer " + sent}):
        assert send("/v1/models", headers=headers, limits=limits).status_code == 200
    assert send("/v1/models", headers={"X-Api-Key": sent[:-1]}, limits=limits).status_code == 401


def test_wrong_method_gets_405_with_the_allowed_methods():
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/messages", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/m", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("OPTIONS", "/props", {"GET", "HEAD"}),
    ):
        answer = send(path, method)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed
        assert f"{method} is not for this address: {path}" in answer.text
    assert "allow" not in send("/nowhere").headers


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/props/", "/props"),
        ("/completion", "/v1/completions"),
    ],
)
def test_error_of_an_unknown_address_names_a_similar_address(path, near):
    answer = send(path, "POST")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"no such address: {path}; did you mean {near}?"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/v1/rerank", "/reranking"])
def test_embeddings_and_reranking_are_named_as_unsupported(path):
    message = send(path, "POST").json()["error"]["message"]
    assert message == f"no such address: {path}; embeddings and reranking are not supported"


def test_error_of_metrics_names_the_option():
    message = send("/metrics").json()["error"]["message"]
    assert message == "no such address: /metrics; start the server with --metrics"
    assert "# HELP kvtool_" in send("/metrics", has_metrics=True, is_loaded=False).text
    for path in ("/x/", "/v1/", "/v1/metric", "/v1/models{name:path}"):
        assert "; chats go to /v1/chat/completions, " in send(path).json()["error"]["message"]


def test_only_errors_of_requests_for_text_are_counted():
    counts = Counts()
    for path, method, how, status, n in (
        ("/nowhere", "GET", {}, 404, 0),
        ("/health", "POST", {}, 405, 0),
        ("/health", "GET", {"is_loaded": False}, 503, 0),
        ("/props", "GET", {"is_loaded": False}, 503, 0),
        ("/v1/models", "GET", {"limits": Limits(("key",))}, 401, 0),
        ("/tokenize", "POST", {"content": b"{"}, 400, 0),
        ("/v1/messages/count_tokens", "POST", {"content": b"{"}, 400, 0),
        ("/v1/chat/completions", "GET", {}, 405, 0),
        ("/v1/chat/completions", "POST", {"is_loaded": False}, 503, 1),
        ("/v1/completions", "POST", {"limits": Limits(("key",))}, 401, 1),
        ("/v1/messages", "POST", {"headers": {"Origin": OBSIDIAN}}, 403, 1),
        ("/v1/responses", "POST", {"content": b"{"}, 400, 1),
    ):
        before = counts.refused
        assert send(path, method, counts=counts, **how).status_code == status
        assert counts.refused == before + n, path
    assert send("/health", counts=counts).status_code == 200
    assert (counts.answered, counts.refused, counts.abandoned) == (0, 4, 0)


def test_error_of_a_missing_key_names_the_scheme():
    answer = send("/v1/models", limits=Limits(("key",)))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_model_has_the_context_length_in_the_field_that_anthropic_has_for_it():
    assert send("/v1/models/m").json()["max_input_tokens"] == 48
    assert send("/v1/models").json()["data"][0]["max_input_tokens"] == 48
    assert "max_input_tokens" not in send("/v1/models/m", is_loaded=False).json()


def test_each_answer_has_a_request_id():
    for method, path, status in (
        ("GET", "/v1/models", 200),
        ("POST", "/v1/chat/completions", 400),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/models", 405),
    ):
        answer = send(path, method, content=b"{")
        assert answer.status_code == status
        assert re.fullmatch("req_[0-9a-f]{24}", answer.headers["x-request-id"])
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("origins", "origin", "may"),
    [
        ((), OBSIDIAN, False),
        ((), "https://example.com", False),
        ((), "null", False),
        ((), "https://localhost.evil.example", False),
        ((), "http://localhost:3000", True),
        ((OBSIDIAN,), OBSIDIAN, True),
        ((OBSIDIAN,), "app://obsidian.md.evil", False),
        ((OBSIDIAN, "vscode-webview://1a2b"), "vscode-webview://1a2b", True),
        ((OBSIDIAN,), "tauri://localhost", False),
        ((OBSIDIAN,), "http://127.0.0.1:80", True),
        (("null",), "null", True),
        (("*",), "https://example.com", True),
    ],
)
def test_only_local_and_allowed_origins_may_send_requests(origins, origin, may):
    limits = Limits(origins=origins)
    answer = send("/v1/models", headers={"Origin": origin}, limits=limits)
    assert answer.status_code == (200 if may else 403)
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == (("*" if origins == ("*",) else origin) if may else None)
    if not may:
        assert f"pages of {origin} are refused; kvtool serve --allow-origin {origin} " in answer.text
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    before = send("/v1/chat/completions", "OPTIONS", headers=asks, limits=limits)
    assert (before.status_code == 200) == may
    if not may:
        assert before.text == answer.text
    if may:
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
    if may and origins:
        asks["Access-Control-Request-Private-Network"] = "true"
        before = send("/v1/chat/completions", "OPTIONS", headers=asks, limits=limits)
        assert before.headers["access-control-allow-private-network"] == "true"


def test_servers_own_page_may_ask_under_each_name_of_the_machine():
    limits = Limits(names=frozenset({"gpu.lan"}))
    for name in ("gpu.lan:8080", "192.168.1.5:8080", "[fd00::1]:8080"):
        for scheme, host, may in (
            ("http", name, True),
            ("https", name, True),
            ("http", "gpu.lan", False),
            ("app", name, False),
        ):
            headers = {"Host": name, "Origin": f"{scheme}://{host}"}
            answer = send("/v1/models", headers=headers, limits=limits)
            assert answer.status_code == (200 if may else 403)


class FakeConnection:
    """Stands for a connection of uvicorn.

    n_unread: number of bytes of an answer that the client has not read yet. If it is 0, the client has its
    answer.
    """

    def __init__(self, n_unread):
        self.cycle, self.n_unread, self.is_cut = object(), n_unread, False
        self.conn = SimpleNamespace(their_state=h11.DONE if n_unread else h11.IDLE)
        self.flow = SimpleNamespace(write_paused=n_unread > 0)
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.n_unread, abort=self._cut)

    def _cut(self):
        self.is_cut = True


def test_only_connections_of_clients_that_do_nothing_are_cut():
    site = Site("m", "h2o", JobQueue(1), limits=Limits(read_timeout=30))
    running = server._Server(uvicorn.Config(None), site)
    silent, asking = FakeConnection(0), FakeConnection(0)
    stuck, reading = FakeConnection(9000), FakeConnection(9000)
    running.server_state.connections = {silent, asking, stuck, reading}
    # at each of these times, `asking` has asked again and waits, and `reading` has read more
    for now in range(31):
        running._close_stalled(now)
        assert not any(each.is_cut for each in running.server_state.connections)
        asking.cycle, reading.n_unread = object(), reading.n_unread - 1
    running._close_stalled(30.5)
    assert [each.is_cut for each in (silent, asking, stuck, reading)] == [True, False, True, False]


LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "10.0.0.7", "[fe80::1]")


@pytest.mark.parametrize(
    ("value", "is_local", "accepted", "refused_hosts"),
    [
        ("127.0.0.1", True, LOCAL_HOSTS, ("gpu.lan", "gpu", "gpu.local")),
        ("0.0.0.0", False, (*LOCAL_HOSTS, "gpu.lan", "GPU", "gpu.local", "gpu.lan.local"), ("lan", "x.evil")),
        ("Kvtool", False, (*LOCAL_HOSTS, "kvtool", "gpu"), ("kvtool.local",)),
    ],
)
def test_without_a_key_other_host_names_are_refused(value, is_local, accepted, refused_hosts, monkeypatch):
    """A web page whose name resolves to this machine (DNS rebinding) sends its name as Host and Origin."""
    monkeypatch.setattr(gate.socket, "gethostname", lambda: "Gpu.lan")
    limits = Limits(names=gate.own_names(value, is_local=is_local))

    def get_models(host, limits):
        headers = {"Host": f"{host}:8080", "Origin": f"http://{host}:8080"}
        return send("/v1/models", headers=headers, limits=limits)

    for host in accepted:
        assert get_models(host, limits).status_code == 200, host
    wrong = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[bad", "")
    for host in (*refused_hosts, *wrong):
        answer = get_models(host, limits)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host"), host
        words = f"this server does not answer as {host}:8080; use its IP address, or --api-key-file"
        assert answer.json()["error"]["message"] == words
    assert send("/v1/models", headers={"Host": "evil.example"}, limits=Limits()).status_code == 200


def test_health_and_clients_that_send_no_host_need_no_known_name():
    limits = Limits(names=gate.own_names("127.0.0.1", is_local=True))
    foreign = {"Host": "kvtool.internal:8080"}
    for path, headers, status in (
        ("/health", foreign, 200),
        ("/v1/models", foreign, 403),
        ("/", foreign, 403),
        ("/health", {"Host": ""}, 200),
        ("/v1/models", {"Host": ""}, 200),
        ("/v1/models", {"Host": "", "Origin": "http://evil.example"}, 403),
    ):
        assert send(path, headers=headers, limits=limits).status_code == status, (path, headers)


def test_serve_limits_host_names_unless_it_has_a_key(chat_model, monkeypatch, tmp_path):
    def names(*options):
        """Return the host names that `kvtool serve` allows with these options."""
        limits = []

        def serve(site, *_):
            limits.append(site.limits)
            raise LibraryError("it does not run")

        monkeypatch.setattr(server, "serve", serve)
        run_kvtool("serve", "-m", chat_model, "--port", "0", *options)
        return limits[0].names

    keys = tmp_path / "keys.txt"
    keys.write_text("secret\n")
    host_names = gate.own_names("0.0.0.0", is_local=False)
    assert names() == names("--host", "127.0.0.1") == {"localhost", "127.0.0.1"}
    assert socket.gethostname().lower() in names("--host", "0.0.0.0") == host_names
    assert names("--api-key-file", keys) == names("--host", "0.0.0.0", "--api-key-file", keys) is None


def test_api_key_file_without_a_key_is_refused(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# none yet\n")
    done = run_kvtool("serve", "--api-key-file", keys)
    assert done.returncode == 2
    assert done.stderr == f"kvtool: --api-key-file: {keys} has no API key; write one key per line\n"
    keys.write_text("# the first\nkey  # of Ann\nother\n")
    done = run_kvtool("serve", "--api-key-file", keys)
    wrong = f"{keys} has a key with white space inside; begin lines of comments with '#'"
    assert (done.returncode, done.stderr) == (2, f"kvtool: --api-key-file: {wrong}\n")


def test_allow_origin_refuses_values_that_no_browser_sends():
    for origin in ("obsidian.md", "https://example.com/", "https://example.com/chat", ""):
        done = run_kvtool("serve", "--allow-origin", origin)
        assert done.returncode == 2
        assert "--allow-origin must be like https://example.com, without a path, or *" in done.stderr


END = {"message": {"role": "assistant", "content": "x"}, "finish": "stop", "stopped_by": "", "kvtool": {}}
COUNTS = {"n_prompt": 1200, "n_cached": 1000, "read_s": 0.26, "write_s": 1.5, "n_written": 30, "n_thought": 0}


def write(job):
    job.emit({"kind": "end", "n_drafted": 0, "n_accepted": 0, **END, **COUNTS})


def test_each_request_is_one_line_in_the_log():
    lines = []
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 10\.0\.0\.7"

    def last(*what, **options):
        send(*what, log=lines.append, **options)
        return lines.pop()

    assert re.fullmatch(rf"{when} GET /v1/models 200 \d+ ms", last("/v1/models"))
    assert re.fullmatch(rf"{when} GET /no \[2J 404 \d+ ms: no such address: /no \[2J; .*", last("/no%1b[2J"))
    for what in (("/" + "a" * 5000,), ("/health", "X" * 5000), ("/v1/chat/completions", "POST")):
        assert len(last(*what, body={"messages": [message("user", "Hi.")], "kvtool": {"x" * 5000: 1}})) < 700
    assert re.fullmatch(
        rf"{when} POST /v1/chat/completions 400 \d+ ms: the body is not JSON.*",
        last("/v1/chat/completions", "POST", content=b"{"),
    )
    assert re.fullmatch(
        rf"{when} POST /v1/messages 400 \d+ ms: messages .*", last("/v1/messages", "POST", content=b"{}")
    )
    refused_line = rf"{when} GET /v1/models 401 \d+ ms: the API key is wrong or missing"
    assert re.fullmatch(refused_line, last("/v1/models", limits=Limits(("key",))))
    failed_line = (
        rf"{when} POST /tokenize 500 \d+ ms: kvtool has failed \(AttributeError\); its log says more"
    )
    assert re.fullmatch(failed_line, last("/tokenize", "POST", content=b'{"content": "a"}'))
    asks = {"Origin": OBSIDIAN, "Access-Control-Request-Method": "POST"}
    assert re.fullmatch(
        rf"{when} OPTIONS /v1/models 403 \d+ ms: pages of {OBSIDIAN} are refused; .*",
        last("/v1/models", "OPTIONS", headers=asks),
    )
    tokens = r"1,200 tokens \(1,000 cached\) read in 0\.3 s, 30 written in 1\.5 s \(stop\)"
    for content in (BODY, BODY[:-1] + b', "stream": true}'):
        line = last("/v1/chat/completions", "POST", content=content, engine=write)
        assert re.fullmatch(rf"{when} POST /v1/chat/completions 200 \d+ ms, {tokens}", line)
    assert lines == []


@pytest.mark.parametrize("body", [b"[[]]", b"[["])
def test_garbage_is_not_collected_while_a_body_is_parsed(monkeypatch, body):
    states, loads = [], json.loads

    def spy(*args, **options):
        states.append(gc.isenabled())
        return loads(*args, **options)

    monkeypatch.setattr(json, "loads", spy)
    with nullcontext() if body == b"[[]]" else pytest.raises(ApiError):
        parsed(body)
    assert (states, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize("stream", [True, False])
def test_log_and_metrics_show_if_stopping_the_server_cut_an_answer(stream):
    lines, counts, content = [], Counts(), BODY[:-1] + b', "stream": true}' if stream else BODY

    def stopping(job):
        job.emit({"kind": "piece", "deltas": [{"content": "x"}]})
        job.emit({"kind": "error", "error": ApiError("the server is stopping", status=503)})

    send("/v1/chat/completions", "POST", content=content, engine=stopping, log=lines.append, counts=counts)
    assert (counts.answered, counts.refused, counts.abandoned) == (0, 1, 0)
    (line,) = lines
    cut = "200 .* ms, the answer was cut: the server is stopping"
    assert re.search(f"{cut if stream else '503 .* ms: the server is stopping'}$", line)


def test_lines_of_a_stream_have_no_other_line_ends():
    def write_text(job):
        text = "one\x85two\u2028three\u2029four"
        job.emit({"kind": "piece", "deltas": [{"content": text}], "logprobs": []})
        write(job)

    for path, fields in (
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
    ):
        answer = send(path, "POST", body={**json.loads(BODY), "stream": True, **fields}, engine=write_text)
        assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
        assert r"one\u0085two\u2028three\u2029four" in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_log_and_metrics_show_if_the_client_disconnected(stream):
    lines, waiting = [], JobQueue(1)
    pool = SimpleNamespace(slots=[SimpleNamespace(prepare=prepare)])
    site = Site("m", "h2o", waiting, pool=pool, log=lines.append)
    asgi_app = app.make(site)
    is_gone = asyncio.Event()

    async def answering():
        job = await asyncio.to_thread(waiting.get)
        if stream:
            job.emit({"kind": "piece", "deltas": [{"content": "x"}]})
        else:
            is_gone.set()

    async def goes():
        parts = [{"type": "http.request", "body": BODY[:-1] + b', "stream": true}' if stream else BODY}]

        async def receive():
            if not parts:
                await is_gone.wait()
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def broken(event):
            if event["type"] == "http.response.body":
                is_gone.set()
                raise OSError

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        with suppress(Exception):
            await asgi_app(scope | {"query_string": b"", "client": ("::1", 5)}, receive, broken)

    async def both():
        await asyncio.gather(goes(), answering())

    asyncio.run(both())
    (line,) = lines
    status = 200 if stream else 499
    assert re.fullmatch(rf"\S+ \S+ ::1 POST /v1/chat/completions {status} \d+ ms, the client has gone", line)
    assert (site.counts.answered, site.counts.refused, site.counts.abandoned) == (0, 0, 1)
