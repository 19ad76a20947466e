"""Endpoints, the addresses of workers: parse them, and test whether workers answer.

kvtool tests each endpoint before llama.cpp connects to it: if no worker answers, llama.cpp waits forever or
ends the process. `workers.py` makes llama.cpp use the workers. The command line imports this file, so it
must not import llama.cpp.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtool.errors import LibraryError, UsageError
from kvtool.options import parts

PORT = 50052
"""Default port of a worker, and of llama.cpp's rpc-server."""

PROTOCOL = (7, 0)
"""Major and minor version of the RPC protocol in the llama.cpp of patches/UPSTREAM."""

ANSWER_S = 5.0
"""Timeout in seconds for a worker to accept a connection, and again for its answer."""

_HELLO, _N_CAPS = 14, 24


def parse(text: str) -> list[str]:
    """Parse "host:port,host:port" to a list of endpoints. Raises UsageError for other text."""
    endpoints = parts(text)
    if not endpoints:
        raise UsageError("--rpc names no worker; give host:port, several with commas")
    for endpoint in endpoints:
        _split(endpoint)
    return endpoints


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if host.startswith("[") or ":" in host:
        raise UsageError(f"workers are reached over IPv4 only, got {endpoint!r}")
    is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    if not (host and is_port):
        raise UsageError(f"a worker is host:port, {host or 'host'}:{PORT} for example, got {endpoint!r}")
    return host, int(port)


def address(host: str) -> str:
    """Return the IPv4 address of a host name, as "1.2.3.4". Raises UsageError if it has none."""
    if ":" in host:
        raise UsageError(f"the host must be a name or an IPv4 address, got {host}")
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(f"{host} cannot be resolved to an IPv4 address; check the name") from None
    return str(addresses[0][4][0])


def is_loopback(address: str) -> bool:
    """Return True if an IPv4 address, such as "127.0.0.1", is reachable only from this machine."""
    return address.startswith("127.")


@contextmanager
def reached(endpoints: Sequence[str]) -> Iterator[list[str]]:
    """Connect to all workers, and yield their addresses, such as "1.2.3.4:50052".

    The connections stay open inside the block. They keep other clients out, because a worker serves one
    client at a time. Raises UsageError for a malformed or repeated endpoint, and LibraryError for a worker
    that is missing or busy or has another version of the protocol.
    """
    with ExitStack() as stack:
        addresses: list[str] = []
        for endpoint in endpoints:
            host, port = _split(endpoint)
            resolved = f"{address(host)}:{port}"
            if resolved in addresses:
                raise UsageError(f"{endpoint} names a worker a second time; name each once")
            addresses.append(resolved)
        for endpoint, resolved in zip(endpoints, addresses, strict=True):
            _check_worker(stack.enter_context(_connected(endpoint, resolved)), endpoint)
        yield addresses


def _connected(endpoint: str, address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    try:
        return socket.create_connection((host, int(port)), timeout=ANSWER_S)
    except OSError:
        raise LibraryError(
            f"no worker answers at {endpoint}; start one there: kvtool worker --host {host} --port {port}"
        ) from None


def _check_worker(connection: socket.socket, endpoint: str) -> None:
    """Raise LibraryError unless a worker of the same protocol answers."""
    try:
        version = _greet(connection)
    except TimeoutError:
        raise LibraryError(
            f"the worker at {endpoint} accepts connections and does not answer; "
            "it serves one client at a time, and may be serving another"
        ) from None
    except OSError:
        raise LibraryError(
            f"the program at {endpoint} is not a worker, or its llama.cpp has another version"
        ) from None
    if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
        theirs, ours = (".".join(map(str, numbers)) for numbers in (version, PROTOCOL))
        raise LibraryError(
            f"the worker at {endpoint} speaks version {theirs} of ggml's RPC protocol, "
            f"this llama.cpp {ours}; run the same kvtool on both"
        )


def _greet(connection: socket.socket) -> tuple[int, int]:
    """Return a worker's version of the protocol. Raises OSError for a missing or invalid answer."""
    connection.sendall(struct.pack("<BQ", _HELLO, _N_CAPS) + bytes(_N_CAPS))
    (size,) = struct.unpack("<Q", _receive(connection, 8))
    if not 3 <= size <= 256:
        raise ConnectionError
    major, minor = _receive(connection, size)[:2]
    return major, minor


def _receive(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data
