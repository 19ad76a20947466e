"""The pictures of kvtool inspect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from kvtool.config.report import budget
from kvtool.measure.holdings import Holdings
from kvtool.measure.maps import Attention, Place, Queries, Share, Values

MOST_PIXELS, MOST_COLUMNS = 800, 1600
"""Longer texts have several tokens in a pixel of a map, and in a column of the picture of rows."""

_HELD, _ARCHIVED, _WHITE = (0.03, 0.19, 0.42), (0.8, 0.6, 0.9), (1.0, 1.0, 1.0)
_GREEN = (0, 0.62, 0.25)
_RED = "#e00000"
_FAINT = 1e-5
"""Attention from which on a minor key is not white."""


def held(result: dict[str, Any], found: Holdings) -> Figure:
    """Rows by positions: dark where a row holds the token, violet where only the archive has it."""
    rows = found.held()
    n_row, n = rows.shape
    first, size = _parts(n, MOST_COLUMNS)
    archived = found.is_archived() & ~rows
    colours = np.ones((n_row, len(first), 3))
    for tokens, colour in ((rows, _HELD), (archived, _ARCHIVED)):
        columns = np.add.reduceat(tokens, first, axis=1, dtype=np.float64) / size
        colours -= columns[..., None] * (1 - np.array(colour))
    figure = Figure(figsize=(12, min(max(2.5 + n_row * 0.055, 3.5), 14)), dpi=120, layout="constrained")
    # one label per layer, fewer where they would touch
    layer, row, n_head = np.unique(found.layer, return_index=True, return_counts=True)
    step, name = -(-len(layer) // 32), Path(result["model"]).stem
    what = f"{result['policy']}, {budget(result):,} cells per row: which of {n:,} tokens are held ({name})"
    across = "position of the token in the text"
    if len(first) < n:
        across += f"; each column is the mean of {size.max():,} tokens"
    down = f"row: layer, and {int(n_head.max())} KV heads in each"
    axes = figure.add_subplot(title=what, xlabel=across, ylabel=down)
    axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(0, n, n_row, 0))
    axes.set_yticks((row + n_head / 2)[::step], [str(number) for number in layer[::step]])
    names = {"held by the row": _HELD}
    if archived.any():
        names |= {"archived: outside the cache, still used": _ARCHIVED, "forgotten": _WHITE}
    else:
        names["not held by the row"] = _WHITE
    _legend(figure, {name: Patch(facecolor=colour, edgecolor="0.5") for name, colour in names.items()})
    return figure


def attention(found: Attention, title: str) -> Figure:
    """Attention by query and key: important keys green, others the darker the more attention they get.

    Red frames: the last query whose most similar earlier query is some way back, and that earlier query.
    """
    heads = {(a, b): share for a, b, share in zip(found.layer, found.head, found.share, strict=True)}
    figure, panels = _grid(found.maps, f"attention of {title}", colorbar=False, n_below=3)
    for place, axes in panels.items():
        of = found.maps[place]
        n = len(of.attention)
        grey = 1 - 0.6 * np.clip(np.log10(_coarse(of.attention) / _FAINT + 1e-9) / -np.log10(_FAINT), 0, 1)
        # a pixel of several tokens is green if but one of them is important, only lighter
        green = np.sqrt(_coarse(of.important))[..., None]
        axes.imshow((1 - green) * grey[..., None] + green * np.array(_GREEN), extent=(0, n, n, 0))
        # frames of neighbours would lie on each other
        height, later = n / 50, np.arange(1, n)
        apart = later[later - of.similar > n / 16]
        query = int(apart[-1]) if len(apart) else n - 1
        for at in (query, int(of.similar[query - 1])):
            frame = (0, at + 0.5 - height / 2), at + 1, height
            axes.add_patch(Rectangle(*frame, fill=False, color=_RED, linewidth=1.2, clip_on=False))
        axes.set_title(f"{_name(place)}: {heads[place]:.1%} important", fontsize="medium")
    marks = {
        "important key": Patch(facecolor=_GREEN),
        "other key, darker with more attention": Patch(facecolor="0.7"),
        "a query and the earlier query most similar to it": Patch(fill=False, edgecolor=_RED),
    }
    _legend(figure, marks)
    return figure


def queries(found: Queries, title: str) -> Figure:
    """Cosine similarity of each query to all earlier ones."""
    coarse = {place: _coarse(cosine) for place, cosine in found.maps.items()}
    earlier = {place: np.tri(len(cosine), dtype=np.bool_) for place, cosine in coarse.items()}
    lowest = min(float(np.quantile(cosine[earlier[place]], 0.01)) for place, cosine in coarse.items())
    figure, panels = _grid(found.maps, f"cosine similarity of queries, {title}", colorbar=True)
    for place, axes in panels.items():
        n = len(found.maps[place])
        shown = np.ma.masked_where(~earlier[place], coarse[place])
        image = axes.imshow(shown, extent=(0, n, n, 0), cmap="turbo", vmin=lowest, vmax=1)
        axes.set_xlabel("earlier query")
        axes.set_title(_name(place), fontsize="medium")
    figure.colorbar(image, ax=figure.axes, label="cosine similarity", pad=0.01, shrink=0.8)
    return figure


def values(found: Values, title: str) -> Figure:
    """Normalised singular values of keys and values, the mean over layers and heads."""
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="number of the singular value", ylabel="singular value / first")
    for what, style in zip(found.singular, ("-", "--", "-"), strict=False):
        curve = found.normalised(what)
        label = f"{what.value} (rank for 90 %: {found.rank(what).mean():.1f})"
        axes.plot(np.arange(1, len(curve) + 1), curve, style, label=label, linewidth=2)
    axes.set(xlim=(1, None), ylim=(0, 1))
    axes.set_title(f"singular values, mean of {len(found.layer):,} KV heads\n{title}", fontsize="medium")
    axes.grid(True, alpha=0.25)
    axes.legend()
    return figure


def share(found: Share, title: str) -> Figure:
    """The share of important keys, by layer and by head."""
    layers, row = np.unique(found.layer, return_inverse=True)
    by_head = np.full((int(found.head.max()) + 1, len(layers)), np.nan)
    by_head[found.head, row] = found.share
    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(found.layer, found.share, ".", color="0.6", label="a head")
    left.plot(layers, np.nanmean(by_head, axis=0), "o-", color=_RED, label="mean of the layer")
    left.set(xlabel="layer", ylabel="important keys", ylim=(0, None))
    left.yaxis.set_major_formatter("{x:.0%}")
    left.grid(True, alpha=0.25)
    left.legend()
    edges = (-0.5, len(layers) - 0.5, len(by_head) - 0.5, -0.5)
    image = right.imshow(by_head, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=edges)
    step = -(-len(layers) // 16)
    right.set_xticks(np.arange(len(layers))[::step], [str(layer) for layer in layers[::step]])
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="layer", ylabel="head")
    figure.colorbar(image, label="important keys", pad=0.01, format="{x:.0%}")
    figure.suptitle(f"share of important keys, {title}", fontsize="medium")
    return figure


def _legend(figure: Figure, marks: Mapping[str, Patch]) -> None:
    """Put a legend below everything, in one line if the figure is wide."""
    n_column = len(marks) if figure.get_figwidth() >= 12 else 1
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": n_column, "frameon": False}
    figure.legend(handles=list(marks.values()), labels=list(marks), **where)


def _grid(
    maps: Mapping[Place, Any], title: str, *, colorbar: bool, n_below: int = 0
) -> tuple[Figure, dict[Place, Axes]]:
    """A panel for each head; the heads of a layer are below each other.

    colorbar: leave room for a colorbar. n_below: lines of a legend below the panels.
    """
    layers = list(dict.fromkeys(layer for layer, _ in maps))
    columns = [[place for place in maps if place[0] == layer] for layer in layers]
    n_row, n_column = max(map(len, columns)), len(columns)
    size = 6.5 if len(maps) == 1 else 4.2
    room = size * n_column + colorbar, size * n_row + 0.3 + 0.25 * n_below
    figure, panels = Figure(figsize=room, dpi=120, layout="constrained"), {}
    figure.suptitle(title, fontsize="medium")
    for i, column in enumerate(columns):
        for j, place in enumerate(column):
            at = n_row, n_column, j * n_column + i + 1
            panels[place] = axes = figure.add_subplot(*at, xlabel="key", ylabel="query")
            axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _name(place: Place) -> str:
    return f"layer {place[0]}, head {place[1]}"


def _coarse(array: np.ndarray) -> np.ndarray:
    """f64[m, m], the means of equal parts of an array [n, n]; m is at most MOST_PIXELS."""
    first, size = _parts(len(array), MOST_PIXELS)
    sums = np.add.reduceat(np.add.reduceat(array, first, axis=0, dtype=np.float64), first, axis=1)
    coarse: np.ndarray = sums / np.outer(size, size)
    return coarse


def _parts(n: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """First tokens of equal parts of n tokens, at most `most` of them, and the parts' sizes."""
    first = np.unique(np.arange(min(n, most)) * n // min(n, most))
    return first, np.diff(first, append=n)
