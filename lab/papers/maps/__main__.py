"""Measure and draw a model's attention to any text, with the full cache.

    python -m lab.papers.maps KIND FILE [--max-tokens 512] [--plot PNG] [--json FILE]

KIND is attention, queries (their similarity), values (singular values of keys and values) or share (of
important keys). A table has the means; --json writes the numbers of every layer and head. The text is one
batch: memory grows with the square of its length. lab/papers/maps.md defines the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtool.cli import output
from kvtool.cli.console import print_table
from kvtool.errors import KvtoolError, UsageError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.models.header import read
from lab.benchmarks.common import add_common, load_model, load_tokens, make_parser, write_json
from lab.papers.maps import measure
from lab.papers.maps.measure import Heads, Place, Reading
from lab.papers.maps.observe import Observed

NEAR = (1, 16, 256)
"""Maximum distances, in tokens, for the map `queries`.

For each distance, the map shows the share of queries whose most similar earlier query is not farther back.
"""

WITH_PLACES = ("attention", "queries")
"""Kinds of maps that show single heads."""


class MeasuredMap(NamedTuple):
    """A measured map.

    Attributes
    ----------
    heads
        Numbers of each head, for the picture.
    record
        The same numbers, for JSON.
    columns, rows
        The same numbers, as a table.
    """

    heads: Heads
    record: dict[str, Any]
    columns: Sequence[str]
    rows: list[list[str]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.prog = "python -m lab.papers.maps"
    parser.add_argument("kind", choices=MAPS)
    add_common(parser)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--layer", type=int, action="append", default=[], help="a layer to draw; repeatable")
    parser.add_argument("--head", type=int, action="append", default=[], help="a query head; repeatable")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the map; needs matplotlib")
    args = parser.parse_args()
    if args.kind not in WITH_PLACES and (args.layer or args.head):
        parser.error(f"{args.kind} shows all layers and heads: leave out --layer and --head")
    if args.max_tokens < 2:
        parser.error("--max-tokens must be at least 2")
    try:
        output.check_writable(args.json)
        output.check_picture(args.plot)
        model = load_model(args.model)
        tokens = load_tokens(model, args.file, args.max_tokens)
        layers = drawn_layers(model, args.kind)
        drawn_places = places(layers, read(model.path).n_head, args.layer, args.head)
        drawn = MAPS[args.kind](Reading(model, tokens, args.threads), drawn_places)
    except KvtoolError as error:
        sys.exit(str(error))
    print_table(drawn.columns, drawn.rows)
    about = {"file": args.file.name, "text_sha256": records.text_sha256(model, tokens)}
    about |= {"model": str(model.path), "tokens": len(tokens), "map": args.kind, "layers": layers}
    write_json(args.json, about | drawn.record | records.versions())
    if args.plot:
        from lab.papers.maps import plot

        # `plot` has a function with the name of each kind
        figure = getattr(plot, args.kind)(drawn.heads, f"{model.path.stem}, {len(tokens):,} tokens")
        args.plot.write_bytes(output.png(figure))


def drawn_layers(model: Model, kind: str) -> list[int]:
    """Return the layers that a map shows, and report missing layers on stderr. Raises ModelError."""
    drawn = measure.drawn_layers(model, kind)
    if missing := sorted({layer.number for layer in model.layers.all} - set(drawn)):
        why = "they do not attend to all tokens"
        if kind == "values":
            why += ", or use the keys of another layer"
        sys.stderr.write(f"layers {', '.join(map(str, missing))} are left out: {why}\n")
    return drawn


def places(
    drawn: Sequence[int], n_head: Sequence[int], layers: Sequence[int], heads: Sequence[int]
) -> list[Place]:
    """Return the layers and heads of the picture, layer by layer. n_head: query heads of each layer.

    Default layers: the first, the middle and the last. Default heads: the first and the middle one.
    Raises UsageError.
    """
    chosen = list(dict.fromkeys(layers or (drawn[0], drawn[len(drawn) // 2], drawn[-1])))
    for layer in chosen:
        if layer not in drawn:
            raise UsageError(f"--layer must be one of {', '.join(map(str, drawn))}, got {layer}")
        if wrong := [head for head in heads if head not in range(n_head[layer])]:
            raise UsageError(f"--head must be one of 0 to {n_head[layer] - 1}, got {wrong[0]}")
    return [(layer, head) for layer in chosen for head in dict.fromkeys(heads or (0, n_head[layer] // 2))]


def _attention(text: Reading, places: list[Place]) -> MeasuredMap:
    attention = measure.attention(text, places)
    numbers = {name: getattr(attention, name) for name in ("share", "similar", "previous", "random")}
    columns = ("layer", "head", "important keys", "overlap: most similar", "query before", "random query")
    return MeasuredMap(attention, _record(attention, numbers), columns, _rows(attention, places, numbers))


def _queries(text: Reading, places: list[Place]) -> MeasuredMap:
    queries = measure.queries(text, places)
    numbers = {"cosine": queries.cosine} | {f"within_{n}": queries.within(n) for n in NEAR}
    chance = {f"within_{n}": queries.chance(n) for n in NEAR}
    columns = ("layer", "head", "cosine", *(f"within {n}" for n in NEAR))
    by_chance = ["by chance", "", "", *map(_percent, chance.values())]
    record = _record(queries, numbers) | {"chance": chance}
    return MeasuredMap(queries, record, columns, [*_rows(queries, places, numbers), by_chance])


def _values(text: Reading, places: list[Place]) -> MeasuredMap:
    values = measure.values(text)
    if Observed.KEYS_BEFORE not in values.singular:
        sys.stderr.write("llama.cpp does not show keys before RoPE of this model\n")
    rows, record = [], {"layer": values.layer.tolist(), "head": values.head.tolist()}
    for observed in values.singular:
        ranks, curve = values.rank(observed), values.normalised(observed)
        half = float(curve[len(curve) // 2 - 1])
        numbers = f"{ranks.mean():.1f}", f"{ranks.min()} to {ranks.max()}", f"{half:.3f}"
        rows.append([observed.value, str(len(curve)), *numbers])
        record[observed.name.lower()] = {"rank": ranks.tolist(), "normalised": curve.round(6).tolist()}
    columns = ("", "dimensions", "rank for 90 %", "of single heads", "middle value / first")
    return MeasuredMap(values, record, columns, rows)


def _share(text: Reading, places: list[Place]) -> MeasuredMap:
    heads = measure.share(text)
    groups = {str(layer): heads.share[heads.layer == layer] for layer in dict.fromkeys(heads.layer.tolist())}
    rows = [
        [name, *map(_percent, (shares.mean(), shares.min(), shares.max()))]
        for name, shares in (groups | {"all": heads.share}).items()
    ]
    columns = ("layer", "important keys", "lowest head", "highest head")
    return MeasuredMap(heads, _record(heads, {"share": heads.share}), columns, rows)


def _record(heads: Heads, numbers: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the numbers of each head, and their means, for JSON."""
    columns = {"layer": heads.layer.tolist(), "head": heads.head.tolist()}
    columns |= {name: column.round(6).tolist() for name, column in numbers.items()}
    return columns | {"mean": {name: float(column.mean()) for name, column in numbers.items()}}


def _rows(heads: Heads, places: list[Place], numbers: dict[str, np.ndarray]) -> list[list[str]]:
    """Return a row for each head of the picture, and a row for the mean over all heads."""
    rows = []
    for layer, head in places:
        at = (heads.layer == layer) & (heads.head == head)
        rows.append([str(layer), str(head), *(_number(name, column[at]) for name, column in numbers.items())])
    means = (_number(name, column) for name, column in numbers.items())
    return [*rows, ["all", f"{len(heads.layer):,} heads", *means]]


def _number(name: str, column: np.ndarray) -> str:
    return f"{column.mean():.3f}" if name == "cosine" else _percent(column.mean())


def _percent(share: float) -> str:
    return f"{share:.1%}"


MAPS = {"attention": _attention, "queries": _queries, "values": _values, "share": _share}

if __name__ == "__main__":
    main()
