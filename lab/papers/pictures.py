"""Draw the pictures of the documents from lab/papers/records; needs matplotlib.

python -m lab.papers.pictures [NAME ...]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.measure import records
from lab.benchmarks.common import make_parser, note
from lab.papers import tables
from lab.papers.experiments.ruler import COUNTED, ROWS
from lab.papers.tables import LABORATORY, ROOT
from lab.papers.texts import FOUR_KINDS

_STYLES = {
    "full": ("black", "s"),
    "recall": ("tab:red", "o"),
    "roco": ("tab:blue", "^"),
    "h2o": ("tab:cyan", "v"),
    "bumblebee": ("tab:orange", "D"),
    "buzz": ("tab:olive", "P"),
    "weightedkv": ("tab:purple", "X"),
    "streamingllm": ("tab:gray", "*"),
    "kvzip": ("tab:green", "P"),
    "expected": ("tab:pink", "D"),
    "keydiff": ("tab:purple", "X"),
    "tova": ("tab:blue", "^"),
    "snapkv": ("tab:olive", "h"),
    "knorm": ("tab:brown", "d"),
}

_KINDS = {Path(file).name: kind for kind, files in FOUR_KINDS.items() for file in files}

_APART = 1.2
"""Minimum ratio of two neighbouring tick labels of an axis."""


def _points(
    lines: Sequence[tables.Line], *, host: bool
) -> Mapping[str, Mapping[str, list[tuple[float, float]]]]:
    """Return points (MiB, percent above the full cache's perplexity), by kind of text and policy.

    host: True to include host memory.
    """
    full = {line["of"]: _mean(line) for line in lines if line["label"] == "full"}
    sums: dict[tuple[str, str, str | None], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        name, _, type_k = line["label"].partition(" ")
        above = 100 * (np.exp(_mean(line) - full[line["of"]]) - 1)
        if line["label"] != "full":
            size = sum(line["bytes"][: 1 + host]) / 2**20
            sums[_KINDS[line["of"]], name, line["budget"] or type_k].append((size, above))
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (kind, name, _), values in sorted(sums.items()):
        size, above = np.mean(values, axis=0).tolist()
        points[kind][name].append((size, above))
    return {kind: {name: sorted(of) for name, of in by_name.items()} for kind, by_name in points.items()}


def _mean(line: tables.Line) -> float:
    return float(np.average(line["scores"]["nll"], weights=line["weights"]["nll"]))


def quality(path: Path, run: str, title: str) -> None:
    """Draw perplexity by bytes, a column for each kind of text. The upper row leaves out host memory."""
    from matplotlib.figure import Figure

    lines = records.read(tables.RESULTS / f"{run}.jsonl")
    named = ("on the device", False), ("on the device and the host", True)
    figure = Figure(figsize=(10, 6.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for part, (where, host) in zip(figure.subfigures(2, 1), named, strict=True):
        by_kind = _points(lines, host=host)
        panels = np.atleast_1d(part.subplots(1, len(by_kind), sharey=True))
        for axes, (kind, policies) in zip(panels, by_kind.items(), strict=True):
            _panel(axes, policies)
            axes.set_title(kind, fontsize="medium")
        part.supxlabel(f"MiB of keys and values {where}", fontsize="medium")
        part.supylabel("% above the full cache's perplexity", fontsize="medium")
        handles, labels = panels[0].get_legend_handles_labels()
        part.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(path)


def _ruler_points(lines: Sequence[tables.Line], *, host: bool) -> Mapping[str, list[tuple[float, float]]]:
    """Return points (MiB, RULER's score in percent), by policy: a point for each removed share."""
    by_row: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        scores = line["scores"]
        name, _, type_kv = line["label"].partition(" ")
        size = np.mean(scores["device"]) + host * np.mean(scores["host"])
        name = name.partition(":")[0]
        by_row[name, line["budget"] or type_kv].append((size, 100 * np.mean(scores["string_match"])))
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (name, _), of_tasks in by_row.items():
        # the mean of the tasks' means
        size, score = np.mean(of_tasks, axis=0).tolist()
        points[name].append((size, score))
    return {name: sorted(of_name) for name, of_name in points.items()}


def ruler(path: Path, run: str, title: str) -> None:
    """Draw RULER's score by bytes, a row for each protocol. The left column leaves out host memory."""
    from matplotlib.figure import Figure

    every = records.read(tables.RESULTS / f"{run}.jsonl")
    every = [line for line in every if line["of"] in COUNTED and line["label"] in ROWS]
    figure = Figure(figsize=(10, 6.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(2, 2, sharey=True)
    for row, question in zip(panels, ("after", "known"), strict=True):
        lines = [line for line in every if line["task"] == question]
        for axes, host in zip(row, (False, True), strict=True):
            for name, points in _ruler_points(lines, host=host).items():
                colour, mark = _STYLES[name]
                label = "full, 4, 8 and 16 bits" if name == "full" else name
                axes.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=5, label=label)
            _ticks(axes, [size for line in axes.lines for size in line.get_xdata().tolist()])
            axes.set_xlabel(f"MiB on the device{' and the host' * host}")
        row[0].set_ylabel(f"RULER, %, question {question}")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(path)


def _panel(axes: Any, policies: Mapping[str, list[tuple[float, float]]]) -> None:
    for name, points in policies.items():
        colour, mark = _STYLES[name]
        # an excess below 0.1 % is drawn as 0.1 %
        values = [(size, max(above, 0.1)) for size, above in points]
        label = "full, 8 and 4 bits" if name == "full" else name
        axes.plot(*zip(*values, strict=True), color=colour, marker=mark, markersize=5, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _ticks(axes, [size for points in policies.values() for size, _ in points])


def _ticks(axes: Any, sizes: Sequence[float]) -> None:
    """Put ticks at the sizes in MiB on a logarithmic x axis."""
    axes.set_xscale("log", base=2)
    ticks = [0.0]
    for size in sorted(set(sizes)):
        # keep only the first of several numbers that would overlap
        ticks += [size] * (size > _APART * ticks[-1])
    axes.set_xticks(ticks[1:])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.margins(x=0.1)


PICTURES: dict[str, Callable[[], None]] = {
    "smollm2": lambda: quality(
        ROOT / "docs" / "which-smollm2.png", "which-texts", "SmolLM2-135M, 3,072 tokens"
    ),
    "ruler": lambda: ruler(LABORATORY / "ruler.png", "ruler", "RULER, Qwen2.5-Coder-1.5B, 4,096 tokens"),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        parser.error(f"no picture {', '.join(unknown)}; there are: {', '.join(PICTURES)}")
    for name in names:
        PICTURES[name]()
        note(f"{name}: drawn")


if __name__ == "__main__":
    main()
