"""Model of a run: find its file, read its header, load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.models import resolve
from kvtool.models.header import ModelInfo

if TYPE_CHECKING:
    from kvtool.llama.model import Model

Find = Callable[[str | None], Path]
"""Function from the value of --model to the model's file; downloads the file if needed."""


def find_model(name: str | None, find: Find = resolve.resolve) -> ModelInfo:
    """Return the header of the model. name: the value of --model. Raises KvtoolError."""
    if name == "":
        raise UsageError("the model's name is empty; leave out --model for the default")
    return resolve.check(find(name))


@contextmanager
def loaded_model(run: RunOptions, path: Path, *, guarded: bool = False) -> Iterator[Model]:
    """Load the model onto the devices that the options name; free it at the end. Raises KvtoolError.

    guarded: if compiled code crashes, end the process with one line on stderr.
    """
    from kvtool.llama import crash
    from kvtool.llama.log import set_verbose
    from kvtool.llama.model import Model

    set_verbose(run.verbose > 1)
    if guarded:
        crash.guard()
    if run.workers:
        from kvtool.llama.workers import add_rpc

        add_rpc(*run.workers)
    model = Model(path, n_gpu_layers=run.gpu_layers, placement=run.placement, adapters=run.adapters)
    try:
        yield model
    finally:
        model.close()
