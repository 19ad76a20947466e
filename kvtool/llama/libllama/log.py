"""llama.cpp's log: recorded for error messages, shown on request. Also starts ggml's backends."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtool.llama.libllama.bindings import api, load_parts

_LOG_ERROR = 4

log_tail: deque[str] = deque(maxlen=8)
"""Last errors that llama.cpp logged. Clear it before a call whose errors are to be reported."""

_verbose = False
_started = False
_on_error: Callable[[], None] | None = None


def _log(level: int, text: bytes, _: object) -> None:
    line = text.decode("utf-8", "replace")
    if level == _LOG_ERROR and line.strip():
        log_tail.append(line.strip().split("\n")[0])
        if _on_error:
            _on_error()
    if _verbose:
        sys.stderr.write(line)


# global, so that it is not freed: llama.cpp keeps only a pointer
_log_callback = api.llama_log_callback(_log)


def start_backends() -> None:
    """Redirect llama.cpp's log to this module and start ggml's backends. A second call does nothing.

    Raises LibraryError if no backend runs on this CPU.
    """
    global _started
    if not _started:
        api.llama_log_set(_log_callback, ctypes.c_void_p(0))
        load_parts()
        api.llama_backend_init()
        _started = True


def set_verbose(on: bool) -> None:
    """Write llama.cpp's log to stderr, or stop writing it."""
    global _verbose
    _verbose = on
    start_backends()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep llama.cpp's log off stderr in a block. Errors are still recorded."""
    global _verbose
    before, _verbose = _verbose, False
    try:
        yield
    finally:
        _verbose = before


def is_verbose() -> bool:
    """Return True if llama.cpp's log goes to stderr."""
    return _verbose


def call_on_error(function: Callable[[], None]) -> None:
    """Call the function after each error that llama.cpp logs."""
    global _on_error
    _on_error = function


def because() -> str:
    """Return the first error that llama.cpp logged, for the end of a message.

    Later errors are usually only consequences of the first error.
    """
    return f": {log_tail[0]}" if log_tail else ""


def no_memory() -> bool:
    """Return True if a recorded error reports a failed allocation."""
    # a copy, because another thread may log an error now
    return any("alloc" in line for line in log_tail.copy())
