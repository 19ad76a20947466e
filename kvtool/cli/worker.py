"""kvtool worker: this machine's devices, for the --rpc of others."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Annotated, TextIO

import typer

from kvtool.errors import LibraryError, UsageError
from kvtool.llama import rpc
from kvtool.system import interrupt

_SHORT_S = 1.0
"""A client looks at a worker in connections shorter than this, of which nobody need hear."""


def worker(
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at: a name or IPv4 address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to listen at.")] = rpc.PORT,
    mem: Annotated[
        str | None,
        typer.Option(
            "--mem",
            metavar="BYTES",
            help="The memory that the devices say to have, 8GiB for example: layers are spread by it.",
            show_default="all there is",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("-t", "--threads", min=1, help="CPU threads.", show_default="one a core"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="llama.cpp's own log on stderr, and each connection.")
    ] = False,
) -> None:
    """Serve this machine's GPUs, or its CPU, to kvtool --rpc elsewhere.

    The protocol has no authentication and no encryption: whoever reaches the port can use the devices, read
    and change what they hold, and may be able to take over the process. Keep it to networks that you trust.
    """
    address = rpc.address(host)
    n_bytes = _bytes(mem)
    _check_free(address, port)

    from kvtool.llama.devices import default_threads
    from kvtool.llama.log import guard, set_verbose
    from kvtool.llama.workers import served, server

    set_verbose(verbose)
    guard()
    devices = served(n_bytes)
    start = server(f"{address}:{port}", threads or default_threads())
    log = _Log(verbose)
    signal.signal(signal.SIGTERM, lambda *_: interrupt.end(exit_code=0))
    interrupt.ends()
    if not rpc.is_loopback(address):
        log.say(
            "there is no authentication: whoever reaches this port can do with the devices what they like"
        )
    lines = _stdout_lines()

    def serve() -> None:
        try:
            start()
        finally:
            # the end of what there is to read
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    # a thread of its own: signals wait for Python to have its turn, which ggml would never give
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    if _listens(thread, address, port):
        log.say(f"serving {_names(devices)} at {address}:{port}, to one client at a time; Ctrl-C ends it")
    with lines:
        for line in lines:
            log.take(line)
    raise LibraryError(f"ggml cannot serve at {address}:{port}; -v shows more")


def _bytes(mem: str | None) -> int | None:
    if mem is None:
        return None

    from kvtool.units import parse_bytes

    n_bytes = parse_bytes(mem)
    if n_bytes == 0:
        raise UsageError("--mem must be more than nothing; leave it out for all there is")
    return n_bytes


def _check_free(address: str, port: int) -> None:
    """Raises UsageError where nobody can listen: ggml's own words would not say why."""
    with socket.socket() as probe:
        if os.name == "posix":
            # as ggml does: a port of a process that has just ended is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            why = error.strerror or error
            if error.errno == errno.EADDRINUSE:
                why = "it is taken, by another worker perhaps; choose another --port"
            elif error.errno == errno.EADDRNOTAVAIL:
                why = "this machine has no such address; choose another --host, 0.0.0.0 for all it has"
            raise UsageError(f"cannot listen at {address}:{port}: {why}") from None


def _listens(thread: threading.Thread, address: str, port: int) -> bool:
    """Waits until the thread that serves can be reached. False: it has ended."""
    reached_at = "127.0.0.1" if address == "0.0.0.0" else address
    while thread.is_alive():
        try:
            socket.create_connection((reached_at, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _names(devices: list[dict[str, object]]) -> str:
    from kvtool.units import format_bytes

    return ", ".join(
        f"{device['name']} ({device['description']}, {format_bytes(int(str(device['memory_total'])))})"
        for device in devices
    )


def _stdout_lines() -> TextIO:
    """What is written to stdout from now on, by C too, line by line."""
    if sys.stdout is None:
        # closed: the pipe must not take its place
        os.open(os.devnull, os.O_WRONLY)
    else:
        sys.stdout.flush()
    out, into = os.pipe()
    os.dup2(into, 1)
    os.close(into)
    return os.fdopen(out, encoding="utf-8", errors="replace")


class _Log:
    """What a worker says on stderr. verbose: of every connection."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_told = False

    def say(self, line: str) -> None:
        # a terminal that is gone is no reason to stop serving
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"kvtool: {line}\n")
            sys.stderr.flush()

    def take(self, line: str) -> None:
        """A line of ggml's."""
        if line.startswith("Accepted client"):
            self._timer = threading.Timer(0 if self.verbose else _SHORT_S, self._tell)
            self._timer.daemon = True
            self._timer.start()
        elif line.startswith("Client connection closed"):
            if self._timer:
                self._timer.cancel()
            with self._lock:
                told, self._is_told = self._is_told, False
            if told:
                self.say("the client has left")
        elif self.verbose:
            sys.stderr.write(line)

    def _tell(self) -> None:
        with self._lock:
            self._is_told = True
        self.say("a client is here")
