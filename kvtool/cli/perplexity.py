"""`kvtool perplexity`: how well a model under a policy predicts a text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import flags as opt
from kvtool.cli.archive import archive_line, archive_record
from kvtool.cli.explain import Notice, explain_run, say_spare
from kvtool.cli.opening import EngineOptions, open_engine
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import check_length, read_text, too_short
from kvtool.cli.utf8 import json_text
from kvtool.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


def perplexity(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="A text file, or - for stdin.")],
    policy: opt.Policy = opt.POLICY,
    budget: opt.TextBudget = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=2, metavar="N", help="Read the text's first N tokens.", show_default="all"
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows",
            min=2,
            metavar="N",
            help="Score pieces of N tokens, each in an empty cache, as llama-perplexity -c N does.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            metavar="N",
            help="With --windows: start a piece every N tokens, and score its last N.",
        ),
    ] = None,
    model: opt.Model = None,
    n_ctx: opt.Context = None,
    n_batch: opt.TextBatch = None,
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
) -> None:
    """Stream a text through the cache and print its perplexity; lower is better.

    Every token after the first is scored. Details go to stderr.
    """
    text = read_text(file)
    if stride is not None and (windows is None or stride >= windows):
        raise UsageError("--stride needs --windows, and must be smaller")
    wanted = EngineOptions.of(context)

    from kvtool import policies
    from kvtool.llama.model import Model
    from kvtool.measure import perplexity as measure
    from kvtool.system.memory import peak_rss_bytes

    tokens: np.ndarray

    def length(loaded: Model) -> int:
        nonlocal tokens
        tokens = loaded.tokenize(text, start=windows is None)[:max_tokens]
        if len(tokens) < (windows or 2):
            raise too_short(file, len(tokens), windows or 2)
        return windows or len(tokens)

    with open_engine(wanted, default_budget=512, n_batch=64, length=length, scoring=True) as opened:
        engine = opened.engine
        if windows is None:
            check_length(engine, len(tokens))
        what, n = ("window", windows) if windows else ("text", len(tokens))
        if explain:
            explain_run(engine, policy, what, n)
        else:
            say_spare(engine)
            Notice(engine, what)(n)
        n_scored = _n_scored(len(tokens), windows, stride)
        started = time.monotonic()
        with _progress(n_scored) as report:
            if windows is None:
                nll = measure.stream(engine, tokens, report)
            else:
                nll = measure.windows(engine, tokens, windows, stride, report)
        seconds = time.monotonic() - started
        mean = float(nll.mean())
        result = {
            "perplexity": math.exp(mean),
            "nll": mean,
            "tokens": len(nll),
            "policy": policy,
            "budget": engine.policy.budget,
            "asked": engine.policy.n_asked,
            "params": policies.chosen(engine.policy),
            "model": str(engine.model.path),
            "cells": engine.mean_kv,
            "kv_bytes": engine.cache_bytes,
            "state_bytes": engine.host_bytes,
            **archive_record(engine),
            "peak_rss_bytes": peak_rss_bytes(),
            "tokens_per_s": len(tokens) / seconds,
            "seconds": seconds,
        }
    if as_json:
        typer.echo(json_text(result))
    else:
        typer.echo(f"{result['perplexity']:.4f}")
        _summary(result)


def _n_scored(n_tokens: int, windows: int | None, stride: int | None) -> int:
    if windows is None:
        return n_tokens - 1
    if stride:
        return len(range(0, n_tokens - windows, stride)) * stride
    return n_tokens // windows * (windows - windows // 2 - 1)


@contextmanager
def _progress(n_scored: int) -> Iterator[Callable[[np.ndarray], None]]:
    """A callback for `measure`: on a terminal it draws a bar with the perplexity so far."""
    total, n = 0.0, 0
    with tokens_progress("perplexity", n_scored) as step:

        def report(nll: np.ndarray) -> None:
            nonlocal total, n
            total, n = total + float(nll.sum()), n + len(nll)
            step(n, f"perplexity {math.exp(total / n):.3f}" if n else "perplexity")

        yield report


def _summary(result: dict[str, Any]) -> None:
    from kvtool.units import format_bytes

    archive = f"archive {archive_line(result)}, " if result["archive_limit"] else ""
    sys.stderr.write(
        f"{result['tokens']} tokens scored, policy {result['policy']}, {result['cells']:.0f} of "
        f"{result['budget']} tokens kept per KV head, cache {format_bytes(result['kv_bytes'])}, "
        f"policy state {format_bytes(result['state_bytes'])}, {archive}"
        f"{result['tokens_per_s']:.1f} tokens/s\n"
    )
