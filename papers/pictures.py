"""Draw the pictures of the documents from papers/records; needs matplotlib.

python -m papers.pictures [NAME ...]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import make_parser, note
from kvtool.measure import records
from papers import tables
from papers.experiments import which
from papers.tables import LABORATORY, ROOT

_STYLES = {
    "full": ("black", "s"),
    "recall": ("tab:red", "o"),
    "roco": ("tab:blue", "^"),
    "h2o": ("tab:cyan", "v"),
    "bumblebee": ("tab:orange", "D"),
    "buzz": ("tab:olive", "P"),
    "weightedkv": ("tab:purple", "X"),
    "streamingllm": ("tab:gray", "*"),
}


def curve(path: Path) -> None:
    """WeightedKV's Figure 4: the mean log-perplexity up to each token of a book, with and without merging."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    words = {"weightedkv": "values merge (WeightedKV)", "weightedkv:merge=false": "the same tokens, evicted"}
    for line in tables.kept(["curve"]):
        counts, nll = np.array(line["weights"]["nll"]), np.array(line["scores"]["nll"])
        n = counts.cumsum()
        axes.plot(
            n, (nll * counts).cumsum() / n, label=f"{words[line['label']]}, {line['budget']} tokens kept"
        )
    axes.set_xlabel("tokens read")
    axes.set_ylabel("nats a token, the mean so far")
    axes.legend(frameon=False)
    figure.savefig(path)


def _points(lines: Sequence[tables.Line]) -> Mapping[str, Mapping[str, list[tuple[float, float]]]]:
    """By kind of text and policy: MiB on the device, and percent above the perplexity of the full cache."""
    full = {line["of"]: _mean(line) for line in lines if line["label"] == "full"}
    sums: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for line in lines:
        name = line["label"].partition(" ")[0]
        above = 100 * (np.exp(_mean(line) - full[line["of"]]) - 1)
        if line["label"] != "full":
            sums[which.KINDS[line["of"]], name, line["bytes"][0] / 2**20].append(above)
    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (kind, name, size), values in sorted(sums.items()):
        found[kind][name].append((size, float(np.mean(values))))
    return found


def _mean(line: tables.Line) -> float:
    return float(np.average(line["scores"]["nll"], weights=line["weights"]["nll"]))


def quality(path: Path, run: str, title: str) -> None:
    """Quality by bytes on the device, a panel for each kind of text."""
    from matplotlib.figure import Figure

    found = _points(records.read(tables.RESULTS / f"{run}.jsonl"))
    figure = Figure(figsize=(10, 3.4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for axes, (kind, policies) in zip(np.atleast_1d(panels), found.items(), strict=True):
        for name, points in policies.items():
            colour, mark = _STYLES[name]
            # an excess below a tenth of a percent is drawn as one
            values = [(size, max(above, 0.1)) for size, above in points]
            label = "full, 8 and 4 bits" if name == "full" else name
            axes.plot(*zip(*values, strict=True), color=colour, marker=mark, markersize=5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(kind, fontsize="medium")
        axes.set_xticks(sorted({size for points in policies.values() for size, _ in points}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.margins(x=0.1)
        axes.yaxis.set_major_formatter("{x:g}")
    figure.supxlabel("MiB of keys and values on the device", fontsize="medium")
    figure.supylabel("% above the full cache's perplexity", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(path)


PICTURES: dict[str, Callable[[], None]] = {
    "curve": lambda: curve(LABORATORY / "weightedkv-figure-4.png"),
    "smollm2": lambda: quality(
        ROOT / "docs" / "which-smollm2.png", "which-texts", "SmolLM2-135M, 3,072 tokens"
    ),
    "qwen-0.5b": lambda: quality(
        LABORATORY / "which-qwen-0.5b.png", "which-texts-0.5b", "Qwen2.5-Coder-0.5B, 2,048 tokens"
    ),
    "qwen-1.5b": lambda: quality(
        LABORATORY / "which-qwen-1.5b.png", "which-texts-1.5b", "Qwen2.5-Coder-1.5B, 2,048 tokens"
    ),
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
