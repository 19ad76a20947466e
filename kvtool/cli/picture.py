"""Files that a command draws or writes in the end, looked at before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(path: Path | None) -> None:
    """Raises UsageError for what could not be written in the end, before any work is done."""
    if path and (path.is_dir() or not path.expanduser().parent.is_dir()):
        raise UsageError(f"cannot write {path}: it must be a file in a folder that exists")


def check_picture(flag: str, path: Path | None) -> None:
    """The same for a picture, which matplotlib draws."""
    from importlib.util import find_spec

    check_writable(path)
    if path and find_spec("matplotlib") is None:
        raise UsageError(
            f"{flag} needs matplotlib, which is not installed: pip install 'kvtool[plot]' "
            "(in a clone of kvtool: pip install -e '.[plot]')"
        )


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def write(path: Path, data: bytes) -> None:
    """Raises OSError."""
    from kvtool.units import format_bytes

    path.expanduser().write_bytes(data)
    sys.stderr.write(f"wrote {path} ({format_bytes(len(data))})\n")
