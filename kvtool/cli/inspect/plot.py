"""The picture of kvtool inspect --plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvtool.config.report import budget
from kvtool.measure.holdings import Holdings

MAX_COLUMNS = 1600
"""Maximum number of columns of the picture. If the text is longer, each column shows several tokens."""

_HELD, _ARCHIVED, _WHITE = (0.03, 0.19, 0.42), (0.8, 0.6, 0.9), (1.0, 1.0, 1.0)


def picture(result: dict[str, Any], held: Holdings) -> Figure:
    """Draw which rows (y axis) hold which tokens (x axis).

    A token is dark if the row holds it, and violet if only the archive holds it.
    """
    rows = held.held()
    n_row, n = rows.shape
    first, size = equal_parts(n, MAX_COLUMNS)
    archived = held.is_archived() & ~rows
    colours = np.ones((n_row, len(first), 3))
    for tokens, colour in ((rows, _HELD), (archived, _ARCHIVED)):
        columns = np.add.reduceat(tokens, first, axis=1, dtype=np.float64) / size
        colours -= columns[..., None] * (1 - np.array(colour))
    figure = Figure(figsize=(12, min(max(2.5 + n_row * 0.055, 3.5), 14)), dpi=120, layout="constrained")
    # label at most 32 layers, because more labels would touch
    layer, row, n_head = np.unique(held.layer, return_index=True, return_counts=True)
    step, name = -(-len(layer) // 32), Path(result["model"]).stem
    title = f"{result['policy']}, {budget(result):,} cells per row: which of {n:,} tokens are held ({name})"
    across = "position of the token in the text"
    if len(first) < n:
        across += f"; each column is the mean of {size.max():,} tokens"
    down = f"row: layer, and {int(n_head.max())} KV heads in each"
    axes = figure.add_subplot(title=title, xlabel=across, ylabel=down)
    axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(0, n, n_row, 0))
    axes.set_yticks((row + n_head / 2)[::step], [str(number) for number in layer[::step]])
    names = {"held by the row": _HELD}
    if archived.any():
        names |= {"archived: outside the cache, still used": _ARCHIVED, "forgotten": _WHITE}
    else:
        names["not held by the row"] = _WHITE
    legend(figure, {name: Patch(facecolor=colour, edgecolor="0.5") for name, colour in names.items()})
    return figure


def legend(figure: Figure, marks: Mapping[str, Patch]) -> None:
    """Add a legend below the figure. If the figure is wide, the legend has a single line."""
    n_column = len(marks) if figure.get_figwidth() >= 12 else 1
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": n_column, "frameon": False}
    figure.legend(handles=list(marks.values()), labels=list(marks), **where)


def equal_parts(n: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Split n tokens into at most `most` parts of about equal size.

    Return the index of each part's first token, and each part's size.
    """
    first = np.unique(np.arange(min(n, most)) * n // min(n, most))
    return first, np.diff(first, append=n)
