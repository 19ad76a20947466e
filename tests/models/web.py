"""A web server on loopback for tests of downloads. It can also act as a server of repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        site, path = self.server.site, self.path.partition("?")[0]
        byte_range = self.headers.get("Range")
        site.requests.append((self.command, path, byte_range, self.headers.get("Authorization")))
        if path in site.redirects:
            code, headers = site.redirects[path]
            self._answer(code, headers, b"")
        elif path in site.errors:
            self._answer(*site.errors[path])
        elif path in site.files:
            self._file(site, site.files[path], byte_range)
        else:
            self._answer(404, {}, b"")

    do_HEAD = do_GET

    def _file(self, site, data, byte_range):
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        headers = {"ETag": tag, "Content-Type": site.kind, "Accept-Ranges": "bytes"}
        code, start = 200, 0
        if byte_range:
            code, start = 206, int(byte_range.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if site.says_length:
            headers["Content-Length"] = str(len(data) - start)
        broken, site.breaks_after = site.breaks_after, None
        sent = data[start:] if broken is None else data[start : start + broken]
        self._answer(code, headers, sent)

    def _answer(self, code, headers, body):
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers and code != 200:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            # the client may have stopped its download
            with suppress(OSError):
                self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    """Start the server and yield its site. At the end, wait until all answers are sent.

    A test may change the attributes of the site:
    files: bytes by path.
    redirects: (status, headers) by path.
    errors: (status, headers, body) by path.
    requests: (method, path, Range header, Authorization header) of each request so far.
    breaks_after: the next answer breaks off after this number of bytes of its body; None to send all bytes.
    says_length: False if answers have no Content-Length.
    kind: Content-Type of all files.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    # `server_close` waits only for threads that are not daemons
    server.daemon_threads = False
    site = server.site = SimpleNamespace(
        files={},
        redirects={},
        errors={},
        requests=[],
        says_length=True,
        breaks_after=None,
        kind="application/octet-stream",
        port=server.server_port,
        url=f"http://127.0.0.1:{server.server_port}",
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def add_repository(site, repo, files, *, commit=COMMIT, revision="main"):
    """Add a repository with files (name: bytes), in the form that huggingface_hub requests.

    Requests for its files are redirected to another host name, as on the real server.
    """
    about = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    about |= {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/{revision}"):
        if path.endswith(repo) and revision != "main":
            continue
        site.errors[path] = (200, {"Content-Type": "application/json"}, json.dumps(about).encode())
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        site.files[f"/store/{digest}"] = data
        site.redirects[f"/{repo}/resolve/{revision}/{name}"] = (
            302,
            {
                "Location": f"http://localhost:{site.port}/store/{digest}?signed=yes",
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(data)),
            },
        )
