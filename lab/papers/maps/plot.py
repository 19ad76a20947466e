"""Pictures of maps, a function for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from lab.papers.maps.measure import Attention, Place, Share, SimilarQueries, Values

MAX_PIXELS = 800
"""Maximum number of pixels along each side of a map. In a longer text several tokens share a pixel."""

_GREEN = (0, 0.62, 0.25)
_RED = "#e00000"
_FAINT = 1e-5
"""A key that is not important is drawn white if its attention is at most this."""


def attention(measured: Attention, title: str) -> Figure:
    """Draw attention by query and key: important keys green, other keys darker if they get more attention.

    Red frames mark two similar queries. One is the last query whose most similar earlier query is some way
    back. The other is this earlier query.
    """
    heads = {(a, b): share for a, b, share in zip(measured.layer, measured.head, measured.share, strict=True)}
    figure, panels = _grid(measured.maps, f"attention of {title}", colorbar=False, n_below=3)
    for place, axes in panels.items():
        of = measured.maps[place]
        n = len(of.attention)
        grey = 1 - 0.6 * np.clip(np.log10(_coarse(of.attention) / _FAINT + 1e-9) / -np.log10(_FAINT), 0, 1)
        # a pixel of several tokens is a lighter green if only some of them are important
        green = np.sqrt(_coarse(of.important))[..., None]
        axes.imshow((1 - green) * grey[..., None] + green * np.array(_GREEN), extent=(0, n, n, 0))
        # choose two queries some way apart, because frames of neighbouring queries would overlap
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
    n_column = len(marks) if figure.get_figwidth() >= 12 else 1
    figure.legend([*marks.values()], [*marks], loc="outside lower center", ncols=n_column, frameon=False)
    return figure


def queries(measured: SimilarQueries, title: str) -> Figure:
    """Draw the cosine similarity of each query to all earlier queries."""
    coarse = {place: _coarse(cosine) for place, cosine in measured.maps.items()}
    earlier = {place: np.tri(len(cosine), dtype=np.bool_) for place, cosine in coarse.items()}
    lowest = min(float(np.quantile(cosine[earlier[place]], 0.01)) for place, cosine in coarse.items())
    figure, panels = _grid(measured.maps, f"cosine similarity of queries, {title}", colorbar=True)
    for place, axes in panels.items():
        n = len(measured.maps[place])
        shown = np.ma.masked_where(~earlier[place], coarse[place])
        image = axes.imshow(shown, extent=(0, n, n, 0), cmap="turbo", vmin=lowest, vmax=1)
        axes.set_xlabel("earlier query")
        axes.set_title(_name(place), fontsize="medium")
    figure.colorbar(image, ax=figure.axes, label="cosine similarity", pad=0.01, shrink=0.8)
    return figure


def values(measured: Values, title: str) -> Figure:
    """Draw the normalised singular values of keys and values, as means over layers and heads."""
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="number of the singular value", ylabel="singular value / first")
    for observed, style in zip(measured.singular, ("-", "--", "-"), strict=False):
        curve = measured.normalised(observed)
        label = f"{observed.value} (rank for 90 %: {measured.rank(observed).mean():.1f})"
        axes.plot(np.arange(1, len(curve) + 1), curve, style, label=label, linewidth=2)
    axes.set(xlim=(1, None), ylim=(0, 1))
    axes.set_title(f"singular values, mean of {len(measured.layer):,} KV heads\n{title}", fontsize="medium")
    axes.grid(True, alpha=0.25)
    axes.legend()
    return figure


def share(measured: Share, title: str) -> Figure:
    """Draw the share of important keys, by layer and by head."""
    layers, row = np.unique(measured.layer, return_inverse=True)
    by_head = np.full((int(measured.head.max()) + 1, len(layers)), np.nan)
    by_head[measured.head, row] = measured.share
    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(measured.layer, measured.share, ".", color="0.6", label="a head")
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
    """f64[m, m], the means of equal parts of an array [n, n]; m is at most MAX_PIXELS."""
    n, n_part = len(array), min(len(array), MAX_PIXELS)
    first = np.arange(n_part) * n // n_part
    size = np.diff(first, append=n)
    sums = np.add.reduceat(np.add.reduceat(array, first, axis=0, dtype=np.float64), first, axis=1)
    coarse: np.ndarray = sums / np.outer(size, size)
    return coarse
