"""The file that a command line means by a model."""

from __future__ import annotations

import os
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models.catalogue import registry
from kvtool.models.download import Progress, pull
from kvtool.models.header import ModelInfo, read
from kvtool.models.supported import unsupported


def resolve(name_or_path: str | None = None, progress: Progress | None = None) -> Path:
    """The file that `-m` means: a name of models.txt, downloaded when it is not there, or else a path.

    Without it $KVTOOL_MODEL counts the same way, and then the first line of models.txt.
    """
    models = registry()
    wanted = name_or_path or os.environ.get("KVTOOL_MODEL") or next(iter(models))
    if wanted in models:
        return pull(models[wanted], progress)
    path = Path(wanted).expanduser()
    if path.is_dir():
        raise ModelError(f"{wanted} is a folder; name the GGUF file in it")
    if not path.is_file():
        raise ModelError(
            f"no model and no file {wanted!r}; there are: {', '.join(models)}; a path to a file works as well"
        )
    return path


def check(path: Path) -> ModelInfo:
    """Reads the header. Raises ModelError for a damaged file and for a model that kvtool cannot run yet."""
    info = read(path)
    if reason := unsupported(info):
        raise ModelError(reason)
    return info
