"""What Ctrl-C does, stage by stage. Imports the standard library only: it counts from the first import on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

EXIT_CODE = 128 + 2
"""What a shell shows for a program that died of an interrupt."""


def end(*_: object, said: str = "stopped", exit_code: int = EXIT_CODE) -> None:
    """A handler that ends the process at once, in one line.

    For stages that leave nothing to be put in order, as imports and the load of a model: an exception would
    be printed and forgotten where it is raised in a callback of ctypes, and swallowed by a bare except.
    """
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        # after ^C; a progress bar has hidden the cursor
        before = "\x1b[?25h\n" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{before}kvtool: {said}\n")
        sys.stderr.flush()
    os._exit(exit_code)


def ends() -> None:
    """From now on Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, end)


def raises() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, so that what is half done is removed."""
    before = signal.getsignal(signal.SIGINT)
    raises()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ending(said: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C ends the process at once inside, with that line: what is kept is whole all the time."""
    before = signal.signal(signal.SIGINT, lambda *_: end(said=said()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stops(writer: Any) -> None:
    """From now on Ctrl-C ends what the writer does, after its step; a second one ends the process."""

    def stop(*_: object) -> None:
        writer.stop = True
        ends()

    signal.signal(signal.SIGINT, stop)
