"""The table of kvtool bench."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kvtool.measure.machine import line
from kvtool.units import format_bytes

Record = dict[str, Any]

WIDE = 100
"""In terminals at least this wide, the table also shows the range of the rounds and the process's memory."""

LEGEND = (
    "read, write: tokens/s of the last tokens up to the depth, medians of the rounds{range}, read in batches "
    "of {n_read} tokens; first: of a new cache's first token, ms; {device}; "
    "host: cache if it lies there, archive, policy state{process}"
)
DEVICE = "device: by the devices' counters, without the model"
STILL = "device: not known, as the devices' counters stand still"
CACHE = "cache: bytes allocated"
PROCESS = "process: all memory of the process, model included"
NUMBA = ", and numba with about 100 MiB, as not all kernels are linked"


def show(console: Console, records: Sequence[Record], about: Record, *, has_device: bool) -> None:
    """Print a line about the machine, and then one line per record. about: the model and the machine."""
    wide = console.width >= WIDE
    speeds = ("read, tokens/s", "write, tokens/s", "first, ms") if wide else ("read", "write", "first")
    names = [*speeds, "device" if has_device else "cache", "host", *["process"] * wide]
    measured = {id(record): _cells(record, wide) for record in records if _is_measured(record)}
    widths = [max(map(len, column)) for column in zip(names, *measured.values(), strict=True)]
    first = max((len(record["what"]) for record in records), default=0)

    def put(name: str, cells: Sequence[str]) -> None:
        right = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        console.print(Text(f"{name:{first}}{right}"))

    threads = about["machine"]["threads"]
    console.print(Text(f"{line(about['machine'])}\n"))
    console.print(Text(f"{about['model']}, {threads} thread{'s' * (threads != 1)}\n"))
    put("", names)
    for depth in dict.fromkeys(record["depth"] for record in records):
        console.print(Text(f"depth {depth:,}", "italic"))
        for record in (record for record in records if record["depth"] == depth):
            if id(record) in measured:
                put(record["what"], measured[id(record)])
            else:
                console.print(Text(f"{record['what']:{first}}  {record['why']}", "dim"))
    if not measured:
        return
    is_known = any(record["device_bytes"] is not None for record in records)
    device = (DEVICE if is_known else STILL) if has_device else CACHE
    parts = {
        "n_read": _range([record["n_read"] for record in records if _is_measured(record)]),
        "range": " (least-most)" if wide else "",
        "device": device,
        "process": f"; {PROCESS}{NUMBA * ('numba' in sys.modules)}" if wide else "",
    }
    console.print(Text(f"\n{LEGEND.format(**parts)}", "dim"))


def _is_measured(record: Record) -> bool:
    return record["write_tokens_per_s"] is not None


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers, default=0), max(numbers, default=0)
    return f"{least}-{most}" if least < most else f"{most}"


def _cells(record: Record, wide: bool) -> list[str]:
    """All cells but the name in the first column."""
    cells: list[str] = []
    for name, scale in (("read_tokens_per_s", 1), ("write_tokens_per_s", 1), ("first_s", 1000)):
        value = record[name]
        shown = [_number(value[end] * scale) for end in ("median", "min", "max")]
        has_range = wide and scale == 1 and record["rounds"] > 1
        cells.append(f"{shown[0]} ({shown[1]}-{shown[2]})" if has_range else shown[0])
    names = "device_bytes", "host_bytes", *["process_bytes"] * wide
    return [*cells, *("-" if record[name] is None else format_bytes(record[name]) for name in names)]


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
