"""From what `-m` says to a file, with a progress bar and a word about the file that was chosen."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtool.cli.progress import bytes_progress
from kvtool.system.texts import shown


def locate(model: str | None, *, paths: bool = True) -> Path:
    """The file of a model, downloaded if need be. Raises ModelError.

    paths: a path will do, too. Where the file is not named, as with a repository, stderr names it.
    """
    from kvtool.models.catalogue import registry
    from kvtool.models.resolve import named, pull

    wanted = named(model)
    with bytes_progress(f"downloading {wanted}") as progress:
        path = pull(wanted, progress, paths=paths)
    # such a name may have bytes that are not UTF-8
    said, name = shown(wanted), shown(path.name)
    if wanted not in registry() and name not in said:
        sys.stderr.write(f"{said}: {name}\n")
    return path
