"""llama.cpp's own log: kept for error messages, shown on request. The backends start with it."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtool.llama.bindings import api, load_parts

_LOG_ERROR = 4

log_tail: deque[str] = deque(maxlen=8)
"""The last errors that llama.cpp has logged. Clear it before a call whose errors you want to name."""

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


# llama.cpp keeps only a pointer to it
_log_callback = api.llama_log_callback(_log)


def start_backends() -> None:
    """Starts ggml's backends, with the log of llama.cpp coming here. A second call does nothing.

    Raises LibraryError if none runs on this CPU.
    """
    global _started
    if not _started:
        api.llama_log_set(_log_callback, ctypes.c_void_p(0))
        load_parts()
        api.llama_backend_init()
        _started = True


def set_verbose(on: bool) -> None:
    """Whether llama.cpp's own log goes to stderr."""
    global _verbose
    _verbose = on
    start_backends()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps llama.cpp's log from stderr in a block; errors still count."""
    global _verbose
    before, _verbose = _verbose, False
    try:
        yield
    finally:
        _verbose = before


def is_verbose() -> bool:
    """Whether it does."""
    return _verbose


def call_on_error(function: Callable[[], None]) -> None:
    """Lets a function be called after each error that llama.cpp logs."""
    global _on_error
    _on_error = function


def because() -> str:
    """llama.cpp's first error, for the end of a message: later ones only say who passed it on."""
    return f": {log_tail[0]}" if log_tail else ""


def no_memory() -> bool:
    """Whether an allocation has failed, by the last errors."""
    return any("alloc" in line for line in log_tail)
