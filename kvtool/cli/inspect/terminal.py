"""Show tokens in a terminal, for kvtool inspect and /cells.

The colour of a token shows the share of rows that hold the token. Shares are divided into levels: each level
has one colour.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.table import Column
from rich.text import Text

from kvtool.cli.console import table
from kvtool.measure.holdings import Holdings
from kvtool.units import format_tokens

BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""The largest share of each level from 1 to 6. Level 7 is for larger shares below 1.

Most shares are small, so the steps between small shares are finer.
"""
N_ATTENDED = 10
"""Number of archived tokens that a terminal lists. These are the tokens that get the most attention."""

ALL = len(BOUNDS) + 2
"""Colour level of a token that all rows hold."""
ARCHIVED = ALL + 1
"""Colour level of a token that only the archive holds."""
_DARK = (17, 18, 24, 25, 31, 38, 45, 123, 53)
_LIGHT = (195, 153, 117, 111, 75, 69, 33, 27, 225)
"""Background colours of the levels from 1 on, for dark and for light terminals.

Each colour is an index into the 256 colours of a terminal.
"""
_BRIGHT = {38, 45, 123, *_LIGHT[:-2], 225}
"""Background colours on which text is dark."""

Line = list[tuple[str, int]]
"""A line in a terminal: pieces of text, and the level of each piece."""


def show(console: Console, texts: Sequence[str], share: np.ndarray, archived: np.ndarray, last: int) -> None:
    """Print one line that shows the whole stream, and then the text of the last tokens.

    A terminal without 256 colours gets marks below each line instead of colours.

    share: f64[n], share of rows that hold each token. archived: b1[n], True for tokens that only the archive
    holds.
    """
    n, n_archived = len(texts), int(archived.sum())
    levels = _levels(share, archived)
    shaded = console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")
    draw: Callable[..., Sequence[str | Text]] = _shaded if shaded else _marked
    # leave the last column free, because some terminals begin a new line after it
    width = max(console.width - 1, 20)
    _print(console, _legend(shaded, n_archived > 0), wrap=True)
    _print(console, f"\nthe whole stream of {format_tokens(n)}, left to right:", wrap=True)
    # print only the last line: without colours, `draw` returns two lines, and the first has only blanks
    _print(console, draw(_strip(share, archived, width))[-1])
    heading = "the text"
    if n > last:
        heading = f"the last {format_tokens(last)}; {n - last:,} earlier ones are not shown"
    _print(console, f"\n{heading}:\n", wrap=True)
    for line in lines(texts[-last:], levels[-last:], width):
        _print(console, *draw(line))
    n_all, n_none = int((share == 1).sum()), int((share == 0).sum())
    in_archive = f"{n_archived:,} archived, " if n_archived else ""
    held = f"{n_all:,} held by every row, {n - n_all - n_none:,} by some"
    _print(console, f"\n{format_tokens(n)}: {held}, {in_archive}{n_none - n_archived:,} forgotten", wrap=True)


def attended_record(held: Holdings) -> dict[str, Any] | None:
    """Return columns for --json about the attention to archived tokens. None if there is no archive.

    Each column has one value per token. "attention" is the token's share of all attention. "layer" and "head"
    name the row that attends to the token most, and "row_attention" is the token's share of that row's
    attention. "query" and "query_attention": see `Attended`.
    """
    attended = held.attended
    if not attended:
        return None
    share, rows = attended.share(), attended.row_share()
    row, none = rows.argmax(axis=0), share == 0
    columns = {
        "attention": share.round(6),
        "layer": np.where(none, -1, held.layer[row]),
        "head": np.where(none, -1, held.head[row]),
        "row_attention": rows.max(axis=0).round(6),
        "query": attended.query,
        "query_attention": attended.query_share.round(6),
    }
    return {name: column.tolist() for name, column in columns.items()}


def show_attended(console: Console, held: Holdings, texts: Sequence[str]) -> None:
    """Print the archived tokens that get the most attention.

    Each is printed with the text before it, and with the row and the query that attend to it most.
    """
    record = attended_record(held)
    if not record:
        return
    shares = record["attention"]
    most = [i for i in sorted(range(len(shares)), key=lambda i: -shares[i])[:N_ATTENDED] if shares[i]]
    names = "attention", "layer/head", "query"
    rows = []
    for at in ({name: column[i] for name, column in record.items()} for i in most):
        row = f"{at['layer']}/{at['head']} ({at['row_attention']:.1%})"
        rows.append((f"{at['attention']:.2%}", row, f"{at['query']:,} ({at['query_attention']:.1%})"))
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    # if the terminal is narrow, cut only the column with the text
    room = console.width - sum(max(map(len, cells)) + 2 for cells in zip(names, *rows, strict=True))
    columns.append(Column("token", no_wrap=True, overflow="ellipsis", max_width=max(room, 1)))
    heading = f"archived tokens got at least {sum(shares):.0%} of all attention; these got most"
    _print(console, f"\n{heading}:\n", wrap=True)
    shown = [(*row, _with_context(texts, i)) for row, i in zip(rows, most, strict=True)]
    console.print(table(columns, shown))


def _with_context(texts: Sequence[str], i: int) -> Text:
    """Return one text with the position of token i, the text before the token, and the underlined token."""
    before = visible("".join(texts[max(i - 5, 0) : i])).replace("\n", "")
    token = visible(texts[i]).replace("\n", "")
    return Text.assemble((f"{i:,} ", ""), (before, "dim"), (token, "underline"))


def lines(texts: Iterable[str], levels: Iterable[int], width: int) -> Iterator[Line]:
    """Split tokens into lines of at most `width` columns. Lines end between words and at line breaks."""
    line: Line = []
    used = 0
    for word in _words(texts, levels):
        if used and used + sum(cell_len(text) for text, _ in word) > width:
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
    """Yield words. A word is a group of tokens without a space between them."""
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
    """Replace control characters by visible symbols, so that a text cannot control the terminal."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def _levels(share: np.ndarray, archived: np.ndarray) -> list[int]:
    """Return the level of each token: 0 if no row holds it, 1 to 7 according to `BOUNDS`, ALL or ARCHIVED."""
    held = np.where(share < 1, np.searchsorted(BOUNDS, share) + 1, ALL)
    levels: list[int] = np.where(archived, ARCHIVED, np.where(share > 0, held, 0)).tolist()
    return levels


@cache
def _style(level: int) -> Style:
    if not level:
        return Style(color="color(244)")
    # some terminals set COLORFGBG to the indices of their colours, as "foreground;background"
    light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    ground = (_LIGHT if light else _DARK)[level - 1]
    return Style(color=f"color({16 if ground in _BRIGHT else 231})", bgcolor=f"color({ground})")


def _shaded(line: Line) -> list[Text]:
    return [Text.assemble(*((text, _style(level)) for text, level in line))]


def _marked(line: Line) -> list[str]:
    """Return two lines: the text of a line, and a line with a mark below each column of the text."""
    marks = "".join(_MARKS[level] * cell_len(text) for text, level in line)
    return ["".join(text for text, _ in line), marks]


_MARKS = ".1234567#a"


def _legend(shaded: bool, has_archive: bool) -> str | Text:
    names = ["no row", *(f"{bound:.0%}" for bound in BOUNDS), "more", "all rows"]
    names += ["archived"] * has_archive
    if not shaded:
        signs = (f"{mark} {name}" for mark, name in zip(_MARKS, names, strict=False))
        return f"held by up to: {', '.join(signs)}"
    swatches = ((f" {name} ", _style(level)) for level, name in enumerate(names))
    return Text.assemble("held by up to:", *swatches)


def _strip(share: np.ndarray, archived: np.ndarray, width: int) -> Line:
    """Split the stream into equal parts. Return a line that has a coloured blank for each part.

    If the parts cannot be equal, longer and shorter parts alternate evenly. The level of a part is ARCHIVED
    if most of its tokens are archived. Otherwise it is the level of their mean share.
    """
    n, n_part = len(share), min(width, len(share))
    starts = np.arange(n_part) * n // n_part
    lengths = np.diff(starts, append=n)
    mean, is_archived = (np.add.reduceat(x, starts, dtype=np.float64) / lengths for x in (share, archived))
    return [(" ", level) for level in _levels(mean, is_archived > 0.5)]


def _print(console: Console, *texts: str | Text, wrap: bool = False) -> None:
    """Print lines. wrap: True to wrap long lines between words if the console is a terminal."""
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=not (wrap and console.is_terminal))
