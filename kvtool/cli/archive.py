"""The archive of a policy that recalls: its options, and what is said of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine

_FLAGS = {"archive": "--archive", "archive_type": "--archive-type"}


def check_recalls(names: Sequence[str], typed: Collection[str]) -> None:
    """Raise UsageError if options of the archive were typed, and none of the policies has one."""
    flags = [_FLAGS[name] for name in _FLAGS if name in typed]
    if not flags:
        return

    from kvtool import policies

    if not any(policies.recalls(policies.load(name)) for name in names):
        have = "has" if len(names) == 1 else "have"
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in names)} {have} no archive; leave out {' and '.join(flags)}, "
            "or choose --policy recall"
        )


def archive_of(text: str) -> dict[str, int]:
    """The settings that --archive stands for: "20000" tokens, or "2GiB". Raises UsageError."""
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
    if n > (most := total_bytes()):
        raise UsageError(
            f"--archive {text} is more than this machine's memory ({format_bytes(most)}); choose less"
        )
    return {"archive_bytes": n}


def check_archive_type(kind: str) -> None:
    """Raise UsageError for a value that --archive-type does not take."""
    from kvtool.models.header import CACHE_TYPES

    if kind not in CACHE_TYPES:
        raise UsageError(f"--archive-type must be one of {', '.join(CACHE_TYPES)}, got {kind!r}")


def archive_record(engine: Engine) -> dict[str, Any]:
    """What --json says of it: tokens and bytes now, and the most tokens; 0, 0 and None without one."""
    archive = engine.context.archive
    return {
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "archive_limit": archive.n_max if archive else None,
    }


def archive_line(record: dict[str, Any]) -> str:
    """The same for people. record: as `archive_record` gives it, with an archive."""
    from kvtool.units import format_bytes

    return (
        f"{record['archived']:,} of at most {record['archive_limit']:,} tokens, "
        f"{format_bytes(record['archive_bytes'])} of host memory"
    )
