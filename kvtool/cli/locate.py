"""Find the model that -m names, download it if necessary, and name its file on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli.console import say
from kvtool.config.run import RunOptions

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo

R = TypeVar("R", bound=RunOptions)


def locate(model: str | None) -> Path:
    """Return the file of a model. Writes the note of `file_note` to stderr. Raises ModelError."""
    from kvtool.config.notes import file_note
    from kvtool.models.resolve import resolve

    path = resolve(model)
    say(file_note(model, path))
    return path


def locate_model(run: R) -> tuple[R, ModelInfo, int]:
    """Find the model of a run, and limit the options to its trained context.

    Returns the options, the header of the model, and the context length. Writes the note of `file_note` to
    stderr, and a note for each option that was too large. Raises KvtoolError.
    """
    from kvtool.config.model import find_model
    from kvtool.config.notes import file_note, within_context

    info = find_model(run.model)
    run, n_ctx, limits = within_context(run, info.n_ctx_train)
    say(file_note(run.model, info.path), *limits)
    return run, info, n_ctx
