"""`kvtool models`: list, download and inspect models."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli import completion
from kvtool.cli.console import plain_console
from kvtool.cli.progress import bytes_progress
from kvtool.cli.utf8 import json_text
from kvtool.units import format_bytes, parse_bytes

app = typer.Typer(
    help="List, download and inspect models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the models that kvtool knows by name. The first is the default."""
    from kvtool.models.catalogue import registry

    known = list(registry().values())
    if as_json:
        _print_json(
            [
                {
                    "name": entry.name,
                    "default": entry is known[0],
                    "source": entry.source,
                    "file": entry.file,
                    "sha256": entry.sha256,
                    "size": entry.size,
                    "licence": entry.licence,
                    "note": entry.note,
                    "path": str(entry.path) if entry.here else None,
                }
                for entry in known
            ]
        )
        return
    rows = []
    for entry in known:
        size = entry.path.stat().st_size if entry.here else entry.size
        rows.append(
            [
                entry.name + (" (default)" if entry is known[0] else ""),
                format_bytes(size) if size else "-",
                "yes" if entry.here else "no",
                entry.licence,
                entry.note,
            ]
        )
    _print_table(["name", "size", "downloaded", "licence", "note"], rows)


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="A name from `kvtool models list`.", autocompletion=completion.models)
    ],
    as_json: Json = False,
) -> None:
    """Download a model unless it is there, and print its path."""
    from kvtool.models.catalogue import find
    from kvtool.models.download import pull, sha256

    entry = find(name)
    with bytes_progress(f"downloading {name}") as progress:
        path = pull(entry, progress)
    if as_json:
        _print_json({"name": name, "path": str(path), "sha256": sha256(path), "size": path.stat().st_size})
    else:
        typer.echo(path)


@app.command()
def show(
    name_or_path: Annotated[
        str | None,
        typer.Argument(
            help="A name (kvtool models list) or a GGUF file.",
            show_default="{model}",
            autocompletion=completion.models,
        ),
    ] = None,
    fit: Annotated[
        str, typer.Option(metavar="BYTES", help="Show how many tokens fit into this much cache.")
    ] = "64MiB",
    type_k: Annotated[
        str,
        typer.Option("-ctk", "--cache-type-k", "--type-k", metavar="TYPE", help="Type of the cached keys."),
    ] = "f16",
    type_v: Annotated[
        str,
        typer.Option("-ctv", "--cache-type-v", "--type-v", metavar="TYPE", help="Type of the cached values."),
    ] = "f16",
    as_json: Json = False,
) -> None:
    """Show a model's header, and how many of its tokens fit into memory."""
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
    swa_bytes = info.swa_bytes(N_BATCH, type_k, type_v)
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
                "swa": info.n_swa,
                "swa_layers": info.n_swa_layer,
                "tokenizer": info.tokenizer,
                "chat_template": info.chat_template,
                "unsupported": reason,
                "type_k": type_k,
                "type_v": type_v,
                "cell_bytes": cell_bytes,
                "swa_bytes": swa_bytes,
                "fit_bytes": n_bytes,
                "fit_cells": cells,
            }
        )
        return
    head_sizes = (info.head_size_k, info.head_size_v)
    kinds = f"K {type_k}, V {type_v}"
    swa = [
        ["sliding-window (SWA) layers", f"{info.n_swa_layer}; each sees the newest {info.n_swa} tokens"],
        ["SWA cache", f"{format_bytes(swa_bytes)}, whatever the budget ({kinds}, batches of {N_BATCH})"],
    ]
    which = f"the other {info.n_layer - info.n_swa_layer} layers" if info.n_swa else "all layers"
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
            *(swa if info.n_swa else []),
            ["one token", f"{format_bytes(cell_bytes)} of cache ({kinds}, {which})"],
            [f"{format_bytes(n_bytes)} of cache", f"{cells} tokens"],
            ["supported", reason or "yes"],
        ],
    )


def _per_layer(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return f"{' '.join(map(str, numbers))} (one per layer)"


def _print_json(value: object) -> None:
    typer.echo(json_text(value, indent=2))


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(columns), pad_edge=False)
    for column in columns or ["what", "value"]:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: a path may contain what rich takes for markup
        table.add_row(*(Text(cell) for cell in row))
    console = plain_console()
    if not console.is_terminal:
        # no wrapping in a pipe: a sha256 stays in one piece
        console.width = 10_000
    console.print(table)
