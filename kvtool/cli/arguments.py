"""Options that a command combines: the model argument, thinking, and the settings of the sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli import near
from kvtool.cli.console import say
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.config.generation import GenerationOptions
    from kvtool.llama.sampling import Sampling

T = TypeVar("T")


def of_model(run: RunOptions, name: str | None) -> RunOptions:
    """The options with a model that may come as an argument. Raises UsageError for both."""
    if name is None:
        return run
    if len(name.split()) > 1 and not Path(name).expanduser().exists():
        raise UsageError(near.not_a_model(name))
    if "model" in run.typed:
        raise UsageError(f"{name!r} and -m {run.model!r} are two models; leave out one of them")
    return replace(run, model=name, typed=run.typed | {"model"}, given=run.given | {"model"})


def with_thinking(generation: GenerationOptions, think: Callable[[str | None, int | None], T]) -> T:
    """Call think(effort, budget) with what is asked for.

    An effort that the model's template does not take is an error only if it was typed. One of a setting or a
    session is left out, with a line on stderr. Raises UsageError.
    """
    try:
        return think(generation.think, generation.think_budget)
    except UsageError as error:
        if generation.think is None or "think" in generation.typed:
            raise
        say([f"{error}; it is left out"])
        return think(None, generation.think_budget)


def sampling_of(generation: GenerationOptions) -> Sampling:
    """The sampler's settings. Says on stderr which parts of a schema are not enforced. Raises UsageError."""
    if generation.json_schema is not None:
        from kvtool.llama import schema

        if names := schema.enforced_text(generation.json_schema).not_held:
            say([f"the schema's {', '.join(names)} cannot be enforced; check the JSON for that"])
    return generation.sampling()
