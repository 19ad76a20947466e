"""Files that a command writes, looked at before it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(path: Path | None) -> None:
    """Raises UsageError for what could not be written in the end, before any work is done."""
    if path is None:
        return
    real = path.expanduser()
    if real.is_dir() or not real.parent.is_dir():
        raise UsageError(f"cannot write {path}: it must be a file in a folder that exists")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; choose another file")


def records_path(json_to: str | None, resume: bool) -> Path | None:
    """The file that --json names; None without one, or for stdout's -. Raises UsageError."""
    if json_to in (None, "-"):
        if resume:
            raise UsageError("--resume needs the file of the run that it goes on with: --json FILE")
        return None
    path = Path(json_to).expanduser()
    check_writable(path)
    # a device or a pipe would be replaced by a file; of a link its target is
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no ordinary file; choose another one, or - for stdout")
    # the lock and what takes the file's place lie beside it
    check_writable(path.parent / f"{path.name}.lock")
    if path.exists() and path.stat().st_size and not resume:
        raise UsageError(f"{path} exists; --resume goes on with it, or choose another file")
    return path


def stopped(path: Path | None, n_done: int, n: int, what: str) -> str:
    """What Ctrl-C has left of n things."""
    if path is None:
        return "stopped; nothing is kept without --json FILE"
    return f"stopped; {n_done} of {n} {what} are in {path}; --resume goes on from there"


def check_picture(flag: str, path: Path | None) -> None:
    """The same for a picture, which matplotlib draws."""
    check_writable(path)
    if path:
        check_packages(flag, ("matplotlib",), "plot")


def check_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raises UsageError for one that is not installed, before any work is done."""
    from importlib.util import find_spec

    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(
            f"{what} needs {', '.join(missing)}, not installed: pip install 'kvtool[{extra}]' "
            f"(in a clone of kvtool: pip install -e '.[{extra}]')"
        )


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def write(path: Path, data: bytes) -> None:
    """Writes it, and says so. Raises UsageError."""
    from kvtool.units import format_bytes

    try:
        path.expanduser().write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    sys.stderr.write(f"wrote {path} ({format_bytes(len(data))})\n")
