"""Handling of Ctrl-C at each stage. It imports only the standard library."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

EXIT_CODE = 128 + 2
"""Exit code that a shell shows for a program killed by an interrupt."""


def end(*_: object, message: str = "stopped", exit_code: int = EXIT_CODE) -> None:
    """Signal handler: end the process immediately, with one line.

    For stages without unfinished work, such as imports and loading a model. An exception would not work: in a
    ctypes callback it is printed and then ignored, and a bare except swallows it.
    """
    _say(message)
    os._exit(exit_code)


def _say(message: str) -> None:
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        # use the original stderr: a progress bar replaces sys.stderr, and redraws itself below output there
        err = sys.__stderr__ or sys.stderr
        # print below the ^C, and show the cursor, which a progress bar may have hidden
        before = "\x1b[?25h\n" if err.isatty() else ""
        err.write(f"{before}kvtool: {message}\n")
        err.flush()


def end_by(number: int) -> None:
    """End the process with one line. The exit code is 130 for SIGINT; any other signal kills the process."""
    if number == signal.SIGINT:
        end()
    _say("stopped")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def ends() -> None:
    """Make Ctrl-C end the process immediately."""
    signal.signal(signal.SIGINT, end)


def raises() -> None:
    """Make Ctrl-C raise KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising() -> Iterator[None]:
    """Context in which Ctrl-C raises KeyboardInterrupt, so that unfinished work is removed.

    Affects only the main thread, which receives Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(signal.default_int_handler):
        yield


def ending(message: Callable[[], str]) -> AbstractContextManager[None]:
    """Context in which Ctrl-C ends the process with this line. For work whose files are always complete."""
    return _handled(lambda *_: end(message=message()))


@contextmanager
def _handled(handler: Callable[..., object]) -> Iterator[None]:
    """Context in which this handler receives Ctrl-C."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def notifying(notify: Callable[[], None]) -> Iterator[None]:
    """Context in which Ctrl-C also calls `notify` immediately, from another thread.

    A signal handler runs only when C code returns, and a step of llama.cpp can take seconds.
    """
    import socket

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while numbers := ours.recv(64):
            if signal.SIGINT in numbers:
                notify()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        listener.join()
        ours.close()


@contextmanager
def hanging_up(writer: Any) -> Iterator[Callable[[], bool]]:
    """Context in which a closed terminal (SIGHUP) stops the writer after its current step.

    The block can then save the text. At its end SIGHUP is raised again, and ends the process. Does nothing
    where the signal is ignored, or does not exist (Windows). Yields a function that returns True if the
    terminal was closed.
    """
    number, came = getattr(signal, "SIGHUP", None), False
    if number is None or signal.getsignal(number) == signal.SIG_IGN:
        yield lambda: False
        return

    def stop(*_: object) -> None:
        nonlocal came
        came = writer.stop = True

    before = signal.signal(number, stop)
    try:
        yield lambda: came
    finally:
        signal.signal(number, before)
        if came:
            signal.raise_signal(number)


def stops(writer: Any) -> None:
    """Make Ctrl-C stop the writer after its current step; a second Ctrl-C ends the process."""

    def stop(*_: object) -> None:
        writer.stop = True
        ends()

    signal.signal(signal.SIGINT, stop)
