"""Servers that benchmarks and tests start: a port for one, and the wait until it answers."""

from __future__ import annotations

import http.client
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
    """Yield a free port of 127.0.0.1, and keep other programs from it until the block ends.

    A socket stays bound to it without listening. Linux then lets a server listen there if it sets
    SO_REUSEADDR or SO_REUSEPORT, as servers do, and does not choose the port for programs that ask for any
    free one. On other systems the port is free at the start of the block and not reserved.
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
    """Wait until the server at this URL can answer. False if it ended, or PATIENCE_S seconds are over."""
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return True
        except urllib.error.HTTPError as error:
            # llama_cpp.server has no /health; others answer with 503 while they load the model
            if error.code == 404:
                return True
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    return False
