"""Functions of commands in which a model writes.

They choose the model and the thinking effort, make the sampler, the engine and the writer, and say why a text
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kvtool.cli import near
from kvtool.cli.console import say
from kvtool.config.run import RunOptions
from kvtool.errors import KvtoolError, UsageError
from kvtool.options import OUTPUT, Options, option
from kvtool.system.texts import exists
from kvtool.units import format_tokens

if TYPE_CHECKING:
    from kvtool.chats.thinking import Splitter
    from kvtool.chats.writer import Writer
    from kvtool.config.generation import GenerationOptions
    from kvtool.config.opening import Opened
    from kvtool.llama.sampling import Sampling

T = TypeVar("T")


@dataclass(frozen=True)
class HideThinking(Options):
    """The option --hide-thinking of commands in which a model writes."""

    hide_thinking: bool = option("--hide-thinking", False, "Do not show the model's thoughts.", group=OUTPUT)


class ReplyText:
    """The text of one reply for stdout.

    splitter: separates the thought from the answer. None if there are no thoughts.
    opening: text with which the reply header opens a thought. "" if it opens none.
    hides: True to leave the thought out of the text.

    Attributes
    ----------
    thought, answer
        The two parts of the reply so far, without tags.
    shown
        Text for stdout so far. If the thought is not hidden, the text has both of its tags.
    """

    def __init__(self, splitter: Splitter | None = None, opening: str = "", *, hides: bool = False) -> None:
        self.thought = self.answer = self.shown = ""
        self._splitter = splitter
        self._opening = opening
        self._hides = hides

    def texts(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the text for stdout while `pieces` yields the reply."""
        try:
            for piece in pieces:
                answer = self._parts(self._splitter.feed(piece) if self._splitter else [(False, piece)])
                yield self._show(answer if self._hides else self._opening + piece)
                self._opening = ""
        except KvtoolError:
            yield self._end()
            raise
        yield self._end()

    def _end(self) -> str:
        """Return the text that `splitter` has held back."""
        rest = self._parts(self._splitter.end()) if self._splitter else ""
        return self._show(rest if self._hides else "")

    def _parts(self, parts: Iterable[tuple[bool, str]]) -> str:
        """Add the parts to `thought` and `answer`. Return the new text of the answer."""
        before = len(self.answer)
        for is_thought, text in parts:
            if is_thought:
                self.thought += text
            else:
                self.answer += text
        return self.answer[before:]

    def _show(self, text: str) -> str:
        self.shown += text
        return text


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


def is_constrained(generation: GenerationOptions) -> bool:
    """Return True if answers must fit a grammar or a JSON schema. Scripts then expect only the answer."""
    return bool(generation.grammar or generation.json_schema)


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
            return f"{stopped} (-n); /set n changes the limit, /continue goes on"
        if is_constrained(generation):
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
