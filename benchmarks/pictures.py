"""Draw the pictures of the documents from docs/papers/records; needs matplotlib.

python benchmarks/pictures.py [NAME ...]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tables
from common import make_parser, note
from tables import ROOT

_DOCS = ROOT / "docs"


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


PICTURES: dict[str, Callable[[], None]] = {
    "curve": lambda: curve(_DOCS / "papers" / "weightedkv-figure-4.png"),
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
