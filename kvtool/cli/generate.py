"""kvtool generate: a prompt in, an answer out."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import flags as opt
from kvtool.cli import sampling as draw
from kvtool.cli import utf8
from kvtool.cli.archive import archive_line, archive_record
from kvtool.cli.explain import Notice, explain_run, say_spare, unpinned
from kvtool.cli.opening import (
    EngineOptions,
    is_default,
    is_typed,
    open_engine,
    system_text,
    take_positional,
)
from kvtool.cli.progress import reading_progress
from kvtool.cli.texts import check_length, read_text
from kvtool.errors import InputError, KvtoolError, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.chats.writer import Writer


def generate(
    context: typer.Context,
    given: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt. Text on stdin follows it.", show_default=False),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt, as an option.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", metavar="FILE", help="Read the prompt from a file; of two, this one comes second."
        ),
    ] = None,
    system: opt.System = None,
    system_file: opt.SystemFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without a chat template.")] = False,
    n: opt.Predict = None,
    policy: opt.Policy = opt.ANSWERING,
    budget: opt.Budget = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    prefill: opt.Prefill = None,
    temp: opt.Temp = opt.ANSWERING_TEMP,
    top_k: opt.TopK = opt.TOP_K,
    top_p: opt.TopP = opt.TOP_P,
    min_p: opt.MinP = opt.MIN_P,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    repeat_last_n: draw.RepeatLastN = 64,
    presence_penalty: draw.PresencePenalty = 0.0,
    frequency_penalty: draw.FrequencyPenalty = 0.0,
    typical: draw.Typical = 1.0,
    xtc_probability: draw.XtcProbability = 0.0,
    xtc_threshold: draw.XtcThreshold = 0.1,
    dry_multiplier: draw.DryMultiplier = 0.0,
    dry_base: draw.DryBase = 1.75,
    dry_allowed_length: draw.DryAllowedLength = 2,
    dry_penalty_last_n: draw.DryPenaltyLastN = 64,
    dry_sequence_breaker: draw.DrySequenceBreaker = None,
    mirostat: draw.Mirostat = 0,
    mirostat_lr: draw.MirostatLr = 0.1,
    mirostat_ent: draw.MirostatEnt = 5.0,
    logit_bias: draw.LogitBias = None,
    stop: draw.Stop = None,
    grammar: draw.Grammar = None,
    json_schema: draw.JsonSchema = None,
    seed: opt.Seed = None,
    model: opt.Model = None,
    n_ctx: opt.Context = None,
    n_batch: opt.Batch = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    rpc: opt.Rpc = None,
    type_k: opt.TypeK = "f16",
    type_v: opt.TypeV = "f16",
    archive: opt.Archive = None,
    archive_file: opt.ArchiveFile = None,
    archive_type: opt.ArchiveType = "q8_0",
    flash: opt.Flash = "auto",
    explain: opt.Explain = False,
    verbose: opt.Verbose = 0,
    as_json: opt.Json = False,
    logprobs: draw.Logprobs = None,
) -> None:
    """Answer a prompt, a text on stdin, or both. If both are given, the prompt is never evicted."""
    prompt = utf8.option("-p", take_positional(context, "given", "prompt", "-p"))
    system = system_text(system, system_file)
    text = "" if file == "-" else utf8.read_stdin()
    if file is not None:
        there = read_text(file).rstrip("\n")
        if prompt is None:
            prompt = there
        else:
            text = "\n\n".join(filter(None, (there, text)))
    # as other programs name stdin
    prompt = None if prompt == "-" and text else prompt
    request = "\n\n".join(part for part in (prompt, text) if part)
    # without a template a blank is a text to continue
    if not (request if raw else request.strip()):
        if prompt is None:
            raise InputError("there is nothing to read; give a prompt, a file with -f, or a text on stdin")
        raise UsageError("the prompt is empty; give a text")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs goes into the JSON; add --json")
    wanted = EngineOptions.of(context)
    settings = draw.settings(context)
    # what was asked for is refused instead, where it cannot run: the policy, or an option of it
    asked = any(is_typed(context, name) for name in ("archive", "archive_file", "archive_type"))
    asked = asked or not (is_default(context, "policy") and is_default(context, "options"))
    instead = None if asked else opt.POLICY
    with open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH, instead=instead) as opened:
        from kvtool.chats.prompt import pin_prefix
        from kvtool.chats.writer import Writer

        engine = opened.engine
        writer = Writer(engine, draw.sampler(context, engine, settings))
        likely = _record_logprobs(writer, logprobs)
        interrupt.stops(writer)
        first = prompt if prompt and text else ""
        if raw:
            whole, prefix = request, first
        else:
            whole, prefix = _rendered(writer, system, request, first)
        tokens = pin_prefix(engine, whole, len(prefix))
        check_length(engine, len(tokens), "prompt")
        if explain:
            explain_run(engine, opened.policy, "prompt", len(tokens))
        else:
            say_spare(engine)
            Notice(engine, "prompt")(len(tokens))
        started = time.monotonic()
        pieces = []
        with reading_progress() as writer.while_reading:
            is_read = writer.read(tokens)
        writer.while_reading = lambda done, n: None
        if is_read:
            read_in = time.monotonic() - started
            started = time.monotonic()
            try:
                for piece in writer.write(n):
                    pieces.append(piece)
                    if not as_json:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
            except KvtoolError:
                if pieces and sys.stdout.isatty():
                    # the line that says why begins a line
                    sys.stdout.write("\n")
                raise
            wrote_in = time.monotonic() - started
            _finish(
                *(as_json, pieces, writer, opened.policy, len(tokens)),
                *(read_in, wrote_in, verbose, likely),
            )
        if writer.stop:
            raise KeyboardInterrupt


def _rendered(writer: Writer, system: str | None, request: str, first: str) -> tuple[str, str]:
    """The request in the model's chat template, and the part of it that is pinned.

    The writer will show what tells a thought from the answer. first: the start of the request that is pinned,
    if any, else the system prompt is.
    """
    from kvtool.chats.prompt import request_prefix, system_prefix, template_of
    from kvtool.chats.thinking import control_tokens

    engine = writer.engine
    template = template_of(engine.model)
    writer.shown = control_tokens(engine.model, template.tags)
    before = [{"role": "system", "content": system}] if system else []
    whole = template.render([*before, {"role": "user", "content": request}])
    prefix: str | None = ""
    if first.strip():
        prefix = request_prefix(template, before, first, request.removeprefix(first))
    elif system and system.strip():
        prefix = system_prefix(template, system)
    if prefix is None or not whole.startswith(prefix):
        if engine.policy.slack:
            what = "the prompt" if first.strip() else "the system prompt"
            sys.stderr.write(f"{unpinned(what)}\n")
        prefix = ""
    return whole, prefix


def _record_logprobs(writer: Writer, n: int | None) -> list[dict[str, Any]] | None:
    """A list that gets a record of each token as it is written; None if n is None.

    n: how many of the likeliest tokens a record lists.
    """
    if n is None:
        return None
    from kvtool.chats.logprobs import logprobs

    likely: list[dict[str, Any]] = []

    def record(token: int) -> None:
        engine = writer.engine
        likely.append(logprobs(engine.model, engine.context.logits()[-1], token, n))

    writer.after_sampling = record
    return likely


def _finish(
    as_json: bool,
    pieces: list[str],
    writer: Writer,
    policy: str,
    n_read: int,
    read_in: float,
    wrote_in: float,
    verbose: int,
    likely: list[dict[str, Any]] | None,
) -> None:
    from kvtool.units import format_bytes

    engine, n_written = writer.engine, writer.n_written
    if as_json:
        result = {
            "text": "".join(pieces),
            "finish_reason": "length" if writer.is_cut else "stop",
            "prompt_tokens": n_read,
            "tokens": n_written,
            "policy": policy,
            "budget": engine.policy.budget,
            "asked": engine.policy.n_asked,
            "model": str(engine.model.path),
            "evicted": engine.n_evicted,
            "cells": engine.mean_kv,
            "kv_bytes": engine.cache_bytes,
            "state_bytes": engine.host_bytes,
            **archive_record(engine),
            **({} if likely is None else {"logprobs": {"content": likely}}),
            "prompt_s": read_in,
            "tokens_per_s": n_written / wrote_in if wrote_in else None,
        }
        sys.stdout.write(utf8.json_text(result) + "\n")
    elif pieces and not pieces[-1].endswith("\n"):
        sys.stdout.write("\n")
    if writer.is_cut and writer.sampler.settings.grammar is not None:
        sys.stderr.write(f"cut at {n_written:,} tokens by -n: the text may not be whole\n")
    if verbose:
        archive = f", archive {archive_line(archive_record(engine))}" if engine.context.archive else ""
        sys.stderr.write(
            f"read {n_read} tokens in {read_in:.1f} s, wrote {n_written} in {wrote_in:.1f} s, "
            f"{engine.mean_kv:.0f}/{engine.policy.budget} cells per row, "
            f"cache {format_bytes(engine.cache_bytes)}, "
            f"policy state {format_bytes(engine.host_bytes)}{archive}\n"
        )
