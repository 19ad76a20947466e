"""Check the options of the archive, and convert them to settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.config.run import RunOptions
from kvtool.config.sizes import parse_archive
from kvtool.engine.settings import auto_archive_type
from kvtool.errors import UsageError
from kvtool.system import files, memory
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo
    from kvtool.policy import Policy

R = TypeVar("R", bound=RunOptions)


def check(run: RunOptions, kinds: Mapping[str, type[Policy]], flag: str = "--policy") -> None:
    """Raise UsageError if the archive options cannot work with the policies `kinds`, given by name.

    flag: the option that names the policies.
    """
    limit(run.archive, run.archive_file)
    flags = run.typed_archive
    if flags and not any(kind.has_recall() for kind in kinds.values()):
        have = "has" if len(kinds) == 1 else "have"
        listed = " and ".join(filter(None, [", ".join(flags[:-1]), flags[-1]]))
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in kinds)} {have} no archive; leave out {listed}, "
            f"or choose {flag} recall"
        )


def limit(text: str | None, file: Path | None = None) -> dict[str, Any]:
    """Return the engine's setting for the values of --archive and --archive-file.

    It is {"archive": tokens}, {"archive_bytes": bytes}, or {} without --archive. Raises UsageError if the
    text is not a size, or if the memory or the disk has fewer bytes than requested.
    """
    if text is None:
        return {}
    n, is_bytes = parse_archive(text)
    if not is_bytes:
        # do not check whether n tokens fit in memory: n is only a limit, and the stream may have fewer tokens
        return {"archive": n}
    available, place = memory.total_bytes(), "this machine's memory"
    if file is not None:
        available, place = files.free_disk_bytes(file), f"the disk of {file} has free"
    if n > available:
        raise UsageError(f"--archive {text} is more than {place} ({format_bytes(available)}); choose less")
    return {"archive_bytes": n}


def with_type(run: R, info: ModelInfo) -> R:
    """Replace the archive type "auto" by a type that fits the model, and return the options."""
    # imported here, because the import loads llama.cpp
    from kvtool.llama.libllama.devices import has_gpu

    if run.archive_type != "auto":
        return run
    on_gpu = run.gpu_layers != 0 and not run.workers and has_gpu()
    return run.changed(archive_type=auto_archive_type(info, run.prefill, on_gpu=on_gpu))
