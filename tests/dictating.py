"""A proxy before a server of kvtool: it notes requests, and dictates what the model answers."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from kvtool.serve.forced import _literal
from kvtool.serve.formats import HERMES

OTHERS = "Notes"
"""What a request gets that offers no tools, such as one for a title."""


class Dictating:
    """url: what a client takes for the server. replies: what the next requests with tools are answered with,

    each a text, or a tool's name and its input. asked: the path, headers, body and answer of each request.
    """

    def __init__(self, url, target):
        self.url, self.target = url, target
        self.replies = []
        self.asked = []
        self.lock = threading.Lock()

    def reply(self, body):
        """The text that is dictated; None: the model says what it likes."""
        with self.lock:
            if not body.get("tools"):
                return OTHERS
            said = self.replies.pop(0) if self.replies else None
        return said if isinstance(said, str | None) else HERMES.written([said])


@contextmanager
def dictating(target):
    """Starts one before the server at this address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.own = Dictating(f"http://127.0.0.1:{server.server_port}", target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.own
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        own = self.server.own
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        noted = {"path": self.path, "headers": dict(self.headers), "body": dict(body), "answer": b""}
        with own.lock:
            own.asked.append(noted)
        if urlsplit(self.path).path == "/v1/messages" and (text := own.reply(body)) is not None:
            body |= {"grammar": f"root ::= {_literal(text)}"}
        self._pass_on(json.dumps(body).encode(), noted)

    def do_GET(self):
        self._pass_on(None, {"answer": b""})

    do_HEAD = do_GET

    def _pass_on(self, data, noted):
        link = http.client.HTTPConnection(urlsplit(self.server.own.target).netloc, timeout=600)
        left_out = ("host", "content-length", "accept-encoding", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        try:
            link.request(self.command, self.path, data, headers)
            answer = link.getresponse()
            noted["status"] = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection", "date"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while part := answer.read1(1 << 16):
                noted["answer"] += part
                self.wfile.write(part)
                self.wfile.flush()
        except OSError:
            # the client has gone, and so does this one: the server ends the answer
            noted["gone"] = True
        finally:
            link.close()
            self.close_connection = True
