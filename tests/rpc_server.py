"""ggml's own RPC server on loopback, from the library that kvtool loads: a device whose memory is not ours.

    python -m tests.rpc_server PORT [ENDPOINT]

With ENDPOINT it is one as `kvtool worker` starts it, of the device that is served there: a device whose
memory is not that of the worker's host, such as a GPU. Ends by itself after TIME_LIMIT seconds.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

from tests import forked

TIME_LIMIT = 60


def serve(port):
    """Serves the CPU, with one thread, until the process ends."""
    from kvtool.llama.library import api
    from kvtool.llama.log import start_backends

    def function(name, result, *arguments):
        found = getattr(api._lib, name)
        found.restype, found.argtypes = result, arguments
        return found

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
    # an alarm ends a process wherever it is, in C too
    signal.alarm(TIME_LIMIT)
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, (pointer * 1)(device))


def pass_on(port, endpoint):
    """Serves the device of another server, until the process ends."""
    from kvtool.llama.workers import add_rpc, server

    add_rpc(endpoint)
    signal.alarm(TIME_LIMIT)
    server(f"127.0.0.1:{port}", 1)()


class Endpoint(str):
    """ "127.0.0.1:port"; process: the one that serves it."""

    process: subprocess.Popen


@contextmanager
def running(*behind):
    """The Endpoint of a server in a process of its own, which ends with the block.

    behind: the endpoint whose device it serves, if not the CPU.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = forked.Popen(
        [sys.executable, "-m", "tests.rpc_server", str(port), *behind],
        cwd=forked.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(server, port)
        endpoint = Endpoint(f"127.0.0.1:{port}")
        endpoint.process = server
        yield endpoint
    finally:
        server.kill()
        server.wait()


def client(module, *arguments):
    """What a client has printed as JSON, and its log, from one "run" to the next: a test module, run as one.

    In a process of its own, as devices are registered for a whole process.
    """
    done = forked.run(
        [sys.executable, "-m", module, *arguments],
        cwd=forked.ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr.split("\nrun ")


def _wait(server, port):
    end = time.monotonic() + TIME_LIMIT / 2
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"the RPC server did not start (exit status {server.poll()})")


if __name__ == "__main__":
    (pass_on if sys.argv[2:] else serve)(int(sys.argv[1]), *sys.argv[2:])
