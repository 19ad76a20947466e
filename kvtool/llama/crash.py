"""What a crash of compiled code means to a person: one line and an exit code in place of a backtrace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtool.errors import KvtoolError, LibraryError, ModelError, OutOfMemory
from kvtool.llama.library import check, check_library, is_patched, lib
from kvtool.llama.log import call_on_error, is_verbose, no_memory, start_backends

_CRASHED = (
    "llama.cpp has crashed (a device that is gone, a damaged model, a policy's kernel, or a fault of "
    "llama.cpp's own); -vv shows more"
)

_guarding = False
_workers: list[str] = []


def guard() -> None:
    """From now on a crash of compiled code ends the process with one line and an exit code.

    ggml aborts when it cannot continue, and on a damaged model C++ may read past the end. Without a guard,
    and with an unpatched library, the process then ends with pages of backtrace. Signal handlers belong to
    the whole process: call this in a program, not in a library.
    """
    global _guarding
    check_library()
    start_backends()
    if not is_patched():
        return
    _guarding = True
    call_on_error(_expect_no_memory)
    _announce(lost_worker() or LibraryError(_CRASHED))


@contextmanager
def crash_means(error: KvtoolError) -> Iterator[None]:
    """Under a guard, a crash inside this block is that error. Without one it does nothing."""
    if not _guarding:
        yield
        return
    _announce(error)
    try:
        yield
    finally:
        guard()


def damaged(path: Path | str) -> KvtoolError:
    """What a crash means while llama.cpp reads a model: a damaged file, or a worker that is gone."""
    return lost_worker() or ModelError(
        f"{path} seems to be damaged: llama.cpp has crashed on it; download it again"
    )


def add_workers(endpoints: Sequence[str]) -> None:
    """From now on a crash may mean that one of the workers at host:port, ... is gone."""
    _workers.extend(endpoints)
    if _guarding:
        guard()


def lost_worker() -> LibraryError | None:
    """What a crash most likely means if there are workers."""
    if not _workers:
        return None
    which = f"the worker at {_workers[0]}" if len(_workers) == 1 else f"one of {', '.join(_workers)}"
    return LibraryError(
        f"{which} is gone or has no memory left; start it again, then this "
        "(if it runs, llama.cpp has crashed here: -vv shows more)"
    )


def _expect_no_memory() -> None:
    if no_memory():
        # ggml aborts when an allocation fails
        _announce(OutOfMemory())


def _announce(error: KvtoolError) -> None:
    """Sets what a crash says and exits with."""
    line = f"kvtool: {error}\n"
    if sys.stderr is not None and sys.stderr.isatty():
        # a progress bar has hidden the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    check(lib.llama_kvtool_guard(os.fsencode(line)[:4000], error.exit_code, is_verbose()))
