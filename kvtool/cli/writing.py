"""Functions that prepare a command in which a model writes.

They choose the model and the thinking effort, and make the sampler, the engine and the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli import near
from kvtool.cli.console import say
from kvtool.cli.locate import locate
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.system.texts import exists

if TYPE_CHECKING:
    from kvtool.chats.writer import Writer
    from kvtool.config.generation import GenerationOptions
    from kvtool.config.opening import Opened
    from kvtool.llama.sampling import Sampling

T = TypeVar("T")


def of_model(run: RunOptions, name: str | None) -> RunOptions:
    """Return the options with the model that the argument names. Raises UsageError if -m was also typed.

    name: the argument, or None if it was not typed.
    """
    if name is None:
        return run
    if len(name.split()) > 1 and not exists(name):
        raise UsageError(near.not_a_model(name))
    if "model" in run.typed:
        raise UsageError(f"{name!r} and -m {run.model!r} are two models; leave out one of them")
    return replace(run, model=name, typed=run.typed | {"model"}, given=run.given | {"model"})


def with_thinking(generation: GenerationOptions, think: Callable[[str | None, int | None], T]) -> T:
    """Return the result of `think` for the requested thinking effort and thinking budget.

    `think` raises UsageError if the model's template does not take the effort. This error is raised if the
    user typed the effort. An effort from a setting or a session is left out instead, and a line on stderr
    reports this.
    """
    try:
        return think(generation.think, generation.think_budget)
    except UsageError as error:
        if generation.think is None or "think" in generation.typed:
            raise
        say(f"{error}; it is left out")
        return think(None, generation.think_budget)


def sampling_of(generation: GenerationOptions) -> Sampling:
    """Return the settings of the sampler. Raises UsageError.

    If parts of the JSON schema cannot be enforced, report this on stderr.
    """
    if generation.json_schema is not None:
        from kvtool.llama import schema

        if names := schema.enforced_text(generation.json_schema).not_held:
            say(f"the schema's {', '.join(names)} cannot be enforced; check the JSON for that")
    return generation.sampling()


def why_empty(writer: Writer, noun: str, *, thought: bool = False) -> str | None:
    """Return a message that says why a reply or an answer is empty.

    None if another message gives the reason: the user stopped the text, or the text ended in a loop or at the
    limit.

    noun: "reply" or "answer". thought: True if there was a thought before the text.
    """
    if writer.stop or writer.loop or writer.is_cut:
        return None
    if writer.stopped_by:
        return f"the {noun} is empty: it began with the stop text {writer.stopped_by!r}"
    if not writer.sampler.allows_text():
        return f"the {noun} is empty: the grammar allows no text"
    return f"the model ended its {noun} {'after its thought' if thought else 'at once'}"


@contextmanager
def open_writer(run: RunOptions, generation: GenerationOptions) -> Iterator[tuple[Opened, Writer]]:
    """Open an engine, make its writer, and print the engine's notes on stderr. Raises KvtoolError."""
    sampling = sampling_of(generation)

    # import this after the options are checked, because it loads llama.cpp
    from kvtool.config.opening import open_run

    with open_run(run, find=locate, guarded=True) as opened:
        say(*opened.notes)

        from kvtool.chats.writer import Writer
        from kvtool.config import drafting
        from kvtool.llama.sampler import Sampler

        engine = opened.engine
        with drafting.opened(run, engine.model) as drafts:
            sampler = Sampler(engine.model, sampling, seed=generation.seed)
            yield opened, Writer(engine, sampler, drafts.of(engine))
