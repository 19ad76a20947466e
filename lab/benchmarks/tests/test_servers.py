"""A reserved port is free for the server that a test starts, and other programs cannot use the port."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from lab.benchmarks.servers import answers, reserved_port

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux lets a socket reserve a port")


@linux
@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_only_a_server_with_port_reuse_can_bind_a_reserved_port(option):
    with reserved_port() as port, socket.socket() as intruder, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            intruder.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        socket.create_connection(("127.0.0.1", port)).close()


def test_reserved_port_refuses_connections():
    with reserved_port() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_answers_returns_false_if_the_server_has_ended():
    with reserved_port() as port, subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert not answers(process, f"http://127.0.0.1:{port}")


@linux
@pytest.mark.parametrize("status", [200, 404, 503])
def test_answers_waits_until_the_model_is_loaded(status):
    """A stand-in for the server answers /health with 503 once, and then with `status`.

    404 is the status of a server that has no /health.
    """
    code = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(statuses.pop(0)); self.send_header('Content-Length', '0')\n"
        "        self.end_headers()\n"
        "        if not statuses: sys.exit()\n"
        "    def log_message(self, *_): pass\n"
        "statuses = [503, int(sys.argv[2])]\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()\n"
    )
    with (
        reserved_port() as port,
        subprocess.Popen([sys.executable, "-c", code, str(port), str(status)]) as process,
    ):
        assert answers(process, f"http://127.0.0.1:{port}") == (status != 503)
