"""Run ggml's RPC server on loopback, with the library that kvtool loads.

    python -m tests.engine.rpc_server PORT

A client of the server sees the server's CPU as a device. The server ends after TIME_LIMIT seconds, or earlier
if it is killed.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from lab.benchmarks.servers import reserved_port
from tests import fork_server
from tests.blocking_policy import until

TIME_LIMIT = 600


def serve(port):
    """Serve the CPU, with one thread, until the process ends."""
    from kvtool.llama.libllama.library import api
    from kvtool.llama.libllama.log import start_backends

    def function(name, result, *arguments):
        c_function = getattr(api._lib, name)
        c_function.restype, c_function.argtypes = result, arguments
        return c_function

    pointer = ctypes.c_void_p
    start_backends()
    registry = function("ggml_backend_reg_by_name", pointer, ctypes.c_char_p)(b"RPC")
    if not registry:
        sys.exit("the library is built without RPC")
    cpu = 0
    device = function("ggml_backend_dev_by_type", pointer, ctypes.c_int)(cpu)
    get_address = function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    address = get_address(registry, b"ggml_backend_rpc_start_server")
    text, size = ctypes.c_char_p, ctypes.c_size_t
    start = ctypes.CFUNCTYPE(None, text, text, size, size, ctypes.POINTER(pointer))(address)
    # the server runs in C and never returns to Python, so an alarm ends the process
    signal.alarm(TIME_LIMIT)
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, (pointer * 1)(device))


class Endpoint(str):
    """Address "127.0.0.1:port" of a server. The attribute `process` is the process of the server."""

    process: subprocess.Popen


def skip_without_rpc():
    """Skip the test if the library is built without RPC."""
    from kvtool.llama.libllama.library import library_path

    if not (library_path().parent / "libggml-rpc.so").exists():
        pytest.skip("the library is built without RPC")


@contextmanager
def running():
    """Start a server in another process and yield its Endpoint. Kill the server at the end of the block."""
    skip_without_rpc()
    with reserved_port() as port:
        server = fork_server.Popen(
            [sys.executable, "-m", "tests.engine.rpc_server", str(port)],
            cwd=fork_server.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: _listens(server, port))
            endpoint = Endpoint(f"127.0.0.1:{port}")
            endpoint.process = server
            yield endpoint
        finally:
            server.kill()
            server.wait()


def _listens(server, port):
    """Return True if something listens on this port. Raises AssertionError if the server has ended."""
    assert server.poll() is None, f"the RPC server has ended with exit status {server.returncode}"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def client(module, *arguments):
    """Run a test module as a program. Return (its JSON output, list of parts of its stderr).

    A new part begins at each line "run ...".

    The module runs in another process, because devices are registered for a whole process.
    """
    done = fork_server.run([sys.executable, "-m", module, *arguments], cwd=fork_server.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr.split("\nrun ")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
