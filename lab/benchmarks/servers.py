"""Help to use servers in benchmarks and tests: reserve a port, wait for the server, send requests."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 120


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of 127.0.0.1. Other programs do not get this port until the block ends.

    A socket is bound to the port, but does not listen. On Linux, a server can then still listen on this port
    if it sets SO_REUSEADDR or SO_REUSEPORT, which servers do. A program that asks for any free port gets a
    different port. On other systems, the port is free at the start of the block, but it is not reserved.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server at this URL can answer. Return False if it has ended, or after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return True
        except urllib.error.HTTPError as error:
            # llama_cpp.server has no /health; other servers answer with 503 while they load the model
            if error.code == 404:
                return True
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    return False


def post(url: str, body: object) -> http.client.HTTPResponse:
    """Send a request as JSON. Raises HTTPError if the server answers with an error."""
    head = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=7200)


def pieces(stream: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    """Yield the JSON objects of an answer that is streamed."""
    for line in stream:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
