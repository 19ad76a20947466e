"""The table of kvtool compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from kvtool.cli.console import table
from kvtool.measure.grid import Run
from kvtool.units import format_bytes, format_tokens

Line = tuple[Run, dict[str, Any]]

WIDE = 100
"""In terminals at least this wide, the table also shows cells, intervals and speeds."""

WIDEST = 120
"""In terminals at least this wide, the table also shows the bytes of the budget's cells."""

BEST = {"kv_bytes": min, "perplexity": min, "kl": min, "top1": max, "tokens_per_s": max}
"""Columns in which the best value is marked, and the functions that find it."""

LEGEND = "to full, to best (other run of a budget): difference of nll +- half of its 95 % interval"
MARKS = "{mark}: best of its budget"
RANGE = "; in parentheses: 95 % interval of the perplexity"
BYTES = (
    "budget: bytes of the budget's cells, or of the mean row at its peak if rows differ in length\n"
    "cache: bytes allocated, in steps of 256 cells (64 if rows differ in length)"
)


def show(console: Console, lines: Sequence[Line], text: str, model: str) -> None:
    """Print a line per run, grouped by budget."""
    wide, widest = console.width >= WIDE, console.width >= WIDEST
    mark = "" if console.is_terminal and console.color_system and not console.no_color else "*"
    names = (
        ["cells"] * wide
        + ["budget"] * widest
        + ["cache", "perplexity" if wide else "ppl", "to full", "to best", "KL", "top-1"]
        + ["tokens/s"] * wide
    )
    rows: list[list[str | Text]] = []
    for typed_budget in dict.fromkeys(run.typed_budget for run, _ in lines):
        group = [(run, record) for run, record in lines if run.typed_budget == typed_budget]
        best = _best(group)
        rows += [[]] if rows else []
        rows.append([Text(f"budget {typed_budget}" if typed_budget else "no budget", "italic")])
        for run, record in group:
            cells = {} if "error" in record else _cells(record, best, mark)
            rows.append([run.title, *(cells.get(name, "-") for name in names)])
    columns = [Column("policy", overflow="fold"), *(Column(name, no_wrap=True) for name in names)]
    n_scored = next((record["n_scored"] for _, record in lines if "n_scored" in record), 0)
    console.print(Text(f"{model}, {format_tokens(n_scored)} of {text} scored\n"))
    console.print(table(columns, rows, 1, padding=(0, 1, 0, 0)))
    console.print(Text(f"\n{LEGEND}", "dim"))
    console.print(Text(f"{MARKS.format(mark=mark or 'bold')}{RANGE * wide}", "dim"))
    if widest:
        console.print(Text(BYTES, "dim"))
    archives = {run.title: n for run, record in lines if (n := record.get("archive_bytes"))}
    if archives:
        named = ", ".join(f"{title} {format_bytes(n)}" for title, n in archives.items())
        console.print(Text(f"archive, in addition to the cache: {named}", "dim"))


def _cells(record: dict[str, Any], best: dict[str, float], mark: str) -> dict[str, Text]:
    """Return the table cells of a run by column name. mark: text to append to the best values."""

    def marked(name: str, shown: str) -> Text:
        is_best = name in best and record[name] == best[name]
        return Text(shown + (mark if is_best else " " * len(mark)), "bold" if is_best else "")

    ppl, low, high = f"{record['perplexity']:.2f}", record["perplexity_low"], record["perplexity_high"]
    interval = "-" if low is None else f"({low:.2f}-{high:.2f})"
    return {
        "cells": Text(f"{record['cells']:,.0f}"),
        "budget": Text(format_bytes(record["budget_bytes"])),
        "cache": marked("kv_bytes", format_bytes(record["kv_bytes"])),
        "perplexity": marked("perplexity", f"{ppl} {interval}"),
        "ppl": marked("perplexity", ppl),
        "to full": difference(record, "nll_minus_full"),
        "to best": difference(record, "nll_minus_best"),
        "KL": marked("kl", "-" if record["kl"] is None else f"{record['kl']:.4f}"),
        "top-1": marked("top1", "-" if record["top1"] is None else f"{record['top1']:.1%}"),
        "tokens/s": marked("tokens_per_s", f"{record['tokens_per_s']:.0f}"),
    }


def difference(record: dict[str, Any], name: str) -> Text:
    """Format a difference and its margin. It is dim if 0 is within the margin."""
    # records of earlier versions or of fewer than eight tokens have no margin
    value, margin = record[name], record.get(f"{name}_margin")
    if value is None:
        return Text("-", "dim")
    if margin is None:
        return Text(f"{value:+.3f} +-?", "dim")
    return Text(f"{value:+.3f} +-{margin:.3f}", "dim" if abs(value) <= margin else "")


def _best(group: Sequence[Line]) -> dict[str, float]:
    """Return the best value of each column. Columns in which all values are the same are left out."""
    values_of = {name: {record[name] for _, record in group if record.get(name) is not None} for name in BEST}
    return {name: BEST[name](values) for name, values in values_of.items() if len(values) > 1}
