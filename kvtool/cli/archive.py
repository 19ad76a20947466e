"""The archive of a policy that recalls: its options, and what is said of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine

_FLAGS = {"archive": "--archive", "archive_file": "--archive-file", "archive_type": "--archive-type"}

FLAGS = tuple(_FLAGS)
"""The parameters that commands have for it."""


def check_recalls(names: Sequence[str], typed: Collection[str]) -> None:
    """Raise UsageError if options of the archive were typed, and none of the policies has one."""
    flags = [_FLAGS[name] for name in _FLAGS if name in typed]
    if not flags:
        return

    from kvtool import policies

    if not any(policies.recalls(policies.load(name)) for name in names):
        have = "has" if len(names) == 1 else "have"
        listed = " and ".join(filter(None, [", ".join(flags[:-1]), flags[-1]]))
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in names)} {have} no archive; leave out {listed}, "
            "or choose --policy recall"
        )


def archive_of(text: str, file: str | None = None, rpc: str | None = None) -> dict[str, int]:
    """The settings that --archive stands for: "20000" tokens, or "2GiB". Raises UsageError.

    file, rpc: what --archive-file and --rpc say, checked already.
    """
    from kvtool.system.files import free_disk_bytes
    from kvtool.system.memory import total_bytes
    from kvtool.units import format_bytes, parse_count

    try:
        n, is_bytes = parse_count(text)
    except UsageError:
        raise UsageError(f"--archive is a number of tokens (20000) or bytes (2GiB), got {text!r}") from None
    if n < 1:
        raise UsageError(
            f"--archive {text} holds no token; give at least 1, or choose --policy streamingllm, "
            "which archives none"
        )
    if not is_bytes:
        # a cap, which the stream may never reach
        return {"archive": n}
    if file is None and rpc is not None:
        # other machines have some of it
        return {"archive_bytes": n}
    most, what = total_bytes(), "this machine's memory"
    if file is not None:
        most, what = free_disk_bytes(file), f"the disk of {file} has free"
    if n > most:
        raise UsageError(f"--archive {text} is more than {what} ({format_bytes(most)}); choose less")
    return {"archive_bytes": n}


def check_archive_file(file: str | None) -> None:
    """Raise UsageError for an --archive-file that cannot be made."""
    if file is None:
        return
    if sys.platform == "win32":
        raise UsageError("--archive-file does not work on Windows yet; leave it out")
    folder = os.path.dirname(os.path.abspath(file))
    wrong = None
    if not file:
        wrong = "names no file"
    elif os.path.isdir(file):
        wrong = "is a folder"
    elif os.path.lexists(file):
        wrong = "exists already"
    elif not os.path.isdir(folder):
        wrong = f"cannot be made: there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"cannot be made: you may not write to {folder}"
    if wrong:
        raise UsageError(f"--archive-file {file!r} {wrong}; name a new file")


def check_archive_type(kind: str) -> None:
    """Raise UsageError for a value that --archive-type does not take."""
    from kvtool.models.layers import CACHE_TYPES

    if kind not in CACHE_TYPES:
        raise UsageError(f"--archive-type must be one of {', '.join(CACHE_TYPES)}, got {kind!r}")


def archive_record(engine: Engine) -> dict[str, Any]:
    """What --json says of it: tokens and bytes now, the most tokens, and where it lies, if in a file.

    0, 0, None and None without one.
    """
    archive = engine.context.archive
    return {
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "archive_limit": archive.n_max if archive else None,
        "archive_file": archive.file if archive else None,
    }


def archive_line(record: dict[str, Any]) -> str:
    """The same for people. record: as `archive_record` gives it, with an archive."""
    from kvtool.units import format_bytes

    file = record["archive_file"]
    return (
        f"{record['archived']:,} of at most {record['archive_limit']:,} tokens, "
        f"{format_bytes(record['archive_bytes'])} {'of host memory' if file is None else f'on disk ({file})'}"
    )


def archive_limit(engine: Engine) -> str:
    """The most tokens of it, and where it lies if that is a file; "" without one."""
    archive = engine.context.archive
    if not archive:
        return ""
    return f"an archive of at most {archive.n_max:,} tokens{f' in {archive.file}' if archive.file else ''}"
