"""Model of a run: find its file, read its header, load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import UsageError
from kvtool.llama import endpoints
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


def workers_of(rpc: str | None, gpu_layers: int | None) -> tuple[str, ...]:
    """Return the workers of --rpc, each as "HOST:PORT". Raises UsageError."""
    if rpc is None:
        return ()
    if gpu_layers == 0:
        raise UsageError("--gpu-layers 0 leaves no layer for the workers of --rpc; leave out one of them")
    return tuple(endpoints.parse(rpc))


@contextmanager
def loaded_model(
    path: Path, gpu_layers: int | None, workers: Sequence[str] = (), *, verbose: bool, guarded: bool = False
) -> Iterator[Model]:
    """Load the model, and free it at the end. Raises KvtoolError.

    verbose: show llama.cpp's log. guarded: a crash of compiled code ends the process with one line.
    """
    from kvtool.llama import crash
    from kvtool.llama.log import set_verbose
    from kvtool.llama.model import Model

    set_verbose(verbose)
    if guarded:
        crash.guard()
    if workers:
        from kvtool.llama.workers import add_rpc

        add_rpc(*workers)
    model = Model(path, n_gpu_layers=gpu_layers)
    try:
        yield model
    finally:
        model.close()
