"""Find the model that -m names. If necessary, download it and show a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli.console import say
from kvtool.cli.progress import bytes_progress
from kvtool.config.run import RunOptions
from kvtool.system.texts import shown

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo

R = TypeVar("R", bound=RunOptions)


def locate(model: str | None, *, paths: bool = True) -> Path:
    """Return the file of a model, after downloading it if necessary. Raises ModelError.

    If the value of -m names a repository or a URL without the name of the file, or a later part of a split
    model, the name of the file is written to stderr.

    paths: True if `model` may also be a path.
    """
    from kvtool.models.catalogue import registry
    from kvtool.models.resolve import named, pull
    from kvtool.models.split import first_part

    model_name = named(model)
    with bytes_progress(f"downloading {model_name}") as progress:
        path = pull(model_name, progress, paths=paths)
    # file names may have bytes that are not UTF-8
    model_shown, name = shown(model_name), shown(path.name)
    if model_name not in registry() and name not in model_shown:
        is_part = path.name == first_part(Path(model_name)).name
        say(f"{model_shown}: {'reading the first part, ' * is_part}{name}")
    return path


def locate_model(run: R) -> tuple[R, ModelInfo, int]:
    """Find the model of a run, and limit the options to its trained context.

    Returns the options, the header of the model, and the context length. Writes a note to stderr for each
    option that was too large. Raises KvtoolError.
    """
    from kvtool.config.model import find_model
    from kvtool.config.notes import within_context

    info = find_model(run.model, locate)
    run, n_ctx, limits = within_context(run, info.n_ctx_train)
    say(*limits)
    return run, info, n_ctx
