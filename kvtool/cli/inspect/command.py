"""`kvtool inspect`: show which tokens of a text the rows still hold."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from kvtool.cli import output
from kvtool.cli.console import plain_console, say, table_console
from kvtool.cli.declared import Json, options
from kvtool.cli.explain import explain_run
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import File, check_length, first_tokens, source
from kvtool.config.run import ScoreOptions
from kvtool.options import Options, Range, option, redeclared
from kvtool.system.texts import json_text

if TYPE_CHECKING:
    import numpy as np

LAST = 2048
"""Number of tokens that a terminal shows by default."""
_LAST_HTML = 20_000
"""Number of tokens that a web page shows by default."""


@dataclass(frozen=True)
class _InspectRun(ScoreOptions):
    hidden: ClassVar = ("chat_template",)

    prefill: str | None = redeclared(
        ScoreOptions,
        "prefill",
        "stream",
        help="How to read the text: stream (evict after each batch) or whole (evict once at the end). Here, "
        "exact reads like stream.",
        group=None,
        default_text=True,
    )


@dataclass(frozen=True)
class _InspectOptions(Options):
    max_tokens: int | None = option(
        "--max-tokens N", None, "Use only the first N tokens of the text.", valid=Range(2), default_text="all"
    )
    snapshots: int = option(
        "--snapshots N", 32, "Maximum points in time that --html can show (1 to 255).", valid=Range(1, 255)
    )
    last: int | None = option(
        "--last N",
        None,
        "Number of last tokens to show.",
        valid=Range(1),
        default_text=f"{LAST}; {_LAST_HTML} in --html",
    )
    html: Path | None = option("--html", None, "Write a web page with sliders for layer, head and time.")


@options
def inspect(*, file: File = None, run: _InspectRun, args: _InspectOptions, as_json: Json = False) -> None:
    """Stream a text through the cache and show which of its tokens the rows still hold."""
    output.check_writable(args.html)
    output.check_apart(("--html", args.html), read=[("FILE", file), *output.files_read(run)])

    from kvtool import policies
    from kvtool.cli.inspect.page import page
    from kvtool.cli.inspect.terminal import attended_record, show, show_attended
    from kvtool.config.opening import open_run
    from kvtool.config.report import line, report
    from kvtool.llama.loaded.model import Model
    from kvtool.measure import holdings

    tokens: np.ndarray

    def length(loaded: Model) -> int:
        nonlocal tokens
        tokens = first_tokens(loaded, text, args.max_tokens, n_min=1)
        return len(tokens)

    with (
        closing(source(file)) as text,
        open_run(run, length=length, guarded=True) as opened,
    ):
        say(*opened.notes)
        engine, policy = opened.engine, opened.run.policy
        check_length(engine, len(tokens))
        if run.explain:
            explain_run(engine, policy, "text", len(tokens), is_all=True)
        policies.load_kernels(engine.policy)
        started = time.monotonic()
        with tokens_progress("reading", len(tokens)) as step:
            held = holdings.watch(engine, tokens, args.snapshots, step)
        seconds = time.monotonic() - started
        texts = holdings.texts(engine.model, tokens)
        share, archived = held.share(), held.is_archived()
        result = {
            "tokens": len(tokens),
            "forgotten": holdings.n_forgotten(engine),
            "rows": len(held.layer),
            **report(engine, policy),
            "tokens_per_s": len(tokens) / seconds,
            "seconds": seconds,
        }

    try:
        if as_json:
            of_tokens = {"text": texts, "share": share.round(4).tolist(), "attended": attended_record(held)}
            typer.echo(json_text(result | of_tokens))
        else:
            show(plain_console(), texts, share, archived, args.last or LAST)
            typer.echo(f"policy {policy}, {line(result)}")
            show_attended(table_console(), held, texts)
    finally:
        # a closed pipe does not lose the page, and a full disk does not lose the printed result
        if args.html:
            output.write(args.html, page(result, held, texts, args.last or _LAST_HTML))
