"""The model of a run: find its file, read the header, and load it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.config.run import ALL_LAYERS, RunOptions
from kvtool.errors import OutOfMemory
from kvtool.llama.loaded.placement import Placement
from kvtool.models import resolve
from kvtool.models.header import ModelInfo
from kvtool.models.weights import EXPERTS, PlacedWeights, place

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model

_MARGIN = 2**30
"""Number of bytes on each GPU that --gpu-layers auto leaves free for compute buffers, as in llama.cpp."""

_RETRY_SHARE = 0.75
"""Share of a GPU's free memory that the second attempt uses if the first attempt to load the model fails."""

T = TypeVar("T")


def find_model(name: str | None) -> ModelInfo:
    """Return the header of the model, after a download if necessary. Raises KvtoolError.

    name: the value of --model.
    """
    if name == "":
        resolve.check_name(name)
    return resolve.check(resolve.resolve(name))


@contextmanager
def loaded_model(run: RunOptions, info: ModelInfo, **how: Any) -> Iterator[Model]:
    """Load the model, and free it at the end. how: options of `opened_on_model`. Raises KvtoolError."""
    with opened_on_model(run, info, lambda model: model, **how) as model:
        yield model


@contextmanager
def opened_on_model(
    run: RunOptions,
    info: ModelInfo,
    open_on: Callable[[Model], T],
    *,
    guarded: bool = False,
    mtp: bool = False,
    n_cell: int = 4096,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[T]:
    """Load the model onto the devices that the options name, and call `open_on`. Free the model at the end.

    Raises KvtoolError.

    open_on: function that is called with the model. Its result is yielded, and the caller closes the result.
    If loading or `open_on` raises OutOfMemory and --gpu-layers is auto, the model is loaded again with fewer
    weights on the GPU, and `open_on` is called once more.
    guarded: True if a crash of compiled code should end the process with one line on stderr.
    mtp: True to also load the layers for multi-token prediction.
    n_cell: number of cells of each row. If --gpu-layers is auto, the GPU keeps room for these cells.
    say: function that prints a line. It is called if not all weights fit on the GPU, or if an option that
    places tensors matches no tensor.
    """
    from kvtool.llama.libllama import crash
    from kvtool.llama.libllama.log import set_verbose
    from kvtool.llama.loaded.model import Model

    set_verbose(run.verbose > 1)
    if guarded:
        crash.guard()
    if run.workers:
        from kvtool.llama.libllama.workers import add_rpc

        add_rpc(*run.workers)

    def load(run: RunOptions) -> tuple[Model, T]:
        model = Model(
            info.path,
            info=info,
            n_gpu_layers=None if run.gpu_layers == ALL_LAYERS else run.gpu_layers,
            placement=run.placement,
            adapters=run.adapters,
            mtp=mtp,
            # a draft model has no workers: it must not use the workers that the large model has
            local=not run.workers,
        )
        try:
            return model, open_on(model)
        except BaseException:
            model.close()
            raise

    for line in _unmatched(run, info):
        say(line)
    placed, note = _fitted_to_gpu(run, info, n_cell, mtp=mtp)
    try:
        model, opened = load(placed)
    except OutOfMemory:
        # try again with less memory: a GPU had less than it reported, or buffers took more than _MARGIN
        placed, note = _fitted_to_gpu(run, info, n_cell, _RETRY_SHARE, mtp=mtp)
        if placed is run:
            raise
        model, opened = load(placed)
    if note:
        say(note)
    try:
        yield opened
    finally:
        model.close()


def _unmatched(run: RunOptions, info: ModelInfo) -> list[str]:
    """Return a line for each option that should place tensors, but matches no tensor of the model."""
    if not run.placement.overrides:
        return []
    # Python does not know the classes of std::regex, such as [[:digit:]], so say nothing about them
    patterns = [
        pattern
        for pattern, _ in run.placement.overrides
        if not pattern.endswith(EXPERTS) and "[:" not in pattern
    ]
    lines = [
        f"--override-tensor: no tensor of the model matches {pattern!r}"
        for pattern in patterns
        if not any(re.search(pattern, name) for name in info.weights.names)
    ]
    if (run.cpu_moe or run.n_cpu_moe) and not any(info.weights.experts):
        given = "--cpu-moe" if run.cpu_moe else f"--n-cpu-moe {run.n_cpu_moe}"
        lines.append(f"{given} does nothing: the model has no experts")
    return lines


def _fitted_to_gpu(
    run: RunOptions, info: ModelInfo, n_cell: int, share: float = 1.0, *, mtp: bool = False
) -> tuple[RunOptions, str]:
    """If not all weights fit on the GPU, set how many layers and experts are on the GPU.

    Returns the changed options and a line about the change. The options stay the same and the line is "" if
    all weights fit, if the user has placed weights with options, if there are workers, or if the GPUs do not
    report their free memory.

    share: share of the free memory that is used.
    """
    from kvtool.llama.libllama.devices import gpu_free_bytes, gpus

    is_open = run.gpu_layers is None and run.placement == Placement() and not run.workers
    if not is_open or not (free := int(gpu_free_bytes() * share)):
        return run, ""
    placed = fitted_weights(info, n_cell, free, len(gpus()), run.type_k, run.type_v, mtp=mtp)
    n_layer, n_cpu_moe = placed.n_gpu_layers, placed.n_cpu_moe
    room = f"the GPU has room for {in_words(placed, info)}"
    if n_layer <= info.weights.n_layer:
        changed = run.changed(gpu_layers=n_layer, cpu_moe=n_cpu_moe > 0)
        return changed, f"{room} (--gpu-layers sets another number)"
    if n_cpu_moe:
        return run.changed(n_cpu_moe=n_cpu_moe), f"{room} (--n-cpu-moe sets another number)"
    return run, ""


def fitted_weights(
    info: ModelInfo,
    n_cell: int,
    n_bytes: int,
    n_gpu: int,
    type_k: str = "f16",
    type_v: str = "f16",
    *,
    mtp: bool = False,
) -> PlacedWeights:
    """Return which weights fit into n_bytes of memory together with a cache of n_cell cells per row.

    n_bytes: memory of all n_gpu GPUs together. mtp: True to include the layers for multi-token prediction,
    and their cache.
    """
    cell_bytes, mtp_bytes = info.plain_layers.cell_bytes, 0
    if mtp:
        # imported here, because the import loads llama.cpp
        from kvtool.drafts import mtp as drafts

        mtp_bytes = cell_bytes() * drafts.N_CELL // info.n_layer
    weights = info.weights if mtp else info.weights.without_mtp()
    cache_bytes = cell_bytes(type_k, type_v) * n_cell // info.n_layer
    cache = [cache_bytes] * info.n_layer + [mtp_bytes] * weights.n_mtp
    return place(weights, cache, n_bytes - _MARGIN * n_gpu)


def in_words(placed: PlacedWeights, info: ModelInfo) -> str:
    """Return the weights on a GPU as text, such as "20 of 25 layers; the rest is in host memory"."""
    n, n_layer = placed.n_gpu_layers, info.weights.n_layer
    if n <= n_layer:
        experts = ", without their experts" if placed.n_cpu_moe else ""
        return f"{n} of {n_layer + 1} layers{experts}; the rest is in host memory"
    if placed.n_cpu_moe:
        return f"all but the experts of {placed.n_cpu_moe} of {n_layer} layers, which are in host memory"
    return "all weights"
