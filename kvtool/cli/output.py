"""Files that a command writes: checked before it starts, written at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import UsageError
from kvtool.system import files
from kvtool.system.paths import extra_command
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(path: Path | None) -> None:
    """Raise UsageError for a file that cannot be written. Call it before the work starts."""
    if path is None:
        return
    real = path.expanduser()
    if real.is_dir() or not real.parent.is_dir():
        raise UsageError(f"cannot write {path}: it must be a file in an existing folder")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; choose another file")


def records_path(json_to: str | None, resume: bool) -> Path | None:
    """The file that --json names; None if it names none, or - for stdout. Raises UsageError."""
    if json_to in (None, "-"):
        if resume:
            raise UsageError("--resume needs the file to go on with: --json FILE")
        return None
    path = Path(json_to).expanduser()
    check_writable(path)
    # the file is replaced in the end: of a link the target, and never a device or a pipe
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; choose another one, or - for stdout")
    # the lock and the new version of the file are made beside it
    check_writable(path.parent / f"{path.name}.lock")
    if path.exists() and path.stat().st_size and not resume:
        raise UsageError(f"{path} exists; go on with it by --resume, or choose another file")
    return path


def stopped(path: Path | None, n_done: int, n: int, what: str) -> str:
    """The message after Ctrl-C. path: the file of records. n_done: how many of n there are. what: "runs"."""
    if path is None:
        return "stopped; nothing was kept (--json FILE would keep what is done)"
    return f"stopped; {n_done} of {n} {what} are in {path}; --resume does the rest"


def check_picture(flag: str, path: Path | None) -> None:
    """Raise UsageError for a picture that cannot be drawn or written. flag: the option that asks for it."""
    check_writable(path)
    if path:
        check_packages(flag, ("matplotlib",), "plot")


def check_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError for packages that are not installed. extra: the extra of kvtool that has them."""
    from importlib.util import find_spec

    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(f"{what} needs {', '.join(missing)}, which is not installed: {extra_command(extra)}")


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


@contextmanager
def written(*wanted: tuple[Path | None, Callable[[], bytes]]) -> Iterator[None]:
    """Writes the files that have a path, before the context prints the result.

    The error for one that cannot be written comes at the end: no result is lost. Raises UsageError.
    """
    failed = None
    for path, data in wanted:
        try:
            if path:
                write(path, data())
        except UsageError as error:
            failed = error
    yield
    if failed:
        raise failed


def write(path: Path, data: bytes) -> None:
    """Write a file and say so on stderr. Raises UsageError."""
    try:
        files.write(path.expanduser(), data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    sys.stderr.write(f"wrote {path} ({format_bytes(len(data))})\n")
