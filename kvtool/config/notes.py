"""Notes for the user about options that kvtool changes, or that have no effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvtool.config.run import ALL_LAYERS, RunOptions
from kvtool.models import catalogue
from kvtool.models.resolve import named
from kvtool.models.split import first_part
from kvtool.options import declared
from kvtool.system.texts import shown

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine

R = TypeVar("R", bound=RunOptions)


def within_context(run: R, n_ctx_train: int) -> tuple[R, int, list[str]]:
    """Limit the context length to the trained length, and --batch-size to the context length.

    Returns the options, the context length, and a note for each option that was too large. A batch longer
    than the context cannot be decoded, but llama.cpp would allocate memory for it.
    """
    notes, n_ctx = [], min(run.n_ctx or n_ctx_train, n_ctx_train)
    if run.n_ctx and run.n_ctx > n_ctx:
        notes.append(f"--ctx-size {run.n_ctx:,} is above the model's trained length; {n_ctx:,} is used")
    if run.n_batch and run.n_batch > n_ctx:
        notes.append(f"--batch-size {run.n_batch:,} is above the context length; {n_ctx:,} is used")
        run = replace(run, n_batch=n_ctx)
    return run, n_ctx, notes


def file_note(model: str | None, path: Path) -> str | None:
    """Return a note that names the model's file, or None if the value of -m names it.

    -m does not name the file if it is a repository, a URL without a name, or a later part of a split model.
    """
    model_name = named(model)
    # file names may have bytes that are not UTF-8
    model_shown, name = shown(model_name), shown(path.name)
    if model_name in catalogue.registry() or name in model_shown:
        return None
    is_part = path.name == first_part(Path(model_name)).name
    return f"{model_shown}: {'reading the first part, ' * is_part}{name}"


def gpu_note(run: RunOptions) -> str | None:
    """Return a note if the user gave options for GPUs and there is no GPU, else None.

    Call this after workers are added, because the GPUs of workers are also used.
    """
    from kvtool.llama.libllama.devices import has_gpu

    options = {name: getattr(run, name) for name in ("gpu_layers", "tensor_split", "main_gpu")}
    options["split_mode"] = None if run.split_mode == "layer" else run.split_mode
    options["gpu_layers"] = "all" if run.gpu_layers == ALL_LAYERS else run.gpu_layers
    given = [f"{declared(RunOptions)[name].name} {value}" for name, value in options.items() if value]
    if not given or has_gpu():
        return None
    do = "does" if len(given) == 1 else "do"
    return f"{', '.join(given)} {do} nothing: kvtool finds no GPU (`kvtool doctor` lists the devices)"


def resident_note(engine: Engine) -> str | None:
    """Return a note if --resident was given and the device cannot hold archived tokens, else None."""
    why = engine.residents.obstacle
    return f"--resident {engine.settings.resident} does nothing: {why}" if why else None
