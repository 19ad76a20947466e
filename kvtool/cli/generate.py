"""kvtool generate: a prompt in, an answer out."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli import flags as opt
from kvtool.cli import utf8
from kvtool.cli.archive import archive_line, archive_record
from kvtool.cli.explain import Notice, explain_run, unpinned
from kvtool.cli.opening import EngineOptions, open_engine, sampler
from kvtool.errors import InputError, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt; text piped to stdin follows it.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", "--predict", min=1, help="Maximum tokens to write.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without a chat template.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System prompt; it is never evicted.")
    ] = None,
    policy: opt.Policy = opt.POLICY,
    budget: opt.Budget = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    prefill: opt.Prefill = None,
    temp: opt.Temp = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    repeat_penalty: opt.RepeatPenalty = 1.0,
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
    verbose: opt.Verbose = False,
    as_json: opt.Json = False,
) -> None:
    """Answer a prompt from -p, stdin or both. If both are given, the text of -p is never evicted."""
    prompt = utf8.option("-p", prompt)
    system = utf8.option("--system", system)
    text = utf8.read_stdin()
    request = "\n\n".join(part for part in (prompt, text) if part)
    # without a template a blank is a text to continue
    if not (request if raw else request.strip()):
        if prompt is None:
            raise InputError("there is nothing to read; give a prompt with -p, or a text on stdin")
        raise UsageError("the prompt is empty; give a text with -p or on stdin")
    wanted = EngineOptions.of(context)
    with open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH) as opened:
        from kvtool.chats.prompt import pin_prefix
        from kvtool.chats.writer import Writer

        engine = opened.engine
        writer = Writer(engine, sampler(context, engine))
        interrupt.stops(writer)
        first = prompt if prompt and text else ""
        if raw:
            whole, prefix = request, first
        else:
            whole, prefix = _rendered(engine, system, request, first)
        tokens = pin_prefix(engine, whole, len(prefix))
        if explain:
            explain_run(engine, policy, "prompt", len(tokens))
        else:
            Notice(engine, "prompt")(len(tokens))
        started = time.monotonic()
        pieces = []
        if writer.read(tokens):
            read_in = time.monotonic() - started
            started = time.monotonic()
            for piece in writer.write(n):
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            wrote_in = time.monotonic() - started
            _finish(
                as_json, pieces, engine, policy, len(tokens), writer.n_written, read_in, wrote_in, verbose
            )
        if writer.stop:
            raise KeyboardInterrupt


def _rendered(engine: Engine, system: str | None, request: str, first: str) -> tuple[str, str]:
    """The request in the model's chat template, and the part of it that is pinned.

    first: the start of the request that is pinned, if any, else the system prompt is.
    """
    from kvtool.chats.prompt import request_prefix, system_prefix, template_of

    template = template_of(engine.model)
    before = [{"role": "system", "content": system}] if system else []
    whole = template.render([*before, {"role": "user", "content": request}])
    prefix: str | None = ""
    if first.strip():
        prefix = request_prefix(template, before, first, request.removeprefix(first))
    elif system and system.strip():
        prefix = system_prefix(template, system)
    if prefix is None or not whole.startswith(prefix):
        if engine.policy.slack:
            what = "the text of -p" if first.strip() else "the system prompt"
            sys.stderr.write(f"{unpinned(what)}\n")
        prefix = ""
    return whole, prefix


def _finish(
    as_json: bool,
    pieces: list[str],
    engine: Engine,
    policy: str,
    n_read: int,
    n_written: int,
    read_in: float,
    wrote_in: float,
    verbose: bool,
) -> None:
    from kvtool.units import format_bytes

    if as_json:
        result = {
            "text": "".join(pieces),
            "prompt_tokens": n_read,
            "tokens": n_written,
            "policy": policy,
            "budget": engine.policy.budget,
            "model": str(engine.model.path),
            "evicted": engine.n_evicted,
            "cells": engine.mean_kv,
            "kv_bytes": engine.cache_bytes,
            "state_bytes": engine.host_bytes,
            **archive_record(engine),
            "prompt_s": read_in,
            "tokens_per_s": n_written / wrote_in if wrote_in else None,
        }
        sys.stdout.write(utf8.json_text(result) + "\n")
    elif pieces and not pieces[-1].endswith("\n"):
        sys.stdout.write("\n")
    if verbose:
        archive = f", archive {archive_line(archive_record(engine))}" if engine.context.archive else ""
        sys.stderr.write(
            f"read {n_read} tokens in {read_in:.1f} s, wrote {n_written} in {wrote_in:.1f} s, "
            f"{engine.mean_kv:.0f}/{engine.policy.budget} cells per row, "
            f"cache {format_bytes(engine.cache_bytes)}, "
            f"policy state {format_bytes(engine.host_bytes)}{archive}\n"
        )
