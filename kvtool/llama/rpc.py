"""Workers: machines whose devices hold layers of a model, reached by ggml's RPC protocol.

What is looked at here, before llama.cpp connects: it would wait without an end, or end the process.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtool.errors import LibraryError, UsageError

PORT = 50052
"""Where a worker listens unless told otherwise, as llama.cpp's rpc-server does."""

PROTOCOL = (7, 0)
"""Major and minor version of the protocol that the llama.cpp of patches/UPSTREAM speaks."""

ANSWER_S = 5.0
"""Seconds that a worker has to take a connection, and again to answer."""

_HELLO, _N_CAPS = 14, 24


def endpoints(text: str) -> list[str]:
    """The workers that "host:port,host:port" names. Raises UsageError."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise UsageError("--rpc names no worker; give host:port, several with commas")
    for endpoint in found:
        _split(endpoint)
    return found


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if host.startswith("[") or ":" in host:
        raise UsageError(f"workers are reached over IPv4 only, got {endpoint!r}")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(f"a worker is host:port, {host or 'host'}:{PORT} for example, got {endpoint!r}")
    return host, int(port)


def address(host: str) -> str:
    """The IPv4 address of a name, in numbers. Raises UsageError where it has none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(f"{host} is no name or IPv4 address that this machine knows") from None
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address in numbers is reached from this machine alone."""
    return address.startswith("127.")


@contextmanager
def reached(endpoints: Sequence[str]) -> Iterator[list[str]]:
    """The workers' addresses, "1.2.3.4:50052", once each has said that it is free and speaks our protocol.

    Inside, they are still held: a worker serves one client at a time. Raises UsageError for what is no
    endpoint or named twice, LibraryError for a worker that is not there, is busy or speaks another version.
    """
    with ExitStack() as stack:
        addresses: list[str] = []
        for endpoint in endpoints:
            host, port = _split(endpoint)
            found = f"{address(host)}:{port}"
            if found in addresses:
                raise UsageError(f"{endpoint} names a worker a second time; name each once")
            addresses.append(found)
        for endpoint, found in zip(endpoints, addresses, strict=True):
            stack.enter_context(_greeted(endpoint, found))
        yield addresses


def _greeted(endpoint: str, address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    try:
        connection = socket.create_connection((host, int(port)), timeout=ANSWER_S)
    except OSError:
        raise LibraryError(
            f"no worker answers at {endpoint}; start one there: kvtool worker --host {host} --port {port}"
        ) from None
    try:
        version = _greet(connection)
    except TimeoutError:
        connection.close()
        raise LibraryError(
            f"the worker at {endpoint} takes connections and does not answer; "
            "it serves one client at a time, and may be serving another"
        ) from None
    except OSError:
        connection.close()
        raise LibraryError(
            f"what answers at {endpoint} is no worker, or one of another version of llama.cpp"
        ) from None
    if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
        connection.close()
        theirs, ours = (".".join(map(str, each)) for each in (version, PROTOCOL))
        raise LibraryError(
            f"the worker at {endpoint} speaks version {theirs} of ggml's RPC protocol, "
            f"this llama.cpp {ours}; run the same kvtool on both"
        )
    return connection


def _greet(connection: socket.socket) -> tuple[int, int]:
    """The version of a worker. Raises OSError where nothing comes, or nothing that could be one."""
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
