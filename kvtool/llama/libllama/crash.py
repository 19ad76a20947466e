"""Report a crash of compiled code in one line and by an exit code, instead of a backtrace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtool.errors import KvtoolError, LibraryError, ModelError, OutOfMemory
from kvtool.llama.libllama.library import check, check_library, lib
from kvtool.llama.libllama.log import call_on_error, is_verbose, no_memory, start_backends

_CRASHED = (
    "llama.cpp has crashed (too little memory, a device that is gone, a damaged model, a policy's kernel, or "
    "a fault of llama.cpp's own); -vv shows more"
)

_guarding = False
_workers: list[str] = []


def guard() -> None:
    """Let a crash of compiled code end the process with one line and an exit code.

    ggml aborts on some errors, and a damaged model can make C++ read out of bounds. Without this guard, pages
    of backtrace follow. The guard sets signal handlers of the whole process: call it in a program, not in a
    library.
    """
    global _guarding
    check_library()
    start_backends()
    _guarding = True
    call_on_error(_expect_no_memory)
    _announce(lost_worker() or LibraryError(_CRASHED))


@contextmanager
def crash_means(error: KvtoolError) -> Iterator[None]:
    """Report a crash inside this block as the given error. Does nothing without `guard`."""
    if not _guarding:
        yield
        return
    _announce(error)
    try:
        yield
    finally:
        guard()


def damaged(path: Path | str) -> KvtoolError:
    """Return the likely cause of a crash while llama.cpp reads a model: a lost worker or a damaged file."""
    return lost_worker() or ModelError(
        f"{path} seems to be damaged: llama.cpp has crashed on it; download it again"
    )


def add_workers(endpoints: Sequence[str]) -> None:
    """Register workers, as host:port. A later crash may then be reported as the loss of a worker."""
    _workers.extend(endpoints)
    if _guarding:
        guard()


def lost_worker() -> LibraryError | None:
    """Return an error that reports a lost worker; None if there are no workers."""
    if not _workers:
        return None
    which = f"the worker at {_workers[0]}" if len(_workers) == 1 else f"one of {', '.join(_workers)}"
    return LibraryError(
        f"{which} does not answer; restart it, then repeat this command "
        "(if the worker still runs, llama.cpp may have crashed here: -vv shows more)"
    )


def _expect_no_memory() -> None:
    if no_memory():
        # ggml aborts after a failed allocation, so prepare for this crash
        _announce(OutOfMemory())


def _announce(error: KvtoolError) -> None:
    """Set the line that a later crash prints, and its exit code."""
    line = f"kvtool: {error}\n"
    if sys.stderr is not None and sys.stderr.isatty():
        # show the cursor, which a progress bar may have hidden
        line = f"\r\x1b[K\x1b[?25h{line}"
    check(lib.llama_kvtool_guard(os.fsencode(line)[:4000], error.exit_code, is_verbose()))
