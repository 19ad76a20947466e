"""Files that a command writes: check them before the command's work starts, and write them at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import KvtoolError, UsageError
from kvtool.system import files, interrupt
from kvtool.system.paths import extra_command
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Stopped(KvtoolError):
    """Raised after the user stopped a command. The finished runs have been printed or saved."""

    exit_code = interrupt.EXIT_CODE


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside the block, SIGHUP and SIGTERM do what Ctrl-C does, and the exit code tells which signal came."""
    with interrupt.like_ctrl_c() as came:
        try:
            yield
        except (KeyboardInterrupt, Stopped) as error:
            if not came:
                raise
            stopped = Stopped(str(error) or "stopped")
            stopped.exit_code = 128 + came[0]
            raise stopped from None


def check_writable(path: Path | None) -> None:
    """Raise UsageError if a file cannot be written. Call this before the work starts."""
    if path is None:
        return
    if str(path) == "-":
        raise UsageError("cannot write to -, because stdout has the result; name a file")
    real = path.expanduser()
    if real.is_dir() or not real.parent.is_dir():
        raise UsageError(f"cannot write {path}: it must be a file in an existing folder")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; choose another file")


def check_apart(*named: tuple[str, Path | None]) -> None:
    """Raise UsageError if two options name the same file, also by a link.

    named: pairs of an option and its file. Options without a file are ignored.
    """
    taken: dict[str, str] = {}
    for flag, path in named:
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise UsageError(f"{taken[real]} and {flag} name the same file, {path}; name another file")
        taken[real] = flag


def records_path(records: str | None, resume: bool) -> Path | None:
    """Check --records and --resume. Return the path, or None without --records. Raises UsageError."""
    if records is None:
        if resume:
            raise UsageError("--resume needs the file to go on with: --records FILE")
        return None
    path = Path(records).expanduser()
    check_writable(path)
    # the file will be replaced: resolve a link, so that its target is replaced; refuse devices and pipes
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; choose another one")
    # the folder has to be writable, because the lock and the new version will be written to it
    check_writable(path.parent / f"{path.name}.lock")
    if path.exists() and path.stat().st_size and not resume:
        raise UsageError(f"{path} exists; continue it with --resume, or choose another file")
    return path


def stopped(path: Path | None, n_done: int, n: int, unit: str) -> str:
    """Return the message after Ctrl-C. path: the file of --records."""
    if path is None:
        return "stopped; nothing was kept (--records FILE keeps finished ones)"
    return f"stopped; {n_done} of {n} {unit} are in {path}; --resume does the rest"


def check_picture(path: Path | None) -> None:
    """Raise UsageError if the picture of --plot cannot be drawn or written."""
    check_writable(path)
    if path and path.suffix.lower() not in ("", ".png"):
        raise UsageError(f"--plot draws a PNG picture; end its name in .png, not in {path.suffix}")
    if path:
        check_packages("--plot", ("matplotlib",), "plot")


def check_packages(name: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError if a package is not installed. extra: the extra of kvtool that installs it."""
    from importlib.util import find_spec

    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(f"{name} needs {', '.join(missing)}, which is not installed: {extra_command(extra)}")


def png(figure: Figure) -> bytes:
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def write(path: Path, data: bytes) -> None:
    """Write a file and report it on stderr. Raises KvtoolError."""
    try:
        files.write(path.expanduser(), data)
    except OSError as error:
        raise KvtoolError(f"cannot write {path}: {error.strerror}") from None
    sys.stderr.write(f"wrote {path} ({format_bytes(len(data))})\n")
