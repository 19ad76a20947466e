"""The picture of kvtool compare: quality against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvtool.cli.compare_table import Row


def picture(rows: Sequence[Row], text: str, model: str) -> Figure:
    """The divergence to the full cache, or the nll where there is none, over the cells' bytes.

    A line a policy; one of its own for full as its types shrink it.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    done = [(cell, record) for cell, record in rows if "error" not in record]
    has_kl = any(record["kl"] is not None for _, record in done)
    name = "kl" if has_kl else "nll"
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, record in done:
        label = "full, quantized" if cell.policy == "full" else cell.label
        if cell.policy != "full" and cell.asked is None:
            label = f"{label}, no budget"
        elif cell.policy != "full" and cell.type_k != "f16":
            label = f"{label} {cell.type_k}"
        point = record["budget_bytes"] / 2**20, record[name]
        # a logarithm has no place for the full cache itself
        if point[1] is not None and (point[1] > 0 or not has_kl):
            lines.setdefault(label, []).append(point)
    figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours, marks = colormaps["tab20"], "osD^vP*X"
    for i, (label, points) in enumerate(lines.items()):
        bold = {"color": "black", "linewidth": 2.5, "linestyle": "--"} if label == "full, quantized" else {}
        # the darker of its pairs first
        style: dict[str, Any] = {
            "color": colours((2 * i + i // 10 % 2) % 20),
            "marker": marks[i % len(marks)],
            "label": label,
        } | bold
        axes.plot(*zip(*sorted(points), strict=True), **style)
    for cell, record in done:
        if (cell.policy, cell.type_k) == ("full", "f16"):
            axes.axvline(record["budget_bytes"] / 2**20, color="grey", linestyle=":", label="full, f16")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if has_kl:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MiB of K and V that the budget's cells take")
    axes.set_ylabel("KL to the full cache, nats a token" if has_kl else "nll, nats a token")
    n_scored = next((record["n_scored"] for _, record in done), 0)
    axes.set_title(f"{model}, {n_scored:,} tokens of {text}: lower is better")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return figure
