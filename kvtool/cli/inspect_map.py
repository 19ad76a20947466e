"""kvtool inspect --map: what the papers show of a model's attention, with the full cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtool.cli import inspect_plot, output
from kvtool.cli.console import print_table
from kvtool.cli.locate import locate
from kvtool.cli.progress import tokens_progress
from kvtool.cli.texts import too_short
from kvtool.errors import InputError, UsageError
from kvtool.options.field import Options, option
from kvtool.options.run import Run
from kvtool.system.texts import json_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from kvtool.llama.model import Model
    from kvtool.measure.maps import Heads, Place, Reading

KINDS = ("attention", "queries", "values", "share")

N_TOKENS = 512
"""Default of --max-tokens with --map."""

NEAR = (1, 16, 256)
"""Distances in tokens for which --map queries says how many queries have their most similar one within."""

TAKEN = {
    *("file", "kind", "layer", "head", "png", "max_tokens", "model", "threads", "gpu_layers", "rpc"),
    *("verbose", "as_json"),
}
"""The parameters of kvtool inspect that go with --map."""

OF_PLACES = ("attention", "queries")
"""The kinds that take --layer and --head."""


def _numbers(usage: str, help: str, words: str) -> Any:
    return option(usage, (), help, least=0, words=words, read=lambda raw, flag: tuple(raw or ()))


@dataclass(frozen=True)
class Map(Options):
    """What of the full cache is shown instead."""

    kind: str | None = option(
        "--map KIND",
        None,
        "Show the full cache instead: attention, queries (their similarity), values (singular "
        "values of keys and values) or share (of important keys).",
        choices=KINDS,
    )
    layer: tuple[int, ...] = _numbers(
        "--layer N",
        "With --map attention or queries: a layer to draw. Repeatable.",
        "the first, the middle and the last",
    )
    head: tuple[int, ...] = _numbers(
        "--head N", "The same: a query head to draw. Repeatable.", "the first and the one in the middle"
    )


def check(shown: Map, typed: Mapping[str, str]) -> None:
    """Raise UsageError for options that do not go with the map, or that only go with one.

    typed: the parameters that were typed, with their flags.
    """
    if shown.kind is None:
        if alone := [flag for name, flag in typed.items() if name in ("layer", "head")]:
            raise UsageError(f"{alone[0]} goes with --map only")
        return
    if other := [flag for name, flag in typed.items() if name not in TAKEN]:
        raise UsageError(f"--map shows the full cache, without a policy: leave out {', '.join(other)}")
    if shown.kind not in OF_PLACES and (of_places := typed.keys() & {"layer", "head"}):
        raise UsageError(f"--map {shown.kind} shows all layers and heads: leave out --{min(of_places)}")


def show(
    shown: Map, run: Run, file: str, text: str, max_tokens: int | None, png: Path | None, as_json: bool
) -> None:
    """Read the text with the full cache, print the numbers of the map, and write its picture.

    Raises KvtoolError.
    """
    from kvtool.measure import maps
    from kvtool.runs.opening import loaded, located, workers_of

    kind = shown.kind or ""
    # a policy's own options may have defaults in config.toml: they have nothing to do here
    run = run.changed(policy="full", options=(), archive=None)
    workers_of(run)
    path, info = located(run, locate)
    with loaded(path, run, guarded=True) as model:
        tokens = model.tokenize(text, start=True)[: max_tokens or N_TOKENS]
        if len(tokens) < 2:
            raise too_short(file, len(tokens), 2)
        if len(tokens) > info.n_ctx_train:
            raise InputError(
                f"{len(tokens):,} tokens are more than the model was trained on; "
                f"choose --max-tokens {info.n_ctx_train} or fewer"
            )
        drawn = _drawn_layers(model, kind)
        places = _places(drawn, info.n_head, shown.layer, shown.head) if kind in OF_PLACES else []
        with tokens_progress("layers", drawn[-1] + 1) as report:
            result, columns, rows, figure = _MAPS[kind](
                maps.Reading(model, tokens, run.threads, report), places
            )
    head = {"map": kind, "tokens": len(tokens), "model": str(path), "layers": drawn}
    failed = None
    if png:
        try:
            title = f"{path.stem}, {len(tokens):,} tokens"
            output.write(png, output.png(figure(title)))
        except UsageError as error:
            failed = error
    if as_json:
        typer.echo(json_text(head | result))
    else:
        print_table(columns, rows)
    # not earlier: a file that cannot be written must not lose the result
    if failed:
        raise failed


def _drawn_layers(model: Model, kind: str) -> list[int]:
    """The layers that the map shows; those that it leaves out are said on stderr. Raises ModelError."""
    from kvtool.measure.maps import drawn_layers

    drawn = drawn_layers(model, kind)
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


# each kind of map: its JSON, the columns and rows of its table, its picture for a title

Drawn = tuple[dict[str, Any], Sequence[str], list[list[str]], Callable[[str], "Figure"]]


def _attention(text: Reading, places: list[Place]) -> Drawn:
    from kvtool.measure import maps

    found = maps.attention(text, places)
    numbers = {name: getattr(found, name) for name in ("share", "similar", "previous", "random")}
    columns = ("layer", "head", "important keys", "overlap: most similar", "query before", "random query")
    rows = _of_heads(found, places, numbers)
    return _record(found, numbers), columns, rows, lambda title: inspect_plot.attention(found, title)


def _queries(text: Reading, places: list[Place]) -> Drawn:
    from kvtool.measure import maps

    found = maps.queries(text, places)
    numbers = {"cosine": found.cosine} | {f"within_{n}": found.within(n) for n in NEAR}
    chance = {f"within_{n}": found.chance(n) for n in NEAR}
    columns = ("layer", "head", "cosine", *(f"within {n}" for n in NEAR))
    rows = _of_heads(found, places, numbers)
    rows.append(["by chance", "", "", *map(_percent, chance.values())])
    record = _record(found, numbers) | {"chance": chance}
    return record, columns, rows, lambda title: inspect_plot.queries(found, title)


def _values(text: Reading, places: list[Place]) -> Drawn:
    from kvtool.llama.observe import What
    from kvtool.measure import maps

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
    return record, columns, rows, lambda title: inspect_plot.values(found, title)


def _share(text: Reading, places: list[Place]) -> Drawn:
    import numpy as np

    from kvtool.measure import maps

    found = maps.share(text)
    rows = []
    for layer in np.unique(found.layer).tolist():
        own = found.share[found.layer == layer]
        rows.append([str(layer), *map(_percent, (own.mean(), own.min(), own.max()))])
    rows.append(["all", *map(_percent, (found.share.mean(), found.share.min(), found.share.max()))])
    columns = ("layer", "important keys", "lowest head", "highest head")
    record = _record(found, {"share": found.share})
    return record, columns, rows, lambda title: inspect_plot.share(found, title)


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
