"""kvtool compare: policies, budgets and cache types side by side on one text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import flags as opt
from kvtool.cli import output
from kvtool.cli.opening import check_flash, check_patch, n_ctx_of, resolved, runnable, workers_of
from kvtool.cli.perplexity import read_text
from kvtool.cli.progress import bytes_progress
from kvtool.errors import InputError, KvtoolError, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import TaskID

    from kvtool.measure.grid import Cell, Common, Event, Results
    from kvtool.models.header import ModelInfo


_N_BATCH = 64


class _Stopped(KvtoolError):
    exit_code = interrupt.EXIT_CODE


def compare(
    file: Annotated[str, typer.Argument(help="A text file, or - for stdin.")],
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            help="Names with commas; parameters after colons: full,h2o:decay=0.999:window=64.",
            show_default="all",
        ),
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Budgets with commas: cells, shares or bytes.")
    ] = "128,256,512",
    types: Annotated[
        str, typer.Option("--types", help="Cache types with commas: full has each, the others the first.")
    ] = "f16,q8_0,q5_1,q4_0",
    combine: Annotated[bool, typer.Option("--combine", help="Every policy with every cache type.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Only the text's first tokens.")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Add a line a cell as they come; -: print them instead."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only the cells that FILE does not have.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Write a picture of quality against bytes."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Cells at once, a process each.")] = 1,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Every N-th cell, from the I-th on.")
    ] = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    model: opt.Model = None,
    n_ctx: opt.Context = None,
    n_batch: opt.Batch = _N_BATCH,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    rpc: opt.Rpc = None,
    flash: opt.Flash = "auto",
    verbose: opt.Verbose = False,
) -> None:
    """Stream a text under each policy and budget, and say how they differ."""
    path = output.records_path(json_file, resume)
    output.check_picture("--plot", plot)
    text = read_text(file)
    check_flash(flash)
    if positions not in ("original", "in-cache", "auto"):
        raise UsageError(f"positions must be original, in-cache or auto, got {positions!r}")
    workers = workers_of(rpc, gpu_layers)
    if workers and jobs > 1:
        raise UsageError("a worker serves one cell at a time; leave out --jobs or --rpc")
    names, budget_texts, type_texts = (_list(option) for option in (policies or "", budgets, types))

    from kvtool.models.download import sha256
    from kvtool.models.header import CACHE_TYPES

    for kind in type_texts:
        if kind not in CACHE_TYPES:
            raise UsageError(f"--types takes some of {', '.join(CACHE_TYPES)}, got {kind!r}")
    if not type_texts:
        raise UsageError("--types names no cache type")
    model_path, info = resolved(model)

    from kvtool.llama.devices import default_threads
    from kvtool.llama.log import guard, set_verbose
    from kvtool.measure import grid, records

    set_verbose(verbose)
    guard()
    tokens, text_sha256, n_vocab = _tokens(info, file, text, max_tokens)
    with bytes_progress(f"hashing {model_path.name}", piped=False) as progress:
        model_sha256 = sha256(model_path, progress)
    common = grid.Common(
        what={
            "model": model_path.name,
            "model_sha256": model_sha256,
            "text": "stdin" if file == "-" else Path(file).name,
            "text_sha256": text_sha256,
            **records.versions(),
        },
        model=model_path,
        n_tokens=len(tokens),
        n_ctx=n_ctx_of(n_ctx, info),
        n_batch=n_batch or _N_BATCH,
        positions=positions,
        flash=flash,
        threads=threads or max(1, default_threads() // jobs),
        gpu_layers=gpu_layers,
        rpc=workers,
        verbose=verbose,
    )
    if not names:
        names = ["full", *(name for name in runnable() if name != "full")]
    check_patch([grid.split_policy(name)[0] for name in names])
    names, missing = _against_full(common, n_vocab, names)
    cells = grid.cells(
        common, info, names, budget_texts, type_texts, evict_every=evict_every, combine=combine
    )
    if shard:
        cells = grid.shard(cells, shard)
    if not cells:
        # full may have been all that was asked for
        raise UsageError(missing or "there is nothing to compare; name policies, and budgets for them")
    results = grid.Results(common, cells)
    if path:
        results.take(records.read(path))
    if missing:
        _say(missing)
    _run(results, tokens, not missing, jobs, path)
    _finish(results, info, json_file, path, plot)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _tokens(info: ModelInfo, file: str, text: str, max_tokens: int | None) -> tuple[np.ndarray, str, int]:
    """The tokens i32[n] as kvtool perplexity reads them, their text's sha256, and the vocabulary's size."""
    import hashlib

    from kvtool.llama.model import Model

    model = Model(info.path, vocab_only=True)
    try:
        tokens = model.tokenize(text, start=True)[:max_tokens]
        digest = hashlib.sha256()
        for token in tokens.tolist():
            digest.update(model.piece(token, special=True))
    finally:
        model.close()
    if len(tokens) < 2:
        raise InputError(f"{file} has {len(tokens)} tokens, 2 are needed")
    return tokens, digest.hexdigest(), model.n_vocab


def _against_full(common: Common, n_vocab: int, names: list[str]) -> tuple[list[str], str]:
    """The policies that can run, and why there is no full cache to compare with; empty where there is one."""
    from kvtool.measure.divergence import fits

    n = common.n_tokens
    if common.positions == "original" and n > common.n_ctx:
        raise InputError(
            f"the text has {n} tokens, original positions end at {common.n_ctx}; "
            "choose --positions auto or in-cache, or --max-tokens"
        )
    if n > common.n_ctx:
        why = (
            f"the text has {n} tokens and the full cache {common.n_ctx} cells: there is no full, "
            "and so no KL, top-1 or difference to it (--max-tokens makes the text shorter)"
        )
        return [name for name in names if name != "full"], why
    if not fits(n, n_vocab):
        return (
            names,
            f"{n} tokens are too many to keep the full cache's predictions: no KL, top-1 or difference",
        )
    return names, ""


def _run(results: Results, tokens: np.ndarray, against: bool, jobs: int, path: Path | None) -> None:
    """Measures what is missing; results and the file have it as it comes. Raises _Stopped after Ctrl-C."""
    from kvtool.measure import grid, records

    missing = results.missing(kl=against)
    if not missing:
        return
    common = results.common
    if len(missing) < len(results.grid):
        _say(f"{len(results.grid) - len(missing)} of {len(results.grid)} cells are there")
    reference = grid.reference(common) if against else None
    first = _first(common, missing) if reference and not reference.exists() else None

    def keep(cell: Cell, record: dict[str, Any]) -> None:
        results.of_cell[cell] = record
        if path:
            records.append(path, record)

    try:
        with interrupt.raising(), grid.Runner(common, tokens) as runner:
            n_cell = len(missing) + (first is not None and first not in missing)
            with _progress(n_cell, common.n_tokens - 1) as show:
                if first:
                    for event in runner.run([first], against=reference, writes=True):
                        show(event)
                        if event.record and first in missing:
                            keep(first, event.record)
                    if event.record and "error" in event.record:
                        _say("without the full cache there is no KL, top-1 or difference to it")
                        reference, missing = None, results.missing()
                    missing = [cell for cell in missing if cell is not first]
                for event in runner.run(missing, jobs=jobs, against=reference):
                    show(event)
                    if event.record:
                        keep(event.cell, event.record)
    except KeyboardInterrupt:
        n_kept = len(results.grid) - len(results.missing())
        raise _Stopped(output.stopped(path, n_kept, len(results.grid), "cells")) from None


def _first(common: Common, missing: list[Cell]) -> Cell:
    """The cell that makes the reference: one of the grid if there is one."""
    from kvtool.measure.grid import full_cell

    for cell in missing:
        if (cell.policy, cell.type_k, cell.type_v) == ("full", "f16", "f16"):
            return cell
    return full_cell(common)


def _finish(
    results: Results, info: ModelInfo, json_file: str | None, path: Path | None, plot: Path | None
) -> None:
    import json

    if path:
        from kvtool.measure import records

        def order(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
            # another process may have added records meanwhile
            results.take(there)
            return results.finished()

        records.rewrite(path, order)
    done = (cell for cell in results.grid if cell in results.of_cell)
    rows = list(zip(done, results.finished(), strict=False))
    if json_file == "-":
        for _, record in rows:
            typer.echo(json.dumps(record))
    else:
        from rich.console import Console

        from kvtool.cli.compare_table import show

        show(Console(highlight=False), rows, results.common.what["text"], info.path.stem)
    if plot:
        from kvtool.cli.compare_plot import picture

        output.write(plot, output.png(picture(rows, results.common.what["text"], info.path.stem)))
    if failed := results.failed():
        again = "--resume tries them again" if path else "see above"
        raise KvtoolError(f"{len(failed)} of {len(results.grid)} cells failed; {again}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def name(cell: Cell) -> str:
    """How a cell is called on the screen."""
    return f"{cell.row} {cell.asked}" if cell.asked else cell.row


@contextmanager
def _progress(n_cell: int, n_token: int) -> Iterator[Callable[[Event], None]]:
    """A callback for events: bars of what runs and of the whole grid on a terminal, and a line a cell."""
    from math import exp

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        TimeRemainingColumn(),
    )
    start, n_done = time.monotonic(), 0
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=600,
    ) as bars:
        whole = bars.add_task("all", total=n_cell * n_token, words=f"0 of {n_cell} cells")
        tasks: dict[Cell, TaskID] = {}
        seen: dict[Cell, int] = {}

        def show(event: Event) -> None:
            nonlocal n_done
            cell = event.cell
            if cell not in tasks:
                tasks[cell] = bars.add_task(name(cell), total=n_token, words="")
            n = n_token if event.record else event.n
            bars.update(whole, advance=n - seen.get(cell, 0))
            seen[cell] = n
            if not event.record:
                words = f"{event.n:,} tokens, perplexity {exp(event.nll):.3f}" if event.n else ""
                bars.update(tasks[cell], completed=n, words=words)
                return
            n_done += 1
            bars.remove_task(tasks[cell])
            bars.update(whole, words=f"{n_done} of {n_cell} cells")
            left = (time.monotonic() - start) / n_done * (n_cell - n_done)
            ends = f"{n_done}/{n_cell}, {left / 60:.0f} min left" if not console.is_terminal else ""
            console.print(_line(name(cell), event.record, ends), markup=False, soft_wrap=True)

        yield show


def _line(label: str, record: dict[str, Any], end: str) -> str:
    if "error" in record:
        said = f"failed: {' '.join(record['error'].split())}"
    else:
        said = f"perplexity {record['perplexity']:.3f}, {record['tokens_per_s']:.0f} tokens/s"
    return f"{label}: {said}" + (f" ({end})" if end else "")
