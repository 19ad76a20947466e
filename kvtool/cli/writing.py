"""Functions of commands in which a model writes.

They choose the model and the thinking effort, make the sampler, the engine and the writer, and say why a text
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli import near
from kvtool.cli.console import say
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.system.texts import exists
from kvtool.units import format_tokens

if TYPE_CHECKING:
    from kvtool.chats.writer import Writer
    from kvtool.config.generation import GenerationOptions
    from kvtool.config.opening import Opened
    from kvtool.llama.sampling import Sampling

T = TypeVar("T")


def of_model(run: RunOptions, name: str | None) -> RunOptions:
    """Return the options with the model that the argument names. Raises UsageError if -m was also typed."""
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
        from kvtool.llama.grammar import schema

        if names := schema.enforced_text(generation.json_schema).not_held:
            say(f"the schema's {', '.join(names)} cannot be enforced; check the JSON for that")
    return generation.sampling()


def end_note(
    writer: Writer,
    generation: GenerationOptions,
    noun: str,
    *,
    is_empty: bool,
    thought: bool = False,
    in_terminal: bool = False,
) -> str | None:
    """Return a note if a text ended in a loop or at its limit, or is empty.

    None if it ended as texts should, or if the user stopped it.

    noun: "reply" or "answer". thought: True if there was a thought before the text. in_terminal: True if the
    user can type the commands of a chat. The note then names them, and not the options.
    """
    if writer.stop:
        return None
    if loop := writer.loop:
        tokens = f"the same {loop.n_block} tokens" if loop.n_block > 1 else "the same token"
        off = "/set stop_loops off" if in_terminal else "--stop-loops off"
        return f"stopped: the model wrote {tokens} {loop.n_times} times; {off} lets it go on"
    if writer.is_cut:
        stopped = f"stopped after {format_tokens(writer.n_written)}"
        if in_terminal:
            return f"{stopped} (-n); /set n changes the limit"
        if generation.grammar or generation.json_schema:
            return f"{stopped} (-n): the text may be incomplete"
        if "n" in generation.given:
            return f"{stopped} (-n)"
        return f"{stopped}; -n N changes the limit, and -n -1 removes it"
    if not is_empty:
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

    with open_run(run, guarded=True) as opened:
        say(*opened.notes)

        from kvtool.chats.writer import Writer
        from kvtool.config import drafting
        from kvtool.llama.sampler import Sampler

        engine = opened.engine
        with drafting.opened(run, engine.model) as drafts:
            sampler = Sampler(engine.model, sampling, seed=generation.seed)
            yield opened, Writer(engine, sampler, drafts.of(engine))
