"""llama.cpp's own log, and what a crash of compiled code means to a person."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtool.errors import KvtoolError, LibraryError, ModelError, OutOfMemory
from kvtool.llama.library import api, check, check_library, is_patched, lib

_LOG_ERROR = 4

log_tail: deque[str] = deque(maxlen=8)

_verbose = False


def _log(level: int, text: bytes, _: object) -> None:
    line = text.decode("utf-8", "replace")
    if level == _LOG_ERROR and line.strip():
        log_tail.append(line.strip().split("\n")[0])
        if _guarding and no_memory():
            # ggml aborts where it gets none
            _set_guard(OutOfMemory())
    if _verbose:
        sys.stderr.write(line)


_log_callback = api.llama_log_callback(_log)

_started = False


def start_backends() -> None:
    global _started
    if not _started:
        api.llama_log_set(_log_callback, ctypes.c_void_p(0))
        api.llama_backend_init()
        _started = True


def set_verbose(on: bool) -> None:
    """Whether llama.cpp's own log goes to stderr."""
    global _verbose
    _verbose = on
    start_backends()


def because() -> str:
    """llama.cpp's first complaint, for the end of an error message: the later ones say who passed it on."""
    return f": {log_tail[0]}" if log_tail else ""


def no_memory() -> bool:
    return any("alloc" in line for line in log_tail)


_guarding = False
_workers: list[str] = []


def guard() -> None:
    """From now on a crash of compiled code ends the process with one line and an exit code.

    ggml aborts where something cannot be, and on a damaged model C++ may read what is not there. Without
    this the process ends with pages of backtrace; so it does with an unpatched library. Not for use as a
    library: handlers are the process's own.
    """
    global _guarding
    check_library()
    start_backends()
    if not is_patched():
        return
    _guarding = True
    _set_guard(lost_worker() or LibraryError(_CRASHED))


_CRASHED = (
    "llama.cpp has crashed (a device that is gone, a damaged model, a policy's kernel, or a fault of "
    "llama.cpp's own); -v shows more"
)


def add_workers(endpoints: Sequence[str]) -> None:
    """From now on a crash may be one of the workers at host:port, ... that is gone."""
    _workers.extend(endpoints)
    if _guarding:
        guard()


def lost_worker() -> LibraryError | None:
    """What a crash most likely is where there are workers."""
    if not _workers:
        return None
    which = f"the worker at {_workers[0]}" if len(_workers) == 1 else f"one of {', '.join(_workers)}"
    return LibraryError(
        f"{which} is gone or has no memory left; start it again, then this "
        "(if it runs, llama.cpp has crashed here: -v shows more)"
    )


def _set_guard(error: KvtoolError) -> None:
    line = f"kvtool: {error}\n"
    if sys.stderr is not None and sys.stderr.isatty():
        # a progress bar has hidden the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    check(lib.llama_kvtool_guard(os.fsencode(line)[:4000], error.exit_code, _verbose))


@contextmanager
def crash_means(error: KvtoolError) -> Iterator[None]:
    """Under a guard: what a crash inside is."""
    if not _guarding:
        yield
        return
    _set_guard(error)
    try:
        yield
    finally:
        guard()


def damaged(path: Path | str) -> KvtoolError:
    return lost_worker() or ModelError(
        f"{path} seems to be damaged: llama.cpp has crashed on it; download it again"
    )
