"""A proxy in front of `kvtool serve` that records requests and dictates the model's answers."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from kvtool.serve.tools.formats import HERMES
from tests.serve.gone import response

OTHERS = "Notes"
"""Dictated answer to requests that offer no tools, for example requests for a title."""


class Dictating:
    """State of a proxy.

    url: address of the proxy.
    target: address of the server.
    replies: answers to the next requests that have tools. An answer is a text, a pair (tool name, input), or
    None to let the model answer.
    asked: list with a dict for each POST request. Its keys are path, headers, body, status and answer, and
    also "gone" if the client disconnected.
    """

    def __init__(self, url, target):
        self.url, self.target = url, target
        self.replies = []
        self.asked = []
        self.lock = threading.Lock()

    def reply(self, body):
        """Return the dictated text for a request, or None to let the model answer."""
        with self.lock:
            if not body.get("tools"):
                return OTHERS
            answer = self.replies.pop(0) if self.replies else None
        return answer if isinstance(answer, str | None) else HERMES.written([answer])


@contextmanager
def dictating(target):
    """Start a proxy for the server at the address `target`. Yield the proxy's state."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ProxyHandler)
    server.daemon_threads = True
    server.state = Dictating(f"http://127.0.0.1:{server.server_port}", target)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _ProxyHandler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        noted = {"path": self.path, "headers": dict(self.headers), "body": dict(body), "answer": b""}
        with state.lock:
            state.asked.append(noted)
        if urlsplit(self.path).path == "/v1/messages" and (text := state.reply(body)) is not None:
            body |= {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}"}
        self._pass_on(json.dumps(body).encode(), noted)

    def do_GET(self):
        self._pass_on(None, {"answer": b""})

    do_HEAD = do_GET

    def _pass_on(self, data, noted):
        link = http.client.HTTPConnection(urlsplit(self.server.state.target).netloc, timeout=600)
        left_out = ("host", "content-length", "accept-encoding", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        try:
            link.request(self.command, self.path, data, headers)
            answer = response(link)
            noted["status"] = answer.status
            parts = iter(partial(answer.read1, 1 << 16), b"")
            self._answer(answer, parts, noted)
        finally:
            # close the connection to the server, so that the server stops answering if the client has left
            link.close()
            self.close_connection = True

    def _answer(self, answer, parts, noted):
        """Pass the parts of an answer on as soon as they arrive, until the client disconnects."""
        try:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection", "date"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            for part in parts:
                noted["answer"] += part
                self.wfile.write(part)
        except OSError:
            noted["gone"] = True
