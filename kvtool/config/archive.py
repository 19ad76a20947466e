"""The archive of a policy that recalls: what its options stand for, and where they cannot work."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kvtool import policies
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.options import ARCHIVE, declared
from kvtool.system import files, memory
from kvtool.units import format_bytes, parse_count

if TYPE_CHECKING:
    from kvtool.policy import Policy


def checked(run: RunOptions, kinds: Mapping[str, type[Policy]]) -> dict[str, int]:
    """The limit of an archive, as `limit` gives it. Raises UsageError for options of it that cannot work.

    kinds: the policies that the options are for, by name.
    """
    check_file(run.archive_file)
    found = limit(run.archive, run.archive_file)
    check_recalls(kinds, run.typed)
    return found


def check_recalls(kinds: Mapping[str, type[Policy]], typed: Collection[str]) -> None:
    """Raise UsageError if options of the archive were typed, and none of the policies has one."""
    its = {name: option for name, option in declared(RunOptions).items() if option.group == ARCHIVE}
    flags = [option.flags[0] for name, option in its.items() if name in typed]
    if flags and not any(map(policies.recalls, kinds.values())):
        have = "has" if len(kinds) == 1 else "have"
        listed = " and ".join(filter(None, [", ".join(flags[:-1]), flags[-1]]))
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in kinds)} {have} no archive; leave out {listed}, "
            "or choose --policy recall"
        )


def limit(text: str | None, file: str | None = None) -> dict[str, int]:
    """The engine's setting for --archive: `archive` tokens or `archive_bytes`; neither without it.

    file: --archive-file. Raises UsageError for what is no size, and for bytes that there are not.
    """
    if text is None:
        return {}
    try:
        n, is_bytes = parse_count(text)
    except UsageError:
        raise UsageError(f"--archive is a number of tokens (20000) or bytes (2GiB), got {text!r}") from None
    if n < 1:
        raise UsageError(
            f"--archive {text} is too small; give at least 1 token, or choose --policy streamingllm, "
            "which archives nothing"
        )
    if not is_bytes:
        # a cap, which the stream may never reach
        return {"archive": n}
    most, what = memory.total_bytes(), "this machine's memory"
    if file is not None:
        most, what = files.free_disk_bytes(file), f"the disk of {file} has free"
    if n > most:
        raise UsageError(f"--archive {text} is more than {what} ({format_bytes(most)}); choose less")
    return {"archive_bytes": n}


def check_file(file: str | None) -> None:
    """Raise UsageError for an --archive-file that cannot be created."""
    if file is None:
        return
    if sys.platform == "win32":
        raise UsageError("--archive-file does not work on Windows yet; leave it out")
    folder = os.path.dirname(os.path.abspath(file))
    wrong = None
    if not file:
        wrong = "is not the name of a file"
    elif os.path.isdir(file):
        wrong = "is a folder"
    elif os.path.lexists(file):
        wrong = "exists already"
    elif not os.path.isdir(folder):
        wrong = f"cannot be created: there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"cannot be created: no permission to write to {folder}"
    if wrong:
        raise UsageError(f"--archive-file {file!r} {wrong}; name a new file")
