"""The picture of kvtool compare: quality against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from kvtool import policies
from kvtool.cli.compare.table import Line
from kvtool.units import format_tokens


def picture(lines: Sequence[Line], text: str, model: str) -> Figure:
    """Draw the quality of each policy against bytes: one line per policy, one point per run.

    The quality is the KL from the full cache, or nll if there is no KL above 0. A point is drawn at the bytes
    of the budget's cells, and a thin line connects it to the bytes that were allocated. `full` has no budget:
    it has one point for each cache type.
    """
    done = [(run, record) for run, record in lines if "error" not in record]
    has_kl = any((record["kl"] or 0) > 0 for _, record in done)
    name = "kl" if has_kl else "nll"
    # for each label, the points: MiB of the budget's cells, MiB allocated, and KL or nll
    lines_of: dict[str, list[tuple[float, float, float]]] = {}
    for run, record in done:
        label = run.label
        if not policies.load(run.options.policy).evicts:
            label = f"{label}, quantized"
        elif run.typed_budget is None:
            label = f"{label}, no budget"
        elif run.options.type_k != "f16":
            label = f"{label} {run.options.type_k}"
        value = record[name]
        # leave out the KL of `full`, because a logarithmic axis cannot show 0
        if value is not None and (value > 0 or not has_kl):
            mib = record["budget_bytes"] / 2**20, record["kv_bytes"] / 2**20
            lines_of.setdefault(label, []).append((*mib, value))
    figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours, marks = colormaps["tab20"], "osD^vP*X"
    for i, (label, points) in enumerate(lines_of.items()):
        # tab20 alternates dark and light colours; use the dark ones first
        colour, mark = colours((2 * i + i // 10 % 2) % 20), marks[i % len(marks)]
        style: dict[str, Any] = {"color": colour, "marker": mark, "label": label}
        if label == "full, quantized":
            style |= {"color": "black", "linewidth": 2.5, "linestyle": "--"}
        (line,) = axes.plot(*zip(*sorted((x, y) for x, _, y in points), strict=True), **style)
        thin: dict[str, Any] = {"color": line.get_color(), "linewidth": 0.7, "alpha": 0.6}
        for taken, most, value in points:
            axes.plot((taken, most), (value, value), marker="|", markevery=[1], **thin)
    for run, record in done:
        if run.options.type_k == "f16" and not policies.load(run.options.policy).evicts:
            axes.axvline(record["budget_bytes"] / 2**20, color="grey", linestyle=":", label="full, f16")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    if has_kl:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    n_scored = next((record["n_scored"] for _, record in done), 0)
    axes.set(
        title=f"{model}, {format_tokens(n_scored)} of {text}: lower is better",
        xlabel="MiB of keys and values: points in the budget's cells, thin lines up to what is allocated",
        ylabel="KL from the full cache, nats per token" if has_kl else "nll, nats per token",
    )
    axes.grid(True, which="both", alpha=0.2)
    if done:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return figure
