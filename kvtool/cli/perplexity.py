"""`kvtool perplexity`: measure how well a model with a policy predicts a text."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import typer

from kvtool.cli.console import say
from kvtool.cli.declared import Json, options
from kvtool.cli.explain import before_text
from kvtool.cli.output import Stopped, stopped_by_signals
from kvtool.cli.progress import stopping, tokens_progress
from kvtool.cli.texts import File, check_length, first_tokens, source
from kvtool.config.run import ScoreOptions
from kvtool.options import Options, Range, option
from kvtool.system.texts import json_text
from kvtool.units import format_tokens

if TYPE_CHECKING:
    import numpy as np

    from kvtool.engine.loop import Engine


@dataclass(frozen=True)
class _PerplexityRun(ScoreOptions):
    hidden: ClassVar = ("prefill", "chat_template")


@dataclass(frozen=True)
class _PerplexityOptions(Options):
    max_tokens: int | None = option(
        "--max-tokens N", None, "Use only the first N tokens of the text.", valid=Range(2), default_text="all"
    )
    windows: int | None = option(
        "--windows N",
        None,
        "Cut the text into pieces of N tokens, without the rest, and score the second half of each in an "
        "empty cache, like llama-perplexity -c N.",
        valid=Range(3),
    )


@options
def perplexity(
    *, file: File = None, args: _PerplexityOptions, run: _PerplexityRun, as_json: Json = False
) -> None:
    """Stream a text through the cache and print its perplexity; lower is better.

    Every token after the first is scored, unless --windows is set. Details go to stderr. Ctrl-C, SIGTERM and
    SIGHUP stop and print the perplexity so far.
    """
    from kvtool import policies
    from kvtool.config.opening import check_read_once, open_run
    from kvtool.config.report import line, report
    from kvtool.llama.loaded.model import Model
    from kvtool.measure.records import text_sha256, versions
    from kvtool.measure.statistics import perplexity_of
    from kvtool.system.memory import peak_rss_bytes

    tokens: np.ndarray

    def length(loaded: Model) -> int:
        nonlocal tokens
        tokens = first_tokens(loaded, text, args.max_tokens, n_min=args.windows or 2)
        return args.windows or len(tokens)

    check_read_once(run, run.policy)
    # every token must be scored under the policy, so evict after each batch. Some policies would decode a
    # whole prompt before they evict
    run = run.changed(prefill="stream")
    with (
        closing(source(file)) as text,
        open_run(run, length=length, guarded=True) as opened,
        stopped_by_signals(),
    ):
        say(*opened.notes)
        engine, policy = opened.engine, opened.run.policy
        if args.windows is None:
            check_length(engine, len(tokens))
        noun, n = ("window", args.windows) if args.windows else ("text", len(tokens))
        before_text(engine, opened.run, noun, n, is_all=True)
        n_all = _n_scored(len(tokens), args.windows)
        policies.load_kernels(engine.policy)
        started = time.monotonic()
        total, n_done = _score(engine, tokens, args, n_all)
        if not n_done:
            raise KeyboardInterrupt
        seconds = time.monotonic() - started
        mean, is_complete = total / n_done, n_done == n_all
        n_read = len(tokens) - (len(tokens) % args.windows if args.windows else 0)
        result = {
            "perplexity": perplexity_of(mean),
            "nll": mean,
            "tokens": n_done,
            "complete": is_complete,
            "text_sha256": text_sha256(engine.model, tokens),
            **versions(),
            **report(engine, policy),
            "peak_rss_bytes": peak_rss_bytes(),
            "tokens_per_s": n_read * n_done / n_all / seconds,
            "seconds": seconds,
        }
        if as_json:
            typer.echo(json_text(result))
        else:
            typer.echo(f"{result['perplexity']:.4f}")
            speed = f"{result['tokens_per_s']:.1f} tokens/s"
            of = "" if is_complete else f"incomplete: {n_done:,} of "
            say(f"{of}{format_tokens(n_all)} scored, policy {policy}, {line(result)}, {speed}")
        if not is_complete:
            raise Stopped(f"stopped; {n_done:,} of {n_all:,} tokens are scored")


def _score(engine: Engine, tokens: np.ndarray, args: _PerplexityOptions, n_all: int) -> tuple[float, int]:
    """Score tokens i32[n], and show the perplexity so far. Ctrl-C ends this after the current step.

    Returns the sum of the scored tokens' nll, in nats, and their number. n_all: number of tokens to score.
    """
    from kvtool.measure import perplexity as measure
    from kvtool.measure.statistics import perplexity_of

    total, n_done, work = 0.0, 0, SimpleNamespace(stop=False)
    with tokens_progress("perplexity", n_all) as step, stopping(work), suppress(KeyboardInterrupt):

        def scored(nll: np.ndarray) -> None:
            """Show the current perplexity next to the bar. Raises KeyboardInterrupt after Ctrl-C."""
            nonlocal total, n_done
            total, n_done = total + float(nll.sum()), n_done + len(nll)
            step(n_done, f"perplexity {perplexity_of(total / n_done):.3f}" if n_done else "perplexity")
            if work.stop:
                raise KeyboardInterrupt

        if args.windows is None:
            measure.stream(engine, tokens, scored)
        else:
            measure.windows(engine, tokens, args.windows, scored)
    return total, n_done


def _n_scored(n_tokens: int, windows: int | None) -> int:
    if windows is None:
        return n_tokens - 1
    return n_tokens // windows * (windows - windows // 2 - 1)
