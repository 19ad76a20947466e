"""What Ctrl-C does at each stage. Imports only the standard library: it works from the first import on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

EXIT_CODE = 128 + 2
"""What a shell shows for a program that an interrupt has killed."""


def end(*_: object, said: str = "stopped", exit_code: int = EXIT_CODE) -> None:
    """Ends the process at once, with one line; it is a signal handler.

    For stages that leave nothing unfinished, such as imports and loading a model. An exception would not do:
    one that is raised in a ctypes callback is printed and then ignored, and a bare except swallows it.
    """
    _say(said)
    os._exit(exit_code)


def _say(said: str) -> None:
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        # a progress bar replaces sys.stderr, and draws itself again below what is written there
        err = sys.__stderr__ or sys.stderr
        # below the ^C; a bar may have hidden the cursor
        before = "\x1b[?25h\n" if err.isatty() else ""
        err.write(f"{before}kvtool: {said}\n")
        err.flush()


def end_by(number: int) -> None:
    """Ends the process with one line, and as if the signal had killed it: who has sent it looks for that."""
    if number == signal.SIGINT:
        end()
    _say("stopped")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def ends() -> None:
    """From now on Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, end)


def raises() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, so that unfinished work is removed.

    Nothing changes in other threads than the main one, which is where Ctrl-C comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(signal.default_int_handler):
        yield


def ending(said: Callable[[], str]) -> AbstractContextManager[None]:
    """Inside, Ctrl-C ends the process at once with that line. For work whose files are whole at any time."""
    return _handled(lambda *_: end(said=said()))


@contextmanager
def _handled(handler: Callable[..., object]) -> Iterator[None]:
    """Inside, a handler takes Ctrl-C."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def told(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C also calls `tell` at once, from another thread.

    A handler runs only when C code returns, and a step of llama.cpp can take seconds.
    """
    import socket

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while numbers := ours.recv(64):
            if signal.SIGINT in numbers:
                tell()

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


def stops(writer: Any) -> None:
    """From now on Ctrl-C stops the writer after its current step; a second Ctrl-C ends the process."""

    def stop(*_: object) -> None:
        writer.stop = True
        ends()

    signal.signal(signal.SIGINT, stop)
