"""Reactions of a program to Ctrl-C, SIGTERM and SIGHUP. Imports only the standard library."""

from __future__ import annotations

# `_signal` sets a handler in 1 us; `signal` takes 10 us, which is too long for each step
import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from typing import Any

EXIT_CODE = 128 + 2
"""Exit code that a shell reports for a program that was killed by SIGINT."""

before_end: list[Callable[[], None]] = []
"""Functions that `end` calls first, for example to show typed characters again."""

_TERMINATING = [getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)]
"""Signals that end a program when its terminal is closed (not on Windows) or when another program asks."""


def end(
    number: int = signal.SIGINT, _: object = None, *, message: str = "stopped", exit_code: int | None = None
) -> None:
    """End the process immediately, with one line. This is a signal handler.

    Without `exit_code`, the exit code is the one that a shell reports for the signal `number`.

    Use it while there is no unfinished work, for example during imports or while a model is loaded. An
    exception would not always end the process. If an exception is raised in a callback of ctypes, it is
    printed and then ignored. A bare except clause also ignores exceptions.
    """
    for restore in before_end:
        restore()
    _say(message)
    os._exit(128 + number if exit_code is None else exit_code)


def _say(message: str) -> None:
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        # use the original stderr, because a progress bar replaces sys.stderr and redraws itself after output
        err = sys.__stderr__ or sys.stderr
        # begin a new line after the ^C, and show the cursor, because a progress bar may have hidden it
        before = "\x1b[?25h\n" if err.isatty() else ""
        err.write(f"{before}kvtool: {message}\n")
        err.flush()


def end_by(number: int) -> None:
    """End the process with one line after a signal.

    For SIGINT, the exit code is 130. Any other signal is raised again and kills the process.
    """
    if number == signal.SIGINT:
        end()
    _say("stopped")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def ends() -> None:
    """Make Ctrl-C end the process immediately."""
    signal.signal(signal.SIGINT, end)


def ignores() -> None:
    """Make Ctrl-C do nothing.

    Programs that this process starts still receive Ctrl-C. (They would not with SIG_IGN.)
    """
    signal.signal(signal.SIGINT, lambda *_: None)


@contextmanager
def raising() -> Iterator[None]:
    """Inside the block, Ctrl-C raises KeyboardInterrupt, so that unfinished work is removed.

    This does nothing in other threads than the main thread, because only the main thread receives Ctrl-C.
    """
    if not _is_main():
        yield
        return
    with _handled(signal.default_int_handler):
        yield


class _Delayed(ContextDecorator):
    """See `delayed`."""

    def __init__(self) -> None:
        # how many blocks the main thread is in, and whether Ctrl-C came meanwhile
        self._depth, self._came = 0, False

    def __enter__(self) -> None:
        if not _is_main():
            return
        if self._depth:
            self._depth += 1
        elif _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._came = False
            _signal.signal(signal.SIGINT, self._note)
            self._depth = 1

    def __exit__(self, *_: object) -> None:
        if not (_is_main() and self._depth):
            return
        self._depth -= 1
        if not self._depth:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came:
                raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        if self._came or not self._depth:
            self._depth = 0
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._came = True

    @property
    def is_over(self) -> bool:
        """True if Ctrl-C waits for the end of the block, so that a block with several steps should end."""
        return self._depth > 0 and self._came and _is_main()


delayed = _Delayed()
"""Block, or decorator of a function, that Ctrl-C does not interrupt: `with delayed:`.

KeyboardInterrupt is raised at the end of the block; if blocks are nested, at the end of the outermost block.
A second Ctrl-C is raised at once, because a policy's code might never return.

The block does nothing in other threads than the main thread. It also does nothing if the program has set its
own handler for Ctrl-C, because this handler may have to act at once. kvtool's commands do that.
"""


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def ending(message: Callable[[], str]) -> AbstractContextManager[None]:
    """Inside the block, Ctrl-C ends the process with a line.

    Use this for work that never leaves incomplete files.
    """
    return _handled(lambda number, _: end(number, message=message()))


@contextmanager
def _handled(handler: Callable[..., object], numbers: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Inside the block, `handler` is called at Ctrl-C, or at the signals `numbers`."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


@contextmanager
def like_ctrl_c() -> Iterator[list[int]]:
    """Inside the block, SIGHUP and SIGTERM do what Ctrl-C does.

    Yields a list to which each of these signals is added. An ignored signal stays ignored.
    """
    came: list[int] = []

    def forward(number: int, frame: object) -> None:
        came.append(number)
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(number, frame)

    with _handled(forward, not_ignored()):
        yield came


def not_ignored() -> list[int]:
    """Return SIGHUP and SIGTERM, but only those that the process does not ignore."""
    return [number for number in _TERMINATING if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def notifying(notify: Callable[[], None]) -> Iterator[None]:
    """Inside the block, Ctrl-C, SIGHUP and SIGTERM also call `notify` immediately, from another thread.

    SIGHUP and SIGTERM do this only if they have a handler. Python runs a signal handler only after C code has
    returned, and a step of llama.cpp can take seconds.
    """
    import socket

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while numbers := ours.recv(64):
            if not {signal.SIGINT, *_TERMINATING}.isdisjoint(numbers):
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
def terminating(writer: Any) -> Iterator[Callable[[], bool]]:
    """Inside the block, SIGHUP and SIGTERM stop the writer after its current step.

    The block can then save the text. After the block, the signal is raised again and ends the process. Yields
    a function that returns True if there was such a signal. An ignored signal stays ignored.
    """
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        writer.stop = True

    try:
        with _handled(stop, not_ignored()):
            yield lambda: bool(came)
    finally:
        for number in came:
            signal.raise_signal(number)


def stops(writer: Any) -> None:
    """Make Ctrl-C stop the writer after its current step. A second Ctrl-C ends the process."""

    def stop(*_: object) -> None:
        writer.stop = True
        ends()

    signal.signal(signal.SIGINT, stop)
