"""`kvtool compare`: policies, budgets and cache types side by side on one text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvtool.cli import completion, output
from kvtool.cli import flags as opt
from kvtool.cli.archive import FLAGS, archive_of, check_archive_file, check_archive_type, check_recalls
from kvtool.cli.command import KEEPS
from kvtool.cli.console import plain_console
from kvtool.cli.opening import (
    check_flash,
    check_patch,
    is_typed,
    n_ctx_of,
    resolved,
    runnable,
    say_n_ctx,
    workers_of,
)
from kvtool.cli.progress import bytes_progress
from kvtool.cli.texts import read_text, too_short
from kvtool.cli.utf8 import json_text
from kvtool.errors import InputError, KvtoolError, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    import numpy as np

    from kvtool.measure.grid import Common, Run
    from kvtool.measure.results import Results
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers


class _Stopped(KvtoolError):
    exit_code = interrupt.EXIT_CODE


def compare(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="A text file, or - for stdin.")],
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="NAMES",
            help="Policies, separated by commas. Parameters follow after colons: h2o:decay=0.999:window=64.",
            show_default="all",
            rich_help_panel=KEEPS,
            autocompletion=completion.policy_list,
        ),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets",
            metavar="BUDGETS",
            help="Budgets, separated by commas: tokens per KV head (512), shares (10%) or bytes (64MiB).",
            rich_help_panel=KEEPS,
        ),
    ] = "128,256,512",
    types: Annotated[
        str,
        typer.Option(
            "--types",
            metavar="TYPES",
            help="Cache types, separated by commas: `full` runs with each, other policies with the first.",
            rich_help_panel=KEEPS,
            autocompletion=completion.cache_type_list,
            callback=opt.lower,
        ),
    ] = "f16,q8_0,q5_1,q4_0",
    combine: Annotated[
        bool,
        typer.Option("--combine", help="Run every policy with every cache type.", rich_help_panel=KEEPS),
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=2, metavar="N", help="Read the text's first N tokens.", show_default="all"
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Append each run's record to this file, a JSON line each; - prints them and no table.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the file of --json: do only the missing runs.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Draw quality against bytes into this file."),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, metavar="N", help="Runs at the same time, each in a process.")
    ] = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Do every N-th run from the I-th on, to share work among machines."
        ),
    ] = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    model: opt.Model = None,
    n_ctx: opt.Context = None,
    n_batch: opt.TextBatch = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    rpc: opt.Rpc = None,
    archive: opt.Archive = None,
    archive_file: opt.ArchiveFile = None,
    archive_type: opt.ArchiveType = "q8_0",
    flash: opt.Flash = "auto",
    verbose: opt.Verbose = 0,
) -> None:
    """Stream a text under each policy and budget, and compare the results.

    One policy with one budget and one cache type is a run; each run scores every token after the first.
    """
    path = output.records_path(json_file, resume)
    output.check_picture("--plot", plot)
    text = read_text(file)
    check_flash(flash)
    if positions not in ("original", "in-cache", "auto"):
        raise UsageError(f"--positions must be original, in-cache or auto, got {positions!r}")
    workers = workers_of(rpc, gpu_layers)
    if workers and jobs > 1:
        raise UsageError("a worker serves one run at a time; leave out --jobs or --rpc")
    names, budget_texts, type_texts = (_list(option) for option in (policies or "", budgets, types))
    if policies is not None and not names:
        raise UsageError("--policies names no policy; leave it out for all")

    from kvtool.measure import grid
    from kvtool.models.download import sha256
    from kvtool.models.layers import CACHE_TYPES

    if not budget_texts and not (names and all(map(grid.keeps_all_it_needs, names))):
        raise UsageError("--budgets names no budget; only full and corm need none")
    for kind in type_texts:
        if kind not in CACHE_TYPES:
            raise UsageError(f"--types takes some of {', '.join(CACHE_TYPES)}, got {kind!r}")
    check_archive_type(archive_type)
    check_archive_file(archive_file)
    archived = {} if archive is None else archive_of(archive, archive_file, rpc)
    if not type_texts:
        raise UsageError("--types names no cache type")
    if names:
        typed = [name for name in FLAGS if is_typed(context, name)]
        check_recalls([grid.split_policy(name)[0] for name in names], typed)
    model_path, info = resolved(model)
    say_n_ctx(n_ctx, info)

    from kvtool.llama.crash import guard
    from kvtool.llama.devices import default_threads
    from kvtool.llama.log import set_verbose
    from kvtool.measure import records
    from kvtool.measure.results import Results
    from kvtool.policies import load as load_policy

    set_verbose(verbose > 1)
    guard()
    text_read = _read(info, file, text, max_tokens)
    with bytes_progress(f"hashing {model_path.name}", piped=False) as progress:
        model_sha256 = sha256(model_path, progress)
    common = grid.Common(
        what={
            "model": model_path.name,
            "model_sha256": model_sha256,
            "text": "stdin" if file == "-" else Path(file).name,
            "text_sha256": text_read.sha256,
            **records.versions(),
        },
        model=model_path,
        n_tokens=len(text_read.tokens),
        n_ctx=n_ctx_of(n_ctx, info),
        n_batch=n_batch or opt.N_TEXT_BATCH,
        positions=positions,
        flash=flash,
        threads=threads or (max(1, default_threads() // jobs) if jobs > 1 else None),
        gpu_layers=gpu_layers,
        rpc=workers,
        archive=archived,
        archive_file=archive_file,
        archive_type=archive_type,
        verbose=verbose > 1,
    )
    if not names:
        # a model whose values are a part of its keys has none to merge
        kinds = {name: load_policy(name) for name in runnable()}
        names = [n for n, kind in kinds.items() if text_read.layers.has_values or not kind.may_merge()]
    check_patch([grid.split_policy(name)[0] for name in names])
    names, why_not = _against_full(common, text_read.n_vocab, names)
    runs = grid.runs(
        common,
        info.n_ctx_train,
        text_read.layers,
        names,
        budget_texts,
        type_texts,
        evict_every=evict_every,
        combine=combine,
    )
    if shard:
        runs = grid.shard(runs, shard)
    if not runs:
        # if only `full` was asked for, and it does not fit
        raise UsageError(why_not or "nothing to compare; name policies, and budgets for them")
    results = Results(common, runs)
    if path:
        results.take(records.read(path))
    if why_not:
        _say(why_not)
    _run(results, text_read.tokens, not why_not, jobs, path)
    _finish(results, info, json_file, path, plot)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class _Text(NamedTuple):
    """What a model makes of a text, and says of itself.

    tokens: i32[n], as kvtool perplexity reads them. sha256: of their text. n_vocab: tokens of the vocabulary.
    layers: what the model keeps.
    """

    tokens: np.ndarray
    sha256: str
    n_vocab: int
    layers: Layers


def _read(info: ModelInfo, file: str, text: str, max_tokens: int | None) -> _Text:
    import hashlib

    from kvtool.llama.model import Model

    model = Model(info.path, no_weights=True)
    try:
        tokens = model.tokenize(text, start=True)[:max_tokens]
        digest = hashlib.sha256()
        for token in tokens.tolist():
            digest.update(model.piece(token, special=True))
        layers = model.layers
    finally:
        model.close()
    if len(tokens) < 2:
        raise too_short(file, len(tokens), 2)
    return _Text(tokens, digest.hexdigest(), model.n_vocab, layers)


def _against_full(common: Common, n_vocab: int, names: list[str]) -> tuple[list[str], str]:
    """The policies that can run, and why they cannot be compared with the full cache; "" if they can."""
    from kvtool import policies
    from kvtool.measure import grid
    from kvtool.measure.divergence import fits

    n = common.n_tokens
    if common.positions == "original" and n > common.n_ctx:
        raise InputError(
            f"the text has {n:,} tokens, and original positions end at {common.n_ctx:,}; "
            "choose --positions auto or in-cache, or --max-tokens"
        )
    without = "so KL, top-1 and differences to `full` are missing"
    if n > common.n_ctx:
        why = (
            f"the text ({n:,} tokens) does not fit in the full cache ({common.n_ctx:,}), {without}; "
            "--max-tokens makes the text shorter"
        )
        return [name for name in names if policies.load(grid.split_policy(name)[0]).evicts], why
    if not fits(n, n_vocab):
        return names, f"the full cache's predictions of {n:,} tokens take too much disk space, {without}"
    return names, ""


def _run(results: Results, tokens: np.ndarray, against: bool, jobs: int, path: Path | None) -> None:
    """Do the missing runs; results and the file get each record at once. Raises _Stopped after Ctrl-C."""
    from kvtool.cli.compare_progress import runs_progress
    from kvtool.measure import grid, records, runner

    missing = results.missing(kl=against)
    if not missing:
        return
    common = results.common
    if len(missing) < len(results.grid):
        _say(f"{len(results.grid) - len(missing)} of {len(results.grid)} runs are done already")
    reference = grid.reference(common) if against else None
    first = _first(common, missing) if reference and not reference.exists() else None

    def keep(run: Run, record: dict[str, Any]) -> None:
        results.of_run[run] = record
        if path:
            records.append(path, record)

    try:
        with interrupt.raising(), runner.Runner(common, tokens) as started:
            n_run = len(missing) + (first is not None and first not in missing)
            with runs_progress(n_run, common.n_tokens - 1) as show:
                if first:
                    for event in started.run([first], against=reference, writes=True):
                        show(event)
                        if event.record and first in missing:
                            keep(first, event.record)
                    if event.record and "error" in event.record:
                        _say("the full cache failed, so KL, top-1 and differences to it are missing")
                        reference, missing = None, results.missing()
                    missing = [run for run in missing if run is not first]
                for event in started.run(missing, jobs=jobs, against=reference):
                    show(event)
                    if event.record:
                        keep(event.run, event.record)
    except KeyboardInterrupt:
        n_kept = len(results.grid) - len(results.missing())
        raise _Stopped(output.stopped(path, n_kept, len(results.grid), "runs")) from None


def _first(common: Common, missing: list[Run]) -> Run:
    """The run that writes the reference: one of the grid if there is one."""
    from kvtool.measure.grid import full_run

    full = full_run(common)
    kind = full.policy, full.type_k, full.type_v
    return next((run for run in missing if (run.policy, run.type_k, run.type_v) == kind), full)


def _finish(
    results: Results, info: ModelInfo, json_file: str | None, path: Path | None, plot: Path | None
) -> None:
    if path:
        from kvtool.measure import records

        def order(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
            # another process may have added records meanwhile
            results.take(there)
            return results.finished()

        records.rewrite(path, order)
    done = (run for run in results.grid if run in results.of_run)
    rows = list(zip(done, results.finished(), strict=False))
    text = results.common.what["text"]
    if json_file == "-":
        for _, record in rows:
            typer.echo(json_text(record))
    else:
        from kvtool.cli.compare_table import show

        show(plain_console(), rows, text, info.path.stem)
    if plot:
        from kvtool.cli.compare_plot import picture

        output.write(plot, output.png(picture(rows, text, info.path.stem)))
    if failed := results.failed():
        again = "--resume tries them again" if path else "see above"
        raise KvtoolError(f"{len(failed)} of {len(results.grid)} runs failed; {again}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
