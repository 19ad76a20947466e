"""`kvtool models`: list, download, inspect and delete models."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import completion
from kvtool.cli.console import print_table, table_console
from kvtool.cli.declared import Json, options
from kvtool.cli.listed import COMMANDS
from kvtool.cli.locate import locate
from kvtool.cli.settings import default_model
from kvtool.config.model import fitted_weights, in_words
from kvtool.config.run import RunOptions
from kvtool.errors import KvtoolError, UsageError
from kvtool.options import Options, declared, option, redeclared, tested
from kvtool.system.texts import json_text, shown
from kvtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvtool.models.catalogue import Entry
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers
    from kvtool.models.stored import Stored

app = typer.Typer(help=COMMANDS["models"], no_args_is_help=True, rich_markup_mode=None, add_completion=False)

Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `kvtool models list`, a URL of a GGUF file, or hf:OWNER/REPO[:QUANT].",
        autocompletion=completion.models,
    ),
]

_OF_ENTRY = ("sha256", "size", "licence", "note")
"""Fields that only models in models.txt have."""

_WIDE = 140
"""In terminals at least this wide, the list also shows the sources of models."""

_MIN_DEVICE = 2**20
"""Smallest memory of a GPU that --device accepts, in bytes.

If a user types a smaller number, the unit was probably forgotten.
"""


@app.command("list")
def list_(
    every: Annotated[bool, typer.Option("--all", help="List all models that kvtool knows by name.")] = False,
    as_json: Json = False,
) -> None:
    """List the default model, the downloaded models, and recommended models that fit this machine.

    --json lists all.
    """
    from kvtool.cli import fits
    from kvtool.models import stored
    from kvtool.models.catalogue import models_dir, registry
    from kvtool.models.hub import cache_folder

    entries = registry()
    known = [(entry, stored.of_entry(entry)) for entry in entries.values()]
    others, default = stored.downloads(), entries.get(default_model() or next(iter(entries)))
    room = fits.room()
    best = fits.best((entry for entry, _ in known), room)
    if as_json:
        records = [
            {"name": entry.name, "default": entry is default}
            | {"fits": fits.fits(entry, room), "best": entry is best}
            | _json_entry(entry, copy)
            for entry, copy in known
        ]
        typer.echo(json_text([*records, *map(_json_other, others)], indent=2))
        return
    table = []
    n_more = n_fit = 0
    sources = not (console := table_console()).is_terminal or console.width >= _WIDE
    listed = []
    for entry, copy in known:
        does_fit = fits.fits(entry, room)
        if not (every or entry is default or copy or (entry.is_recommended and does_fit)):
            n_more, n_fit = n_more + 1, n_fit + bool(does_fit)
            continue
        listed.append(entry)
        size = copy.size if copy and copy.is_whole else entry.about_bytes
        name = entry.name + (" (default)" if entry is default else "")
        fit = "best" if entry is best else {True: "yes", False: "no", None: "-"}[does_fit]
        row = [name, format_bytes(size) if size else "-", fit, _state(copy), entry.licence]
        table.append([*row, entry.source] if sources else row)
    print_table(["name", "size", "fits", "downloaded", "licence", *["source"] * sources], table)
    typer.echo()
    for entry in listed:
        # print remarks below the table, because a column of remarks would make the table too wide
        if entry.remark and not entry.is_recommended:
            typer.echo(f"{entry.name}: {entry.remark}")
    if n_more:
        typer.echo(f"{n_more} more, of which {n_fit} fit: kvtool models list --all")
    if best:
        typer.echo(f"the best for this machine: kvtool chat -m {best.name}")
    if others:
        typer.echo()
        table = [[shown(other.name), format_bytes(other.size), _state(other)] for other in others]
        print_table(["repository or URL", "size", "downloaded"], table)
    downloaded = [copy for _, copy in known if copy]
    typer.echo()
    for folder in (models_dir(), cache_folder()):
        n_bytes = stored.total(copy for copy in downloaded + others if folder in copy.files[0].parents)
        typer.echo(f"{format_bytes(n_bytes)} in {shown(folder)}")


@app.command()
def pull(name: Name, as_json: Json = False) -> None:
    """Download a model unless it is there, and print its path."""
    from kvtool.models.download import sha256
    from kvtool.models.split import part_paths

    path = locate(name)
    if as_json:
        size = sum(part.stat().st_size for part in part_paths(path))
        typer.echo(
            json_text({"name": name, "path": str(path), "sha256": sha256(path), "size": size}, indent=2)
        )
    else:
        typer.echo(path)


@app.command()
def rm(name: Name, as_json: Json = False) -> None:
    """Delete a downloaded model, and print how much space that frees."""
    from kvtool.models.stored import remove

    removed, n_bytes = remove(name)
    if as_json:
        files = [str(path) for path in removed.files]
        typer.echo(json_text({"name": removed.name, "files": files, "freed_bytes": n_bytes}, indent=2))
    else:
        typer.echo(f"deleted {shown(removed.name)}: {format_bytes(n_bytes)}")


def _type(part: str, letter: str) -> Any:
    return redeclared(RunOptions, f"type_{letter}", help=f"Type of the cached {part}.", group=None)


@dataclass(frozen=True)
class _CacheTypes(Options):
    type_k: str = _type("keys", "k")
    type_v: str = _type("values", "v")


def _device_bytes(text: str) -> int:
    """Parse the memory of a GPU. Raises UsageError if the text is not a size of at least one MiB."""
    n_bytes = 0
    with suppress(UsageError):
        n_bytes = parse_bytes(text)
    if n_bytes < _MIN_DEVICE:
        raise UsageError(f"--device is the memory of a GPU, like 8GiB; got {text!r}")
    return n_bytes


@dataclass(frozen=True)
class _Memory(Options):
    fit: str = option(
        "--fit BYTES",
        "64MiB",
        "Show how many tokens fit into a cache of this size.",
        read=tested(parse_bytes),
    )
    device: str | None = option(
        "--device BYTES",
        None,
        "Show which weights fit on a GPU with this much free memory.",
        default_text=False,
        read=tested(_device_bytes),
    )


@app.command()
@options
def show(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help=declared(RunOptions)["model"].help,
            show_default="{model}",
            autocompletion=completion.models,
        ),
    ] = None,
    memory: _Memory,
    types: _CacheTypes,
    as_json: Json = False,
) -> None:
    """Show a model's header, and how many of its tokens fit into memory.

    This downloads the model if necessary. `kvtool models list --all` shows without a download which models
    fit.
    """
    from kvtool.models.download import sha256
    from kvtool.models.header import read

    n_bytes = parse_bytes(memory.fit)
    n_device = None if memory.device is None else _device_bytes(memory.device)
    path = locate(model)
    info = read(path)
    digest = sha256(path)
    layers, reason = _layers(info)
    sizes = _sizes(layers, types.values(), info.n_ctx_train, n_bytes) if layers else {}
    placed = None
    if n_device is not None:
        # assume a cache of the default size
        n_cell = RunOptions.default_recall + RunOptions.default_n_batch
        placed = fitted_weights(info, n_cell, n_device, 1, types.type_k, types.type_v)
    if as_json:
        record = {
            "path": str(path.absolute()),
            "sha256": digest,
            **_json_header(info),
            "unsupported": reason,
            **sizes,
            "device": placed._asdict() if placed else None,
        }
        typer.echo(json_text(record, indent=2))
        return
    rows = [["path", str(path)], ["sha256", digest], *_header_lines(info)]
    if sizes:
        rows += _lines(sizes)
    if placed and n_device:
        rows.append([f"a GPU of {format_bytes(n_device)}", in_words(placed, info)])
    print_table([], [*rows, ["supported", reason or "yes"]])


def _json_header(info: ModelInfo) -> dict[str, Any]:
    return {
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
    }


def _header_lines(info: ModelInfo) -> list[list[str]]:
    return [
        ["size", format_bytes(info.size) + (f" in {info.n_part} files" if info.n_part > 1 else "")],
        ["architecture", info.architecture],
        ["name", info.name],
        ["quantization", info.quantization],
        ["layers", str(info.n_layer)],
        ["heads", _per_layer(info.n_head)],
        ["KV heads", _per_layer(info.n_head_kv)],
        ["head size", f"K {info.head_size_k}, V {info.head_size_v}"],
        ["trained context", f"{info.n_ctx_train:,} tokens"],
        ["tokenizer", "yes" if info.tokenizer else "no"],
        ["chat template", "yes" if info.chat_template else "no"],
    ]


def _layers(info: ModelInfo) -> tuple[Layers | None, str | None]:
    """Return the layers of a model, or None and the reason why kvtool cannot run it."""
    from kvtool.models.supported import unsupported

    if reason := unsupported(info):
        return None, reason
    try:
        # these imports fail if llama.cpp is not installed
        from kvtool.llama.libllama.crash import guard
        from kvtool.llama.loaded.model import Model

        guard()
        with closing(Model(info.path, no_weights=True)) as model:
            return model.layers, None
    except KvtoolError as error:
        return None, str(error)


def _sizes(layers: Layers, types: dict[str, Any], n_ctx_train: int, n_bytes: int) -> dict[str, Any]:
    """Return the sizes of the model's cache, and the number of tokens that fit into n_bytes."""
    from kvtool.models.layers import Kind

    fit_cells, fit_batch = layers.cache_that_fits(n_bytes, n_ctx_train, RunOptions.default_n_batch, **types)
    return {
        "kinds": layers.kinds,
        "rows": layers.n_row,
        "row_layers": sum(layer.is_owner for layer in layers.of(Kind.ROWS)),
        "swa": layers.n_swa,
        "swa_layers": len(layers.of(Kind.SLIDING)),
        "shared_layers": layers.n_shared,
        "index_cells": layers.max_cells if layers.has_index else None,
        "recurrent_layers": len(layers.of(Kind.RECURRENT)),
        **types,
        "cell_bytes": layers.cell_bytes(**types),
        "swa_bytes": layers.swa_bytes(RunOptions.default_n_batch, **types),
        "recurrent_bytes": layers.recurrent_bytes,
        "fit_bytes": n_bytes,
        "fit_cells": fit_cells,
        "fit_batch": fit_batch,
        "smallest_bytes": layers.smallest_bytes(**types),
    }


def _lines(sizes: dict[str, Any]) -> list[list[str]]:
    texts = {
        name: format_bytes(size, round_up=name == "smallest_bytes")
        for name, size in sizes.items()
        if name.endswith("_bytes")
    }
    types, n_batch = f"K {sizes['type_k']}, V {sizes['type_v']}", RunOptions.default_n_batch
    lines = [
        ["kind", ", ".join(sizes["kinds"]) or "plain attention"],
        ["rows", f"{sizes['rows']} in {sizes['row_layers']} layers"],
    ]
    if n := sizes["swa_layers"]:
        lines += [
            ["sliding-window (SWA) layers", f"{n}; each sees the newest {sizes['swa']:,} tokens"],
            ["SWA cache", f"{texts['swa_bytes']}, whatever the budget ({types}, batches of {n_batch})"],
        ]
    if (n := sizes["index_cells"]) is not None:
        lines.append(["index", f"chooses {n:,} cells: a budget cannot be larger"])
    if n := sizes["shared_layers"]:
        lines.append(["shared layers", f"{n}; each reads an earlier layer's cells"])
    if n := sizes["recurrent_layers"]:
        lines.append(["recurrent layers", f"{n}; states of {texts['recurrent_bytes']}, whatever the budget"])
    fit = f"{sizes['fit_cells']:,} tokens"
    if not sizes["fit_cells"]:
        fit = f"too small; the smallest cache takes {texts['smallest_bytes']}"
    elif sizes["swa_layers"] and sizes["fit_batch"] < n_batch:
        fit += f", in batches of {sizes['fit_batch']}"
    return [
        *lines,
        ["one token", f"{texts['cell_bytes']} of cache ({types}, all rows)"],
        [f"{texts['fit_bytes']} of cache", fit],
    ]


def _state(copy: Stored | None) -> str:
    return "no" if not copy else "yes" if copy.is_whole else "in part"


def _json_stored(copy: Stored | None) -> dict[str, Any]:
    """Return the fields of --json about a download. A complete download also has its size and path."""
    whole = {"size": copy.size, "path": str(copy.files[0])} if copy and copy.is_whole else {}
    return {"path": None, "cached_bytes": copy.size if copy else 0} | whole


def _json_entry(entry: Entry, copy: Stored | None) -> dict[str, Any]:
    """Return the fields of --json about the source and the download of a model in models.txt."""
    return {name: getattr(entry, name) for name in ("source", "file", *_OF_ENTRY)} | _json_stored(copy)


def _json_other(other: Stored) -> dict[str, Any]:
    """Return the record of --json about a downloaded model that is not in models.txt."""
    named = {"name": other.name, "default": False, "source": other.name, "file": other.files[0].name}
    return named | dict.fromkeys(("fits", *_OF_ENTRY)) | {"best": False} | _json_stored(other)


def _per_layer(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return f"{' '.join(map(str, numbers))} (one per layer)"
