"""`kvtool worker`: lend this machine's devices to another machine that runs kvtool with --rpc."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from kvtool.cli.declared import options
from kvtool.errors import LibraryError, UsageError
from kvtool.llama.libllama import endpoints
from kvtool.options import Options, Range, option, tested
from kvtool.system import interrupt
from kvtool.system.cpu import default_threads
from kvtool.units import MAX_THREADS, format_bytes, parse_bytes

_SHORT_S = 1.0
"""Connections shorter than this many seconds are not reported. Clients make them to test the worker."""


def _lent_bytes(text: str) -> int:
    """Parse a value of --mem. Raises UsageError."""
    n_bytes = parse_bytes(text)
    if n_bytes == 0:
        raise UsageError("--mem must be above 0; leave it out to lend all memory")
    return n_bytes


@dataclass(frozen=True)
class _WorkerOptions(Options):
    host: str = option(
        "--host ADDRESS",
        "127.0.0.1",
        "Address to listen on: a name or IPv4 address of this machine.",
        read=tested(endpoints.address),
    )
    port: int = option("--port N", endpoints.PORT, "Port to listen on (1 to 65535).", valid=Range(1, 65535))
    mem: str | None = option(
        "--mem BYTES",
        None,
        "Memory to lend, for example 8GiB. Clients spread layers in proportion to it.",
        default_text="all",
        read=tested(_lent_bytes),
    )
    threads: int | None = option(
        "-t, --threads N", None, "CPU threads.", default_text="one per core", valid=Range(1, MAX_THREADS)
    )
    verbose: int = option(
        "-v, --verbose",
        0,
        "Show each connection on stderr; -vv also shows llama.cpp's log.",
        default_text=False,
        is_count=True,
    )


@options
def worker(*, args: _WorkerOptions) -> None:
    """Lend this machine's GPUs, or its CPU, to another machine that runs kvtool with --rpc.

    There is no authentication and no encryption: whoever reaches the port can use the devices, read and
    change their memory, and may be able to take over the process. Use it only in networks that you trust.
    """
    address, port = endpoints.address(args.host), args.port
    n_bytes = None if args.mem is None else _lent_bytes(args.mem)
    # first listen at the port here, because ggml would not say why listening fails
    listener(address, port).close()

    from kvtool.llama.libllama.crash import guard
    from kvtool.llama.libllama.log import set_verbose
    from kvtool.llama.libllama.workers import served, server

    set_verbose(args.verbose > 1)
    guard()
    devices = served(n_bytes)
    start = server(f"{address}:{port}", args.threads or default_threads())
    log = _Log(args.verbose)
    signal.signal(signal.SIGTERM, lambda *_: interrupt.end(exit_code=0))
    interrupt.ends()
    if not endpoints.is_loopback(address):
        log.say(
            "there is no authentication: whoever reaches the port can use the devices and read their memory"
        )
    lines = _stdout_lines()

    def serve() -> None:
        try:
            start()
        finally:
            # close the write end of the pipe, so that the loop over `lines` ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    # use a thread, because `start` never returns and the main thread has to handle signals
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    if _listens(thread, address, port):
        log.say(f"serving {_names(devices)} on {address}:{port}, one client at a time; Ctrl-C ends it")
    with lines:
        for line in lines:
            log.take(line)
    raise LibraryError(f"ggml cannot serve on {address}:{port}; -vv shows more")


def listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises UsageError."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        # cut off the end of Python's message, because it repeats the address
        reason = str(error.strerror or error).partition(" (while attempting")[0]
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use, maybe by another kvtool; choose another --port"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = "this machine has no such address; choose another --host (0.0.0.0 means all)"
        raise UsageError(f"cannot listen on {address}:{port}: {reason}") from None


def _listens(thread: threading.Thread, address: str, port: int) -> bool:
    """Wait until a client can connect to the serving thread. Return False if the thread ended."""
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
    return ", ".join(
        f"{device['name']} ({device['description']}, {format_bytes(int(str(device['memory_total'])))})"
        for device in devices
    )


def _stdout_lines() -> TextIO:
    """Return the lines that this process, including C code, writes to stdout from now on."""
    if sys.stdout is None:
        # stdout is closed: open /dev/null as file descriptor 1, so that no end of the pipe gets this number
        os.open(os.devnull, os.O_WRONLY)
    else:
        sys.stdout.flush()
    out, into = os.pipe()
    os.dup2(into, 1)
    os.close(into)
    return os.fdopen(out, encoding="utf-8", errors="replace")


class _Log:
    """Messages of a worker on stderr.

    verbose: 0 to report only longer connections, 1 to report every connection, 2 to also show ggml's output.
    """

    def __init__(self, verbose: int) -> None:
        self.verbose = verbose
        self._timer: threading.Timer | None = None
        self._told = threading.Event()

    def say(self, line: str) -> None:
        # ignore errors, because the terminal may be closed
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"kvtool: {line}\n")
            sys.stderr.flush()

    def take(self, line: str) -> None:
        """Handle a line of ggml's output."""
        if line.startswith("Accepted client"):
            self._timer = threading.Timer(0 if self.verbose else _SHORT_S, self._tell)
            self._timer.daemon = True
            self._timer.start()
        elif line.startswith("Client connection closed"):
            if self._timer:
                self._timer.cancel()
            if self._told.is_set():
                self._told.clear()
                self.say("the client has disconnected")
        elif self.verbose > 1:
            sys.stderr.write(line)

    def _tell(self) -> None:
        self._told.set()
        self.say("a client has connected")
