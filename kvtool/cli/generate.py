"""`kvtool generate`: answer a prompt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.console import say
from kvtool.cli.declared import Json, options
from kvtool.cli.explain import before_text, unpinned
from kvtool.cli.output import stopped_by_signals
from kvtool.cli.progress import line_progress
from kvtool.cli.texts import await_stdin, check_length
from kvtool.cli.writing import HideThinking, ReplyText, end_note, is_constrained, open_writer, with_thinking
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import WriteOptions
from kvtool.config.system import SystemOptions
from kvtool.errors import InputError, KvtoolError, StreamEnd, UsageError
from kvtool.options import OUTPUT, Options, Range, option, redeclared, repeated, tested_each
from kvtool.system import interrupt
from kvtool.system.texts import check_file, is_stdin, json_text, read_stdin, read_text, utf8
from kvtool.units import format_tokens

if TYPE_CHECKING:
    from kvtool.chats.template import Template
    from kvtool.chats.writer import Writer


@dataclass(frozen=True)
class _AnswerOptions(GenerationOptions):
    n: int | None = redeclared(
        GenerationOptions, "n", help="Maximum tokens of the answer; -1 means no limit."
    )
    # the default temperature of chats is 0.8, but at 0.8 fewer answers are right (docs/sampling.md)
    temp: float = redeclared(GenerationOptions, "temp", 0.4)


@dataclass(frozen=True)
class _PromptOptions(Options):
    prompt: tuple[str, ...] = option(
        "-p, --prompt TEXT", (), "The prompt, given as an option.", default_text=False, read=repeated
    )
    file: tuple[str, ...] = option(
        "-f, --file FILE",
        (),
        "Read the prompt from a file. If another prompt is given, the file's text follows it. Repeatable.",
        default_text=False,
        read=tested_each(check_file),
    )


@dataclass(frozen=True)
class _TemplateOptions(SystemOptions):
    raw: bool = option(
        "--raw",
        False,
        "Continue the text, without a chat template.",
        aliases=("-no-cnv", "--no-conversation"),
    )


@dataclass(frozen=True)
class _OutputOptions(HideThinking):
    logprobs: int | None = option(
        "--logprobs N",
        None,
        "With --json: the log-probability of each token, and of the N most likely ones, before any "
        "sampler changes them (0 to 1000).",
        group=OUTPUT,
        default_text="off",
        valid=Range(0, 1000),
    )


@options
def generate(
    *,
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="The prompt. Text on stdin follows it; in a shell's loop, prevent this with `</dev/null`.",
            show_default=False,
        ),
    ] = None,
    prompts: _PromptOptions,
    template: _TemplateOptions,
    generation: _AnswerOptions,
    run: WriteOptions,
    as_json: Json = False,
    output: _OutputOptions,
) -> None:
    """Answer a prompt, a text on stdin, or both. If both are given, the prompt is never evicted."""
    of_template = {"think", "think_budget", "system", "system_file", "chat_template", "hide_thinking"}
    of_template &= generation.typed | template.typed | run.typed | output.typed
    if template.raw and of_template:
        flag = f"--{min(of_template).replace('_', '-')}"
        raise UsageError(f"{flag} is for the chat template, which --raw leaves out; leave out one of them")
    system = template.text()
    request, first = _request(argument, prompts, is_raw=template.raw)
    if output.logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json")
    with open_writer(run, generation) as (opened, writer), stopped_by_signals():
        from kvtool.chats.prompt import pin_prefix, template_of
        from kvtool.chats.shields import escaped
        from kvtool.chats.thinking import Splitter
        from kvtool.config.report import report

        engine = opened.engine
        writer.ends_loops = generation.stop_loops == "on"
        likely = None if output.logprobs is None else _record_logprobs(writer, output.logprobs)
        interrupt.stops(writer)
        reply, stops_after = ReplyText(), None
        if template.raw:
            whole, prefix = escaped(request), escaped(first)
        else:
            chats = _under_effort(template_of(engine.model, run.chat_template), generation)
            whole, prefix = _rendered(writer, chats, generation.think_budget, system, request, first)
            splitter = Splitter(chats.tags, is_open=chats.opens_thought)
            hides = output.hide_thinking or is_constrained(generation)
            reply = ReplyText(splitter, chats.opening, hides=hides)
            stops_after = Splitter(chats.tags, is_open=chats.opens_thought)
        tokens = pin_prefix(engine, whole, len(prefix))
        check_length(engine, len(tokens), "prompt")
        notice = before_text(engine, opened.run, "prompt", len(tokens), opened.info)
        started = time.monotonic()
        with line_progress("reading") as progress, writer.showing(progress):
            is_read = writer.read(tokens)
        if is_read:
            read_s, started = time.monotonic() - started, time.monotonic()
            pieces = writer.write(generation.n, stops_after)
            if likely is not None:
                pieces = _without_stop(pieces, writer, likely)
            full = _write(pieces, reply, aloud=not as_json)
            thought = "" if output.hide_thinking else reply.thought
            write_s = time.monotonic() - started
            answer = _Answer(reply.answer, thought, full, len(tokens), read_s, write_s)
            state = report(engine, opened.run.policy)
            if as_json:
                typer.echo(json_text(answer.record(writer, state, likely)))
            elif reply.shown and not reply.shown.endswith("\n"):
                sys.stdout.write("\n")
            if full:
                raise full
            say(notice.after())
            is_empty = not reply.answer.strip()
            say(end_note(writer, generation, "answer", is_empty=is_empty, thought=bool(reply.thought)))
            if run.verbose:
                say(answer.summary(writer, state))
        if writer.stop:
            raise KeyboardInterrupt


def _request(argument: str | None, prompts: _PromptOptions, *, is_raw: bool) -> tuple[str, str]:
    """Return the text to answer, and its start that is never evicted.

    The start is the prompt if another text follows it, or else "". Raises UsageError for two prompts or an
    empty one, and InputError if there is nothing to read or a file cannot be read.
    """
    typed = [f"-p {each!r}" for each in prompts.prompt if "prompt" in prompts.typed]
    named = typed if argument is None else [repr(argument), *typed]
    if len(named) > 1:
        raise UsageError(f"{named[0]} and {named[1]} are two prompts; leave out one of them")
    if argument is None and prompts.prompt:
        # a text from a variable was split at its blanks
        argument = " ".join(prompts.prompt)
    prompt, files = utf8("-p", argument), prompts.file
    if not files and prompt and os.path.isfile(prompt):
        from shlex import quote

        say(f"{prompt} is a file; use -f {quote(prompt)} to read it")
    await_stdin("; `</dev/null` gives none")
    text = "" if any(map(is_stdin, files)) else read_stdin()
    if files:
        file_text = "\n\n".join(read_text(file).rstrip("\n") for file in files)
        if prompt is None:
            prompt = file_text
        else:
            text = "\n\n".join(filter(None, (file_text, text)))
    # ignore the prompt "-" if there is a text from stdin or a file, because - means stdin in other programs
    prompt = None if prompt == "-" and text else prompt
    request = "\n\n".join(part for part in (prompt, text) if part)
    # with --raw, a prompt may consist of white space only
    if not (request if is_raw else request.strip()):
        if prompt is None:
            raise InputError("there is nothing to read; give a prompt, a file with -f, or a text on stdin")
        raise UsageError("the prompt is empty; give a text")
    return request, prompt if prompt and text else ""


@dataclass(frozen=True)
class _Answer:
    """An answer, and how long it took: times in seconds. n_prompt: number of tokens of the prompt.

    thought: the thought before the answer; "" if there is none, or if it is hidden.
    full: error that ended the answer because the cache became full, or None.
    """

    text: str
    thought: str
    full: StreamEnd | None
    n_prompt: int
    read_s: float
    write_s: float

    def record(
        self, writer: Writer, state: dict[str, Any], likely: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        """Return the object that --json prints.

        state: the engine's report. likely: log-probabilities of the tokens, or None without --logprobs.
        """
        return {
            "text": self.text,
            **({"reasoning_content": self.thought} if self.thought else {}),
            "finish_reason": "full" if self.full else _finish_reason(writer),
            "prompt_tokens": self.n_prompt,
            "tokens": writer.n_written,
            "evicted": writer.engine.n_evicted,
            "drafted": writer.n_drafted,
            "accepted": writer.n_accepted,
            **state,
            **({} if likely is None else {"logprobs": {"content": likely}}),
            "prompt_s": self.read_s,
            "tokens_per_s": writer.n_written / self.write_s if self.write_s else None,
        }

    def summary(self, writer: Writer, state: dict[str, Any]) -> str:
        """Return the line that --verbose shows."""
        from kvtool.config.report import line
        from kvtool.measure.holdings import n_forgotten

        drafted = f" ({writer.n_accepted} of {writer.n_drafted} draft tokens)" if writer.drafter else ""
        read = f"read {format_tokens(self.n_prompt)} in {self.read_s:.1f} s"
        wrote = f"wrote {writer.n_written:,} in {self.write_s:.1f} s{drafted}"
        return f"{read}, {wrote}, {n_forgotten(writer.engine):,} tokens forgotten, {line(state)}"


def _finish_reason(writer: Writer) -> str:
    """One of "loop", "length", "interrupted" (Ctrl-C or a signal) and "stop"."""
    if writer.loop:
        return "loop"
    if writer.is_cut:
        return "length"
    has_ended = writer.ending is not None or writer.stopped_by
    return "interrupted" if writer.stop and not has_ended else "stop"


def _under_effort(template: Template, generation: GenerationOptions) -> Template:
    """Return the template with the variables for the thinking effort and the thinking budget."""
    from kvtool.chats.effort import Efforts

    if generation.think is None and generation.think_budget is None:
        return template
    return template.under(with_thinking(generation, Efforts.of(template).exact))


def _rendered(
    writer: Writer,
    template: Template,
    budget: int | None,
    system: str | None,
    request: str,
    first: str,
) -> tuple[str, str]:
    """Render the request with the chat template. Return the text, and its prefix to pin.

    Also set up the writer, so that it shows the tags of a thought, limits the thought's length, and applies a
    grammar only after the thought.

    budget: maximum tokens of the thought; None for no limit.
    first: start of the request, which is pinned. The prefix ends after it. If it is "", the prefix ends after
    the system prompt.
    """
    from kvtool.chats.after_thought import after_thought
    from kvtool.chats.prompt import request_prefix, system_prefix
    from kvtool.chats.thinking import control_tokens

    engine = writer.engine
    writer.shown = control_tokens(engine.model, template.tags)
    writer.sampler.start(0, after_thought(engine.model, template, budget))
    before = [{"role": "system", "content": system}] if system else []
    whole = template.render([*before, {"role": "user", "content": request}])
    prefix: str | None = ""
    if first.strip():
        prefix = request_prefix(template, before, first, request.removeprefix(first))
    elif system and system.strip():
        prefix = system_prefix(template, system)
    if prefix is None or not whole.startswith(prefix):
        if engine.policy.evicts:
            noun = "the prompt" if first.strip() else "the system prompt"
            say(unpinned(noun))
        prefix = ""
    return whole, prefix


def _record_logprobs(writer: Writer, n: int) -> list[dict[str, Any]]:
    """Return a list that gets, for each token written, its log-probability and the n most likely tokens."""
    from kvtool.chats.logprobs import logprobs

    engine, likely = writer.engine, list[dict[str, Any]]()

    def record(token: int) -> None:
        likely.append(logprobs(engine.model, engine.context.next_logits, token, n))

    writer.after_sampling = record
    return likely


def _without_stop(pieces: Iterator[str], writer: Writer, likely: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the pieces of an answer. Then remove the tokens of a stop string from the log-probabilities."""
    n_shown = 0
    for piece in pieces:
        n_shown = writer.n_written
        yield piece
    if writer.stopped_by:
        # the tokens since the last piece belong to the stop string
        del likely[n_shown:]


def _write(pieces: Iterator[str], reply: ReplyText, *, aloud: bool) -> StreamEnd | None:
    """Write the pieces of an answer. Return the error if the cache became full.

    aloud: True to write each piece to stdout at once. In this case the error is raised, not returned.
    """
    try:
        for text in reply.texts(pieces):
            if aloud:
                sys.stdout.write(text)
                sys.stdout.flush()
    except KvtoolError as error:
        if isinstance(error, StreamEnd) and not aloud:
            return error
        if reply.shown and sys.stdout.isatty():
            # print the error on a new line
            sys.stdout.write("\n")
        raise
    return None
