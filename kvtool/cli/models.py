"""kvtool models: what there is, download it, look into it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtool.cli.progress import bytes_progress
from kvtool.units import format_bytes, parse_bytes

app = typer.Typer(help="List, download and look into models.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """The models that kvtool knows by name; the first is the default."""
    from kvtool.models.catalogue import registry

    known = list(registry().values())
    if as_json:
        _print_json(
            [
                {
                    "name": model.name,
                    "default": model is known[0],
                    "source": model.source,
                    "file": model.file,
                    "sha256": model.sha256,
                    "size": model.size,
                    "licence": model.licence,
                    "note": model.note,
                    "path": str(model.path) if model.here else None,
                }
                for model in known
            ]
        )
        return
    rows = []
    for model in known:
        size = model.path.stat().st_size if model.here else model.size
        rows.append(
            [
                model.name + (" (default)" if model is known[0] else ""),
                format_bytes(size) if size else "-",
                "yes" if model.here else "no",
                model.licence,
                model.note,
            ]
        )
    _print_table(["name", "size", "here", "licence", "note"], rows)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name that `kvtool models list` shows.")],
    as_json: Json = False,
) -> None:
    """Download a model, unless it is here, and print its path."""
    from kvtool.models.catalogue import find
    from kvtool.models.download import pull, sha256

    model = find(name)
    with bytes_progress(f"downloading {name}") as progress:
        path = pull(model, progress)
    if as_json:
        _print_json({"name": name, "path": str(path), "sha256": sha256(path), "size": path.stat().st_size})
    else:
        typer.echo(path)


@app.command()
def show(
    name_or_path: Annotated[
        str | None, typer.Argument(help="A name or a GGUF file; without it $KVTOOL_MODEL or the default.")
    ] = None,
    fit: Annotated[str, typer.Option(help="How many cells fit into this many bytes.")] = "64MiB",
    type_k: Annotated[str, typer.Option(help="Type of the cached keys.")] = "f16",
    type_v: Annotated[str, typer.Option(help="Type of the cached values.")] = "f16",
    as_json: Json = False,
) -> None:
    """What a model's header says, and how many tokens of it fit into memory."""
    from kvtool.cli.flags import N_BATCH
    from kvtool.models.download import sha256
    from kvtool.models.header import read
    from kvtool.models.resolve import resolve
    from kvtool.models.supported import unsupported

    n_bytes = parse_bytes(fit)
    with bytes_progress(f"downloading {name_or_path or 'the model'}") as progress:
        path = resolve(name_or_path, progress)
    info = read(path)
    cell_bytes = info.cell_bytes(type_k, type_v)
    window_bytes = info.window_bytes(N_BATCH, type_k, type_v)
    cells = info.cells_that_fit(n_bytes, N_BATCH, type_k, type_v)
    digest = sha256(path)
    reason = unsupported(info)
    if as_json:
        _print_json(
            {
                "path": str(path.absolute()),
                "sha256": digest,
                "size": info.size,
                "architecture": info.architecture,
                "name": info.name,
                "quantization": info.quantization,
                "layers": info.n_layer,
                "heads": info.n_head,
                "kv_heads": info.n_head_kv,
                "head_size_k": info.head_size_k,
                "head_size_v": info.head_size_v,
                "trained_context": info.n_ctx_train,
                "window": info.window,
                "sliding_layers": info.n_sliding,
                "tokenizer": info.tokenizer,
                "chat_template": info.chat_template,
                "unsupported": reason,
                "type_k": type_k,
                "type_v": type_v,
                "cell_bytes": cell_bytes,
                "window_bytes": window_bytes,
                "fit_bytes": n_bytes,
                "fit_cells": cells,
            }
        )
        return
    head_sizes = (info.head_size_k, info.head_size_v)
    kinds = f"K {type_k}, V {type_v}"
    sliding = [
        ["sliding layers", f"{info.n_sliding}, of {info.window} tokens each"],
        [
            "their window",
            f"{format_bytes(window_bytes)} beside the cells ({kinds}, steps of up to {N_BATCH})",
        ],
    ]
    which = f"the {info.n_layer - info.n_sliding} other layers" if info.window else "all layers"
    _print_table(
        [],
        [
            ["path", str(path)],
            ["sha256", digest],
            ["size", format_bytes(info.size)],
            ["architecture", info.architecture],
            ["name", info.name],
            ["quantization", info.quantization],
            ["layers", str(info.n_layer)],
            ["heads", _per_layer(info.n_head)],
            ["KV heads", _per_layer(info.n_head_kv)],
            ["head size", "K {}, V {}".format(*head_sizes)],
            ["trained context", f"{info.n_ctx_train} tokens"],
            ["tokenizer", "yes" if info.tokenizer else "no"],
            ["chat template", "yes" if info.chat_template else "no"],
            *(sliding if info.window else []),
            ["a cell", f"{format_bytes(cell_bytes)} ({kinds}, {which})"],
            [format_bytes(n_bytes), f"{cells} cells"],
            ["runs under kvtool", reason or "yes"],
        ],
    )


def _per_layer(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return f"{' '.join(map(str, numbers))} (layer by layer)"


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(columns), pad_edge=False)
    for column in columns or ["what", "value"]:
        table.add_column(column, overflow="fold")
    for row in rows:
        # a name or a path may hold what rich takes for markup
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        # nothing in a pipe wraps lines, so a sha256 stays in one piece
        console.width = 10_000
    console.print(table)
