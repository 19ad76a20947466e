"""Find or download the file of the model that -m names, with a progress bar for a download."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtool.cli.progress import bytes_progress
from kvtool.system.texts import shown


def locate(model: str | None, *, paths: bool = True) -> Path:
    """Return the file of a model; download it if needed. Raises ModelError.

    If the value of -m does not contain the file's name, as for a repository, report the name on stderr.
    paths: accept a path in addition to a name.
    """
    from kvtool.models.catalogue import registry
    from kvtool.models.resolve import named, pull

    model_name = named(model)
    with bytes_progress(f"downloading {model_name}") as progress:
        path = pull(model_name, progress, paths=paths)
    # file names may have bytes that are not UTF-8
    model_shown, name = shown(model_name), shown(path.name)
    if model_name not in registry() and name not in model_shown:
        sys.stderr.write(f"{model_shown}: {name}\n")
    return path
