"""`kvtool compare`: stream a text under several policies, budgets and cache types."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import typer

from kvtool import policies
from kvtool.cli import output
from kvtool.cli.console import say, table_console
from kvtool.cli.declared import JsonLines, options
from kvtool.cli.locate import locate_model
from kvtool.cli.progress import hashing_progress, runs_progress, stopping
from kvtool.cli.texts import File, check_positions, first_tokens, source
from kvtool.config.run import ScoreOptions
from kvtool.errors import KvtoolError, UsageError
from kvtool.options import CACHE, Options, Range, option, parts, tested
from kvtool.system.texts import TextSource, json_text
from kvtool.units import CACHE_TYPES

if TYPE_CHECKING:
    import numpy as np

    from kvtool.measure.grid import Common, Run
    from kvtool.measure.results import ComparisonResults
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers
    from kvtool.policy import Policy


_listed = partial(option, group=CACHE)


def _check_policies(text: str) -> None:
    from kvtool.measure.grid import split_policy

    for part in parts(text):
        policies.check_name(split_policy(part)[0])


def _check_budgets(text: str) -> None:
    from kvtool.config.sizes import parse

    for part in parts(text):
        parse(part, sys.maxsize)


@dataclass(frozen=True)
class _Grid(Options):
    policies: str | None = _listed(
        "--policies NAMES",
        None,
        "Policies, separated by commas. Parameters follow colons: h2o:decay=0.999:window=64.",
        default_text="every policy",
        completes="policies",
        read=tested(_check_policies),
    )
    budgets: str = _listed(
        "--budgets, --budget BUDGETS",
        "128,256,512",
        "Budgets, separated by commas: tokens per KV head (512), shares of the trained context (10%) or "
        "bytes (64MiB).",
        read=tested(_check_budgets),
    )
    types: str = _listed(
        "--types TYPES",
        "f16",
        "Cache types, separated by commas: `full` runs with each, other policies with the first.",
        read=lambda raw, flag: raw.lower(),
    )
    combine: bool = option("--combine", False, "Run every policy with every cache type.", group=CACHE)
    max_tokens: int | None = option(
        "--max-tokens N", None, "Use only the first N tokens of the text.", default_text="all", valid=Range(2)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.listed("types"):
            if kind not in CACHE_TYPES:
                raise UsageError(f"--types must name some of {', '.join(CACHE_TYPES)}, got {kind!r}")
        if not self.listed("types"):
            raise UsageError("--types names no cache type")
        if self.policies is not None and not self.listed("policies"):
            raise UsageError("--policies names no policy; leave it out for all")

    def listed(self, name: str) -> list[str]:
        """Return the values of a comma-separated field."""
        return parts(getattr(self, name) or "")


@dataclass(frozen=True)
class _CompareRun(ScoreOptions):
    hidden: ClassVar = (
        *("policy", "budget", "options", "prefill", "type_k", "type_v"),
        *("explain", "chat_template"),
    )


@dataclass(frozen=True)
class _CompareOptions(Options):
    records: Path | None = option(
        "--records FILE", None, "Append the record of each finished run to this file, one JSON line each."
    )
    resume: bool = option("--resume", False, "Continue the file of --records: do only the missing runs.")
    plot: Path | None = option("--plot PNG", None, "Draw quality against bytes into this picture.")


@options
def compare(
    *, file: File = None, grid: _Grid, args: _CompareOptions, run: _CompareRun, as_json: JsonLines = False
) -> None:
    """Stream a text under each policy and budget, and compare the results.

    One policy with one budget and one cache type is a run; each run scores every token after the first.
    """
    path = output.records_path(args.records, args.resume)
    read = [("FILE", file), *output.files_read(run)]
    output.check_apart(("--records", path), ("--plot", args.plot), read=read)
    output.check_picture(args.plot)

    from kvtool.config import archive
    from kvtool.config.notes import gpu_note
    from kvtool.measure import grid as of_runs

    names, budgets = grid.listed("policies"), grid.listed("budgets")
    if not budgets and not (names and all(map(of_runs.keeps_all_it_needs, names))):
        raise UsageError("--budgets names no budget; only full and corm need none")
    kinds = {name: policies.load(name) for name, _ in map(of_runs.split_policy, names or ["recall"])}
    archive.check(run, kinds, "--policies")
    with closing(source(file)) as text:
        run, info, n_ctx = locate_model(run)
        if not run.workers:
            run.placement.check()
        for adapter in run.adapters:
            adapter.check(info.path.name, info.architecture)

        from kvtool.llama.libllama.crash import guard
        from kvtool.llama.libllama.log import set_verbose
        from kvtool.measure import records
        from kvtool.measure.results import ComparisonResults

        set_verbose(run.verbose > 1)
        guard()
        tokens, text_sha256, n_vocab, layers = _read(info, text, grid.max_tokens)
    name = Path(text.name).name
    with hashing_progress(info.path.name) as progress:
        identity = records.identity(run, info.path, progress) | {"text": name, "text_sha256": text_sha256}
    shared = archive.with_type(run, info).changed(
        model=str(info.path),
        n_ctx=n_ctx,
        n_batch=run.n_batch or run.default_n_batch,
    )
    common = of_runs.Common(identity, shared, len(tokens))
    if not names:
        kinds = _all_kinds(layers)
        names = list(kinds)
    say(None if run.rpc else gpu_note(run))
    names, why_not = _against_full(common, n_vocab, names)
    types = grid.listed("types")
    runs = of_runs.runs(
        common, info.n_ctx_train, layers, names, budgets, types, combine=grid.combine, say=say
    )
    if not runs:
        # `why_not` is set if `full` was the only policy and the text does not fit in its cache
        raise UsageError(why_not or "nothing to compare; name policies, and budgets for them")
    results = ComparisonResults(common, runs)
    if path:
        results.add(records.read(path))
    say(why_not)
    full = None if why_not else of_runs.full_run(common, info.n_ctx_train, layers)
    try:
        with output.stopped_by_signals():
            has_full = _run(results, full, info, tokens, path)
    except records.NotStored:
        # a full disk does not lose the finished results
        _show(results, info, args.plot, as_json=as_json)
        raise
    _show(results, info, args.plot, as_json=as_json)
    _check_failed(results, path, has_full=has_full)


def _read(info: ModelInfo, text: TextSource, max_tokens: int | None) -> tuple[np.ndarray, str, int, Layers]:
    """Return the tokens i32[n], the SHA-256 of their text, and the model's vocabulary size and layers."""
    from kvtool.llama.loaded.model import Model
    from kvtool.measure.records import text_sha256

    with closing(Model(info.path, no_weights=True)) as model:
        tokens = first_tokens(model, text, max_tokens)
        return tokens, text_sha256(model, tokens), model.n_vocab, model.layers


def _all_kinds(layers: Layers) -> dict[str, type[Policy]]:
    """Return the policies to compare if none are named: all that can stream a text with these layers."""
    kinds = {name: policies.load(name) for name in policies.names()}
    # leave out policies that read a text twice, and those that merge values if the model has none (MLA)
    kinds = {
        name: kind
        for name, kind in kinds.items()
        if not kind.has_reconstruction() and (layers.has_values or not kind.may_merge())
    }
    # `full` first
    return dict(sorted(kinds.items(), key=lambda item: item[1].evicts))


def _against_full(common: Common, n_vocab: int, names: list[str]) -> tuple[list[str], str]:
    """Return the policies that can run on the text.

    Also return why their results cannot be compared with `full`, or "" if they can.
    """
    from kvtool.measure import grid
    from kvtool.measure.divergence import fits, folder_with_room

    n = common.n_tokens
    check_positions(common.options.positions, n, common.n_ctx)
    without = "so KL, top-1 and differences to `full` are missing"
    if n > common.n_ctx:
        reason = (
            f"the text ({n:,} tokens) does not fit in the full cache ({common.n_ctx:,}), {without}; "
            "--max-tokens makes the text shorter"
        )
        return [name for name in names if policies.load(grid.split_policy(name)[0]).evicts], reason
    if not fits(n, n_vocab):
        return names, f"the full cache's predictions of {n:,} tokens take too much disk space, {without}"
    reference = grid.reference(common)
    if not (reference.exists() or folder_with_room(reference, n, n_vocab)):
        return names, f"{reference.parent} has no room for the full cache's predictions, {without}"
    return names, ""


def _run(
    results: ComparisonResults, full: Run | None, info: ModelInfo, tokens: np.ndarray, path: Path | None
) -> bool:
    """Do the runs that have no result yet. When a run ends, add its record to `results` and to the file.

    Returns False if the run of `full` failed that writes the reference for the others. Raises output.Stopped
    after Ctrl-C, and NotStored if a record cannot be appended to the file.

    full: run with the full f16 cache, or None if its predictions are not used. path: file of the records.
    """
    from kvtool.config.model import loaded_model
    from kvtool.measure import grid, records
    from kvtool.measure.divergence import folder_with_room
    from kvtool.measure.run import outcome

    missing, has_full = results.missing(kl=full is not None), True
    if not missing:
        return has_full
    common = results.common
    if len(missing) < len(results.grid):
        say(f"{len(results.grid) - len(missing)} of {len(results.grid)} runs are done already")
    reference, first = grid.reference(common) if full else None, None
    if full and reference and not reference.exists():
        # do the run of `full` first, because it writes the reference for all other runs. Do it even if its
        # result is already stored
        first = next((run for run in missing if run.options.values() == full.options.values()), full)
    is_extra = first is not None and first not in missing
    n_run = len(missing) + is_extra
    if len(missing) == len(results.grid) > 1:
        extra = ", one with the full cache" if is_extra else ""
        less = "fewer --policies, --budgets or --types, or a smaller --max-tokens, take less time"
        say(f"{n_run} runs of {common.n_tokens:,} tokens each{extra}; {less}")

    work = SimpleNamespace(stop=False)

    def done(run: Run, *, writes: bool = False) -> bool:
        """Do a run, show its progress, and store its record if the run is in `missing`.

        Returns False if the run failed. Raises KeyboardInterrupt after Ctrl-C.
        """

        def report(n: int, nll: float) -> None:
            show(run, n, nll)
            if work.stop:
                raise KeyboardInterrupt

        show(run)
        record = grid.identity(common, run) | outcome(model, run, tokens, reference, report, writes=writes)
        show(run, record=record)
        if run in missing:
            results.of_run[run] = record
            if path:
                records.append(path, record)
        return "error" not in record

    with ExitStack() as stack:
        n_cell = max(_n_cell(run, common.n_ctx) for run in (*missing, first) if run)
        model = stack.enter_context(loaded_model(common.options, info, n_cell=n_cell, say=say))
        if first and reference:
            folder = folder_with_room(reference, common.n_tokens, model.n_vocab)
            if folder != reference.parent:
                # the cache folder has no room, or is read-only: keep the file until this command ends
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtool-", dir=folder)))
                reference = folder / reference.name
        # stdout is for the result: a user's policy may also print
        stack.enter_context(redirect_stdout(sys.stderr))
        show = stack.enter_context(runs_progress(n_run, common.n_tokens - 1))
        try:
            with stopping(work):
                if first and not done(first, writes=True):
                    say("the full cache failed, so KL, top-1 and differences to it are missing")
                    has_full, reference, missing = False, None, results.missing()
                for run in missing:
                    if run is not first:
                        done(run)
        except KeyboardInterrupt:
            n_kept = len(results.grid) - len(results.missing())
            raise output.Stopped(output.stopped(path, n_kept, len(results.grid), "runs")) from None
    return has_full


def _n_cell(run: Run, n_ctx: int) -> int:
    """Return the largest number of cells that a row of the run's cache needs."""
    from kvtool.engine import residents

    n, resident = run.policy.n_live + run.settings.n_batch, run.settings.resident
    return n + residents.n_cells(resident, n_ctx) if resident and run.recalls else n


def _show(results: ComparisonResults, info: ModelInfo, plot: Path | None, *, as_json: bool) -> None:
    """Print the records of the finished runs, and draw the picture `plot`."""
    rows = results.compared()
    text = results.common.what["text"]
    if as_json:
        for _, record in rows:
            typer.echo(json_text(record))
    else:
        from kvtool.cli.compare.table import show

        show(table_console(), rows, text, info.path.stem)
    if plot:
        from kvtool.cli.compare.plot import picture

        output.write(plot, output.png(picture(rows, text, info.path.stem)))


def _check_failed(results: ComparisonResults, path: Path | None, *, has_full: bool) -> None:
    """Raise KvtoolError if runs failed. has_full: False if the run of `full` for the others failed."""
    if failed := results.failed():
        again = "--resume tries them again" if path else "see above"
        raise KvtoolError(f"{len(failed)} of {len(results.grid)} runs failed; {again}")
    if not has_full:
        again = "--resume tries it again" if path else "see above"
        raise KvtoolError(f"the run of the full cache failed; {again}")
