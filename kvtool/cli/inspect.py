"""kvtool inspect: shows which tokens of a text the rows still hold."""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import inspect_map, output
from kvtool.cli.declared import Json, Typed, options
from kvtool.cli.explain import explain_run
from kvtool.cli.inspect_map import Map
from kvtool.cli.opening import open_run
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import check_length
from kvtool.errors import InputError, UsageError
from kvtool.options.field import Options, again, option
from kvtool.options.run import TextRun
from kvtool.system.texts import json_text, read_text

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    from kvtool.measure.holdings import Holdings

LAST = 2048
"""Tokens that a terminal shows by default."""
_LAST_HTML = 20_000

BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Upper ends of the first levels, dense where most shares are. Two levels follow: less than 1, and 1."""
N_RECALLED = 10
"""How many of the tokens recalled most often a terminal shows."""

ARCHIVED = len(BOUNDS) + 3
"""The level of a token that no row holds, but the archive."""
_DARK = (17, 18, 24, 25, 31, 38, 45, 123, 53)
_LIGHT = (195, 153, 117, 111, 75, 69, 33, 27, 225)
"""Background colours (of 256), from few rows to all, then archived: on a dark and on a light terminal."""
_BRIGHT = {38, 45, 123, *_LIGHT[:-2], 225}
"""The backgrounds that need dark letters."""

Line = list[tuple[str, int]]
"""A line on a terminal: texts, each with its level."""


@dataclass(frozen=True)
class _Run(TextRun):
    prefill: str | None = again(
        TextRun,
        "prefill",
        "stream",
        help="How the text is read: stream evicts while reading, whole once at the end.",
        group=None,
        words=True,
    )


@dataclass(frozen=True)
class _Own(Options):
    max_tokens: int | None = option(
        "--max-tokens N",
        None,
        "Read at most this many tokens.",
        least=2,
        words=f"all, with --map {inspect_map.N_TOKENS}",
    )
    snapshots: int = option("--snapshots N", 32, "Points in time that --html can show.", least=1, most=255)
    last: int | None = option(
        "--last N", None, "Number of last tokens to show.", least=1, words=f"{LAST}, in --html {_LAST_HTML}"
    )
    html: Path | None = option("--html", None, "Write a web page with sliders for layer, head and time.")
    png: Path | None = option(
        "--png", None, "Write a picture, rows by positions or the map; needs matplotlib."
    )


@options
def inspect(
    *,
    file: Annotated[str | None, typer.Argument(help="A text file, or - for stdin.")] = None,
    run: _Run,
    own: _Own,
    shown: Map,
    as_json: Json = False,
    typed: Typed,
) -> None:
    """Stream a text through the cache and show which of its tokens the rows still hold.

    With --map show instead what attention looks like with the full cache.
    """
    inspect_map.check(shown, typed)
    output.check_writable(own.html)
    output.check_picture("--png", own.png)
    if file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is nothing to read; name a text file, or give a text on stdin")
        file = "-"
    text = read_text(file)
    if shown.kind:
        inspect_map.show(shown, run, file, text, own.max_tokens, own.png, as_json)
        return

    from kvtool.llama.model import Model
    from kvtool.measure import holdings
    from kvtool.runs.report import report

    tokens: np.ndarray

    def length(loaded: Model) -> int:
        nonlocal tokens
        tokens = loaded.tokenize(text, start=True)[: own.max_tokens]
        return len(tokens)

    with open_run(run, length=length) as opened:
        engine = opened.engine
        check_length(engine, len(tokens))
        if run.explain:
            explain_run(engine, run.policy, "text", len(tokens))
        started = time.monotonic()
        with tokens_progress("reading", len(tokens)) as step:
            found = holdings.watch(engine, tokens, own.snapshots, step)
        seconds = time.monotonic() - started
        texts = holdings.texts(engine.model, tokens)
        share, archived = found.share(), holdings.is_archived(engine)
        result = {
            "tokens": len(tokens),
            "forgotten": holdings.n_forgotten(engine),
            "rows": len(found.layer),
            **report(engine, run.policy),
            "tokens_per_s": len(tokens) / seconds,
            "seconds": seconds,
        }
    pictures: Sequence[tuple[Path | None, Callable[[], bytes]]] = (
        (own.html, lambda: page(result, found, texts, own.last or _LAST_HTML)),
        (own.png, lambda: drawn(result, found)),
    )
    failed = None
    for path, data in pictures:
        try:
            if path:
                output.write(path, data())
        except UsageError as error:
            failed = error
    if as_json:
        of_tokens = {"text": texts, "share": share.round(4).tolist()}
        typer.echo(json_text(result | of_tokens | {"recalled": recalled_record(found)}))
    else:
        from kvtool.cli.console import plain_console, table_console

        show(plain_console(), texts, share, archived, own.last or LAST)
        show_recalled(table_console(), found, texts)
    # not earlier: a file that cannot be written must not lose the result
    if failed:
        raise failed


def show(console: Console, texts: Sequence[str], share: np.ndarray, archived: np.ndarray, last: int) -> None:
    """Prints a strip of the whole stream and the last tokens, by the share f64[n] of rows that hold each.

    archived: b1[n], the tokens that only the archive holds. A terminal with 256 colours gets shades; others
    get marks below each line.
    """
    n, n_archived = len(texts), int(archived.sum())
    levels = _levels(share, archived)
    shaded = console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")
    draw: Callable[..., Sequence[str | Text]] = _shaded if shaded else _marked
    # some terminals break the line in the last column
    width = max(console.width - 1, 20)
    _print(console, _legend(shaded, n_archived > 0))
    _print(console, f"\nthe whole stream of {n:,} tokens, left to right:")
    _print(console, *draw(_strip(share, archived, width), marks_only=True))
    if n > last:
        _print(console, f"\nthe last {last:,} tokens; {n - last:,} earlier ones are not shown:\n")
    else:
        _print(console, "\nthe text:\n")
    for line in lines(texts[-last:], levels[-last:], width):
        _print(console, *draw(line))
    n_all, n_none = int((share == 1).sum()), int((share == 0).sum())
    in_archive = f"{n_archived:,} archived, " if n_archived else ""
    _print(
        console,
        f"\n{n:,} tokens: {n_all:,} held by every row, {n - n_all - n_none:,} by some, "
        f"{in_archive}{n_none - n_archived:,} forgotten",
    )


def recalled_record(found: Holdings) -> dict[str, Any] | None:
    """What --json says of recall, for each token: how often, where, and for which query."""
    import numpy as np

    recalled = found.recalled
    if not recalled:
        return None
    times, row = recalled.steps.sum(axis=0), recalled.steps.argmax(axis=0)
    columns = {
        "times": times,
        "rows": (recalled.steps > 0).sum(axis=0),
        "layer": np.where(times, found.layer[row], -1),
        "head": np.where(times, found.head[row], -1),
        "query": recalled.query,
        "query_rows": recalled.rows,
    }
    return {name: column.tolist() for name, column in columns.items()}


def show_recalled(console: Console, found: Holdings, texts: Sequence[str]) -> None:
    """Prints the tokens that were recalled most often, with the text before each and what recalled it."""
    from rich.table import Table

    said = recalled_record(found)
    begin, end = found.archived[-1]
    if not said or begin == end:
        return
    most = sorted(range(len(said["times"])), key=lambda i: -said["times"][i])[:N_RECALLED]
    if not said["times"][most[0]]:
        _print(console, "\nthe whole archive came back in every step: nothing was chosen")
        return
    table, room = Table(box=None, pad_edge=False), console.width
    rows: list[tuple[str, ...]] = []
    for at in ({name: column[i] for name, column in said.items()} for i in most):
        query = f"{at['query']:,} ({at['query_rows']})" if at["query"] >= 0 else ""
        rows.append((f"{at['times']:,}", f"{at['rows']}", f"{at['layer']}/{at['head']}", query))
    for name, *column in zip(("times", "rows", "layer/head", "query (rows)"), *rows, strict=True):
        room -= max(map(len, (name, *column))) + 2
        table.add_column(name, justify="right", no_wrap=True)
    # the text alone is cut where a line is too short
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=max(room, 1))
    for i, cells in zip(most, rows, strict=True):
        table.add_row(*cells, _with_context(texts, i))
    _print(console, f"\nrecalled most often, of {len(found.layer)} rows:\n")
    console.print(table, markup=False, highlight=False)


def _with_context(texts: Sequence[str], i: int) -> Text:
    """Token i with its position and the text before it; the token itself is underlined."""
    from rich.text import Text

    before = visible("".join(texts[max(i - 5, 0) : i])).replace("\n", "")
    token = visible(texts[i]).replace("\n", "")
    return Text.assemble((f"{i:,} ", ""), (before, "dim"), (token, "underline"))


def lines(texts: Iterable[str], levels: Iterable[int], width: int) -> Iterator[Line]:
    """The tokens in lines of at most `width` columns, broken between words; line breaks are shown."""
    from rich.cells import cell_len, chop_cells

    line: Line = []
    used = 0
    for word in _words(texts, levels):
        n_columns = sum(cell_len(text) for text, _ in word)
        if used and used + n_columns > width:
            yield line
            line, used = [], 0
        for text, level in word:
            for i, part in enumerate(text.split("\n")):
                if i:
                    yield line
                    line, used = [], 0
                for piece in chop_cells(part, width) if used + cell_len(part) > width else [part]:
                    if used + cell_len(piece) > width:
                        yield line
                        line, used = [], 0
                    if piece:
                        line.append((piece, level))
                        used += cell_len(piece)
    if line:
        yield line


def _words(texts: Iterable[str], levels: Iterable[int]) -> Iterator[Line]:
    """Groups tokens that no space separates."""
    word: Line = []
    for text, level in zip(texts, levels, strict=True):
        if word and (text[:1].isspace() or word[-1][0][-1:].isspace()):
            yield word
            word = []
        word.append((visible(text), level))
    if word:
        yield word


_PICTURES: dict[int, int | str] = {code: 0x2400 + code for code in range(32)}
_PICTURES |= {127: 0x2421, 9: "\u2192   ", 10: "\u23ce\n"}
_PICTURES |= {code: 0xFFFD for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    """The text with pictures of control characters, so that no file can control the terminal."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def _level(held: float) -> int:
    """0 for no row, 1 to 7 by the bounds, 8 for all rows."""
    if held in (0, 1):
        return 8 * int(held)
    return bisect_left(BOUNDS, held) + 1


def _levels(share: np.ndarray, archived: np.ndarray) -> list[int]:
    return [
        ARCHIVED if is_archived else _level(held)
        for held, is_archived in zip(share.tolist(), archived.tolist(), strict=True)
    ]


@cache
def _style(level: int) -> Style:
    from rich.style import Style

    if not level:
        return Style(color="color(244)")
    # a few terminals say here whether they are light, as in "15;0"
    light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    ground = (_LIGHT if light else _DARK)[level - 1]
    return Style(color=f"color({16 if ground in _BRIGHT else 231})", bgcolor=f"color({ground})")


def _shaded(line: Line, marks_only: bool = False) -> list[Text]:
    from rich.text import Text

    return [Text.assemble(*((text, _style(level)) for text, level in line))]


def _marked(line: Line, marks_only: bool = False) -> list[str]:
    """A line, and a line of marks, one per column."""
    from rich.cells import cell_len

    marks = "".join(_MARKS[level] * cell_len(text) for text, level in line)
    return [marks] if marks_only else ["".join(text for text, _ in line), marks]


_MARKS = ".1234567#a"


def _legend(shaded: bool, has_archive: bool) -> str | Text:
    from rich.text import Text

    names = ["no row", *(f"{bound:.0%}" for bound in BOUNDS), "more", "all rows"]
    names += ["archived"] * has_archive
    if not shaded:
        signs = (f"{mark} {name}" for mark, name in zip(_MARKS, names, strict=False))
        return f"held by up to: {', '.join(signs)}"
    swatches = ((f" {name} ", _style(level)) for level, name in enumerate(names))
    return Text.assemble("held by up to:", *swatches)


def _strip(share: np.ndarray, archived: np.ndarray, width: int) -> Line:
    """The mean share of equal parts of the stream, one a column; archived where most of a part is."""
    import numpy as np

    mean, is_archived = (
        np.array([part.mean() for part in np.array_split(of_tokens, min(width, len(share)))])
        for of_tokens in (share, archived)
    )
    return [(" ", level) for level in _levels(mean, is_archived > 0.5)]


def _print(console: Console, *texts: str | Text) -> None:
    for text in texts:
        console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)


def page(result: dict[str, Any], found: Holdings, texts: list[str], last: int) -> bytes:
    """The web page, with all its data inside."""
    import json
    from importlib.resources import files

    first = max(len(texts) - last, 0)
    data = {
        "about": {key: result[key] for key in ("policy", "params", "budget", "tokens", "rows", "cells")},
        "model": Path(result["model"]).name,
        "first": first,
        "bounds": BOUNDS,
        "texts": [visible(text) for text in texts[first:]],
        "layer": found.layer.tolist(),
        "head": found.head.tolist(),
        "ends": found.ends.tolist(),
        "archived": found.archived.tolist(),
        "until": _deflated(found.until[:, first:]),
        "recalled": None,
    }
    if recalled := found.recalled:
        data["recalled"] = {
            "steps": _deflated(recalled.steps[:, first:].clip(max=65535).astype("<u2")),
            "query": recalled.query[first:].tolist(),
            "rows": recalled.rows[first:].tolist(),
        }
    # inside a script element, only "</" could end it
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = files("kvtool.cli").joinpath("inspect.html").read_text(encoding="utf-8")
    return page.replace("{{data}}", text).encode()


def _deflated(array: np.ndarray) -> str:
    """An array's bytes, row by row, deflated, in base64."""
    import base64
    import zlib

    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def drawn(result: dict[str, Any], found: Holdings) -> bytes:
    """A picture of rows by positions, dark where a row holds the token."""
    import numpy as np
    from matplotlib.figure import Figure

    held = found.held()
    n_row, n = held.shape
    # at most 1,600 columns: longer texts have several tokens per column
    first = np.unique(np.arange(min(n, 1600)) * n // min(n, 1600))
    columns = np.add.reduceat(held, first, axis=1, dtype=np.float32) / np.diff(first, append=n)
    figure = Figure(figsize=(12, min(max(2.2 + n_row * 0.055, 3.2), 14)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        columns, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1, extent=(0, n, n_row, 0)
    )
    # one label per layer, fewer where they would touch
    layer, first, n_head = np.unique(found.layer, return_index=True, return_counts=True)
    step = -(-len(layer) // 32)
    axes.set_yticks((first + n_head / 2)[::step], [str(number) for number in layer[::step]])
    axes.set_ylabel(f"row: layer, and {int(n_head.max())} KV heads in each")
    axes.set_xlabel("position of the token in the text")
    name = Path(result["model"]).stem
    axes.set_title(
        f"{result['policy']}, {result['budget']:,} cells per row: which of {n:,} tokens are held ({name})"
    )
    figure.colorbar(image, label="share of the column's tokens that are held", pad=0.01)
    return output.png(figure)
