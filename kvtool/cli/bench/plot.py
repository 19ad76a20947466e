"""The picture of kvtool bench: speeds by depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

_MARKS = "osD^vP*X"


def picture(records: Sequence[dict[str, Any]], model: str) -> Figure:
    """Draw tokens/s against depth. There is a panel for reading and a panel for writing.

    Each kind of cache is a line. A point is the median of the rounds. The bar through a point spans the
    slowest to the fastest round.
    """
    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2)
    ways = list(dict.fromkeys(record["what"] for record in records))
    pairs = ("reading", "read_tokens_per_s"), ("writing", "write_tokens_per_s")
    for axes, (title, name) in zip(panels, pairs, strict=True):
        for i, way in enumerate(ways):
            points = sorted(
                (record["depth"], *(record[name][part] for part in ("median", "min", "max")))
                for record in records
                if record["what"] == way and record[name]
            )
            depth, median, least, most = zip(*points, strict=True) if points else ((),) * 4
            off = [[m - a for m, a in zip(median, least, strict=True)]]
            off.append([a - m for m, a in zip(median, most, strict=True)])
            axes.errorbar(depth, median, off, marker=_MARKS[i % len(_MARKS)], capsize=3, label=way)
        depths = sorted({record["depth"] for record in records})
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [f"{depth:,}" for depth in depths])
        axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="depth in tokens", ylabel="tokens/s")
        axes.grid(alpha=0.2)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.suptitle(f"{model}: higher is better")
    return figure
