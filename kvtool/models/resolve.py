"""From what `-m` says to a file that kvtool can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import ModelError
from kvtool.models.catalogue import registry, unknown
from kvtool.models.header import ModelInfo, read
from kvtool.models.supported import unsupported

if TYPE_CHECKING:
    from kvtool.models.download import Progress


def resolve(name_or_path: str | None = None, progress: Progress | None = None) -> Path:
    """The file of a model, given its name in models.txt or its path. Downloads it if need be.

    Without a name or path, $KVTOOL_MODEL is taken, and without that the first entry of models.txt.
    progress: called during the download. Raises ModelError.
    """
    entries = registry()
    wanted = name_or_path or os.environ.get("KVTOOL_MODEL") or next(iter(entries))
    if wanted in entries:
        entry = entries[wanted]
        if entry.here:
            return entry.path
        # not imported where there is nothing to download
        from kvtool.models.download import pull

        return pull(entry, progress)
    path = Path(wanted).expanduser()
    if path.is_dir():
        raise ModelError(f"{wanted} is a folder; name the GGUF file in it")
    if not path.is_file():
        raise ModelError(unknown(wanted, entries, or_file=True))
    return path


def check(path: Path) -> ModelInfo:
    """Read the header. Raises ModelError for a damaged file and for a model that kvtool cannot run yet."""
    info = read(path)
    if reason := unsupported(info):
        raise ModelError(reason)
    return info
