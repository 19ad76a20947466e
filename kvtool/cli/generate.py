"""kvtool generate: a prompt in, a text out."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli import flags as opt
from kvtool.cli.explain import Notice, explain_run
from kvtool.cli.opening import EngineOptions, open_engine, sampler
from kvtool.errors import InputError
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="What to do; stdin, if any, follows it.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", "--predict", min=1, help="The most tokens to write.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text: no chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System prompt, never evicted.")] = None,
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
    flash: opt.Flash = "auto",
    explain: opt.Explain = False,
    verbose: opt.Verbose = False,
    as_json: opt.Json = False,
) -> None:
    """Write what the model answers to a prompt from -p and stdin; the -p before a text is never evicted."""
    text = read_stdin()
    if prompt is None and not text:
        raise InputError("nothing to read; give a prompt with -p, or a text on stdin")
    wanted = EngineOptions.of(context)
    with open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH) as opened:
        from kvtool.chats.conversation import Writer, pin_prefix, template_of

        engine = opened.engine
        writer = Writer(engine, sampler(context, engine))
        interrupt.stops(writer)
        request = "\n\n".join(part for part in (prompt, text) if part)
        whole, n_pinned = request, len(prompt) if prompt and text else 0
        if not raw:
            messages = [{"role": "system", "content": system}] if system else []
            whole = template_of(engine.model).render([*messages, {"role": "user", "content": request}])
            pinned = prompt.strip() if prompt and text else system or ""
            at = whole.find(pinned)
            n_pinned = at + len(pinned) if at >= 0 else 0
        tokens = pin_prefix(engine, whole, n_pinned)
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


def read_stdin() -> str:
    """What is piped in, without the last line break; empty at a terminal. Raises InputError."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"stdin is not UTF-8 (byte {error.start}); convert it first, with iconv for example"
        ) from None


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
        import json

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
            "prompt_s": read_in,
            "tokens_per_s": n_written / wrote_in if wrote_in else None,
        }
        sys.stdout.write(json.dumps(result) + "\n")
    elif pieces and not pieces[-1].endswith("\n"):
        sys.stdout.write("\n")
    if verbose:
        sys.stderr.write(
            f"read {n_read} tokens in {read_in:.1f} s, wrote {n_written} in {wrote_in:.1f} s, "
            f"{engine.mean_kv:.0f}/{engine.policy.budget} cells, cache {format_bytes(engine.cache_bytes)}, "
            f"policy state {format_bytes(engine.host_bytes)}\n"
        )
