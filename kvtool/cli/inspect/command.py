"""kvtool inspect: shows which tokens of a text the rows still hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtool.cli import output
from kvtool.cli.console import plain_console, print_table, table_console
from kvtool.cli.declared import Json, Typed, options
from kvtool.cli.explain import explain_run
from kvtool.cli.opening import open_run
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import File, check_length, first_tokens, source
from kvtool.config.run import RunOptions, ScoreOptions
from kvtool.errors import UsageError
from kvtool.options import Options, option, redeclared, repeated
from kvtool.system.texts import Source, json_text

if TYPE_CHECKING:
    import numpy as np

LAST = 2048
"""Tokens that a terminal shows by default."""
_LAST_HTML = 20_000

KINDS = ("attention", "queries", "values", "share")

N_TOKENS = 512
"""Default of --max-tokens with --map."""

TAKEN = {
    *("file", "kind", "layer", "head", "plot", "max_tokens", "model", "threads", "gpu_layers", "rpc"),
    *("verbose", "as_json"),
}
"""The parameters of kvtool inspect that go with --map."""

OF_PLACES = ("attention", "queries")
"""The kinds that take --layer and --head."""


def _numbers(usage: str, help: str, words: str) -> Any:
    return option(usage, (), help, least=0, words=words, read=repeated)


@dataclass(frozen=True)
class _Run(ScoreOptions):
    prefill: str | None = redeclared(
        ScoreOptions,
        "prefill",
        "stream",
        help="How to read the text: stream (evict after each batch) or whole (evict once at the end).",
        group=None,
        words=True,
    )


@dataclass(frozen=True)
class _Own(Options):
    max_tokens: int | None = option(
        "--max-tokens N",
        None,
        "Use only the first N tokens of the text.",
        least=2,
        words=f"all; {N_TOKENS} with --map",
    )
    snapshots: int = option("--snapshots N", 32, "Points in time that --html can show.", least=1, most=255)
    last: int | None = option(
        "--last N", None, "Number of last tokens to show.", least=1, words=f"{LAST}; {_LAST_HTML} in --html"
    )
    html: Path | None = option("--html", None, "Write a web page with sliders for layer, head and time.")
    plot: Path | None = option(
        "--plot, --png PNG",
        None,
        "Draw which tokens the rows hold, or the map, into this picture; needs matplotlib.",
    )
    kind: str | None = option(
        "--map KIND",
        None,
        "Show the full cache instead: attention, queries (their similarity), values (singular "
        "values of keys and values) or share (of important keys).",
        choices=KINDS,
    )
    layer: tuple[int, ...] = _numbers(
        "--layer N",
        "With --map attention or queries: a layer to draw. Repeatable.",
        "the first, the middle and the last",
    )
    head: tuple[int, ...] = _numbers(
        "--head N",
        "With --map attention or queries: a query head to draw. Repeatable.",
        "the first and the middle",
    )


@options
def inspect(
    *,
    file: File = None,
    asked: _Run,
    own: _Own,
    as_json: Json = False,
    typed: Typed,
) -> None:
    """Stream a text through the cache and show which of its tokens the rows still hold.

    With --map show instead what attention looks like with the full cache.
    """
    _check(own, typed)
    output.check_writable(own.html)
    output.check_picture("--plot", own.plot)
    if own.kind:
        with closing(source(file)) as text:
            _show_map(own.kind, own, asked, text, as_json)
        return

    from kvtool.cli.inspect.page import page
    from kvtool.cli.inspect.terminal import attended_record, show, show_attended
    from kvtool.config.report import line, report
    from kvtool.llama.model import Model
    from kvtool.measure import holdings

    tokens: np.ndarray

    def length(loaded: Model) -> int:
        nonlocal tokens
        tokens = first_tokens(loaded, text, own.max_tokens, n_least=1)
        return len(tokens)

    with closing(source(file)) as text, open_run(asked, length=length) as opened:
        engine, run = opened.engine, opened.run
        check_length(engine, len(tokens))
        if run.explain:
            explain_run(engine, run.policy, "text", len(tokens))
        started = time.monotonic()
        with tokens_progress("reading", len(tokens)) as step:
            found = holdings.watch(engine, tokens, own.snapshots, step)
        seconds = time.monotonic() - started
        texts = holdings.texts(engine.model, tokens)
        share, archived = found.share(), found.is_archived()
        result = {
            "tokens": len(tokens),
            "forgotten": holdings.n_forgotten(engine),
            "rows": len(found.layer),
            **report(engine, run.policy),
            "tokens_per_s": len(tokens) / seconds,
            "seconds": seconds,
        }

    def picture() -> bytes:
        from kvtool.cli.inspect.plot import held

        return output.png(held(result, found))

    html = own.html, lambda: page(result, found, texts, own.last or _LAST_HTML)
    with output.written(html, (own.plot, picture)):
        if as_json:
            of_tokens = {"text": texts, "share": share.round(4).tolist(), "attended": attended_record(found)}
            typer.echo(json_text(result | of_tokens))
        else:
            show(plain_console(), texts, share, archived, own.last or LAST)
            typer.echo(f"policy {run.policy}, {line(result)}")
            show_attended(table_console(), found, texts)


def _show_map(kind: str, own: _Own, run: RunOptions, text: Source, as_json: bool) -> None:
    from kvtool.cli.inspect import map as inspect_map

    drawn, title = inspect_map.read(kind, own.layer, own.head, run, text, own.max_tokens or N_TOKENS)
    with output.written((own.plot, lambda: inspect_map.picture(kind, drawn, title))):
        if as_json:
            typer.echo(json_text(drawn.record))
        else:
            print_table(drawn.columns, drawn.rows)


def _check(own: _Own, typed: Mapping[str, str]) -> None:
    """Raise UsageError for options that do not go with the map, or that only go with one.

    typed: the parameters that were typed, with their flags.
    """
    of_places = [flag for name, flag in typed.items() if name in ("layer", "head")]
    if own.kind is None:
        if of_places:
            raise UsageError(f"{of_places[0]} needs --map")
    elif other := [flag for name, flag in typed.items() if name not in TAKEN]:
        raise UsageError(f"--map shows the full cache, without a policy: leave out {', '.join(other)}")
    elif own.kind not in OF_PLACES and of_places:
        raise UsageError(f"--map {own.kind} shows all layers and heads: leave out {min(of_places)}")
