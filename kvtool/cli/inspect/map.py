"""kvtool inspect --map: what the papers show of a model's attention, with the full cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtool.cli import output
from kvtool.cli.console import say
from kvtool.cli.locate import locate
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import first_tokens
from kvtool.config.opening import gpu_note, loaded, located, workers_of
from kvtool.config.run import RunOptions
from kvtool.errors import InputError, UsageError
from kvtool.llama.model import Model
from kvtool.llama.observe import What
from kvtool.measure import maps
from kvtool.measure.maps import Heads, Place, Reading
from kvtool.system.texts import Source

NEAR = (1, 16, 256)
"""Distances in tokens for which --map queries says how many queries have their most similar one within."""


class Drawn(NamedTuple):
    """A map as it is printed.

    Attributes
    ----------
    found
        What the picture shows.
    record
        Its JSON.
    columns, rows
        Its table.
    """

    found: Heads
    record: dict[str, Any]
    columns: Sequence[str]
    rows: list[list[str]]


def read(
    kind: str, layers: Sequence[int], heads: Sequence[int], run: RunOptions, text: Source, n_tokens: int
) -> tuple[Drawn, str]:
    """Read the text with the full cache. Returns the map, and a title for its picture. Raises KvtoolError."""
    workers = workers_of(run.rpc, run.gpu_layers)
    path, info = located(run.model, locate)
    with loaded(path, run.gpu_layers, workers, verbose=run.verbose > 1, guarded=True) as model:
        say([gpu_note(run.gpu_layers)])
        tokens = first_tokens(model, text, n_tokens)
        if len(tokens) > info.n_ctx_train:
            raise InputError(
                f"{len(tokens):,} tokens are more than the model was trained on; "
                f"choose --max-tokens {info.n_ctx_train} or fewer"
            )
        layers_drawn = _drawn_layers(model, kind)
        places = _places(layers_drawn, info.n_head, layers, heads)
        with tokens_progress("layers", layers_drawn[-1] + 1) as report:
            drawn = _MAPS[kind](Reading(model, tokens, run.threads, report), places)
    head = {"map": kind, "tokens": len(tokens), "model": str(path), "layers": layers_drawn}
    return drawn._replace(record=head | drawn.record), f"{path.stem}, {len(tokens):,} tokens"


def picture(kind: str, drawn: Drawn, title: str) -> bytes:
    """The picture of a map, a PNG file."""
    from kvtool.cli.inspect import plot as inspect_plot

    # a function of that name for each kind
    return output.png(getattr(inspect_plot, kind)(drawn.found, title))


def _drawn_layers(model: Model, kind: str) -> list[int]:
    """The layers that the map shows; those that it leaves out are said on stderr. Raises ModelError."""
    drawn = maps.drawn_layers(model, kind)
    if missing := sorted({layer.number for layer in model.layers.all} - set(drawn)):
        why = "they do not attend to all tokens"
        if kind == "values":
            why += ", or have no keys of their own"
        sys.stderr.write(f"layers {', '.join(map(str, missing))} are left out: {why}\n")
    return drawn


def _places(
    drawn: Sequence[int], n_head: Sequence[int], layers: Sequence[int], heads: Sequence[int]
) -> list[Place]:
    """The layers and heads of the picture, layer by layer. n_head: query heads of each layer.

    Without layers the first, the middle and the last; without heads the first and the one in the middle.
    Raises UsageError.
    """
    chosen = list(dict.fromkeys(layers or (drawn[0], drawn[len(drawn) // 2], drawn[-1])))
    for layer in chosen:
        if layer not in drawn:
            last = f"0 to {drawn[-1]}" if len(drawn) == drawn[-1] + 1 else ", ".join(map(str, drawn))
            raise UsageError(f"--layer must be one of {last}, got {layer}")
    found = []
    for layer in chosen:
        for head in dict.fromkeys(heads or (0, n_head[layer] // 2)):
            if head >= n_head[layer]:
                raise UsageError(f"--head must be one of 0 to {n_head[layer] - 1}, got {head}")
            found.append((layer, head))
    return found


# each kind of map


def _attention(text: Reading, places: list[Place]) -> Drawn:
    found = maps.attention(text, places)
    numbers = {name: getattr(found, name) for name in ("share", "similar", "previous", "random")}
    columns = ("layer", "head", "important keys", "overlap: most similar", "query before", "random query")
    return Drawn(found, _record(found, numbers), columns, _of_heads(found, places, numbers))


def _queries(text: Reading, places: list[Place]) -> Drawn:
    found = maps.queries(text, places)
    numbers = {"cosine": found.cosine} | {f"within_{n}": found.within(n) for n in NEAR}
    chance = {f"within_{n}": found.chance(n) for n in NEAR}
    columns = ("layer", "head", "cosine", *(f"within {n}" for n in NEAR))
    by_chance = ["by chance", "", "", *map(_percent, chance.values())]
    record = _record(found, numbers) | {"chance": chance}
    return Drawn(found, record, columns, [*_of_heads(found, places, numbers), by_chance])


def _values(text: Reading, places: list[Place]) -> Drawn:
    found = maps.values(text)
    if What.KEYS_BEFORE not in found.singular:
        sys.stderr.write("llama.cpp does not show keys before RoPE of this model\n")
    rows, record = [], {"layer": found.layer.tolist(), "head": found.head.tolist()}
    for what in found.singular:
        ranks, curve = found.rank(what), found.normalised(what)
        half = float(curve[len(curve) // 2 - 1])
        numbers = f"{ranks.mean():.1f}", f"{ranks.min()} to {ranks.max()}", f"{half:.3f}"
        rows.append([what.value, str(len(curve)), *numbers])
        record[what.name.lower()] = {"rank": ranks.tolist(), "normalised": curve.round(6).tolist()}
    columns = ("", "dimensions", "rank for 90 %", "of single heads", "middle value / first")
    return Drawn(found, record, columns, rows)


def _share(text: Reading, places: list[Place]) -> Drawn:
    found = maps.share(text)
    groups = {str(layer): found.share[found.layer == layer] for layer in dict.fromkeys(found.layer.tolist())}
    rows = [
        [name, *map(_percent, (own.mean(), own.min(), own.max()))]
        for name, own in (groups | {"all": found.share}).items()
    ]
    columns = ("layer", "important keys", "lowest head", "highest head")
    return Drawn(found, _record(found, {"share": found.share}), columns, rows)


def _record(found: Heads, numbers: dict[str, np.ndarray]) -> dict[str, Any]:
    """What --json says of each head, and the means."""
    columns = {"layer": found.layer.tolist(), "head": found.head.tolist()}
    columns |= {name: column.round(6).tolist() for name, column in numbers.items()}
    return columns | {"mean": {name: float(column.mean()) for name, column in numbers.items()}}


def _of_heads(found: Heads, places: list[Place], numbers: dict[str, np.ndarray]) -> list[list[str]]:
    """A line for each head of the picture, and one for the mean over all."""
    rows = []
    for layer, head in places:
        at = (found.layer == layer) & (found.head == head)
        rows.append([str(layer), str(head), *(_number(name, column[at]) for name, column in numbers.items())])
    means = (_number(name, column) for name, column in numbers.items())
    return [*rows, ["all", f"{len(found.layer):,} heads", *means]]


def _number(name: str, column: np.ndarray) -> str:
    return f"{column.mean():.3f}" if name == "cosine" else _percent(column.mean())


def _percent(share: float) -> str:
    return f"{share:.1%}"


_MAPS = {"attention": _attention, "queries": _queries, "values": _values, "share": _share}
