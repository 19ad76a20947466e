"""`kvtool bench`: measure how fast this machine reads and writes, by depth and kind of cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from kvtool import policies
from kvtool.cli import output
from kvtool.cli.console import say, table_console
from kvtool.cli.declared import JsonLines, options
from kvtool.cli.locate import locate_model
from kvtool.cli.progress import stopping, tokens_progress
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.options import Options, Range, option, parts, redeclared, tested
from kvtool.system.cpu import default_threads
from kvtool.system.texts import json_text

if TYPE_CHECKING:
    from kvtool.config.budget import Fitted
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers

_POLICIES = "recall", "h2o"
_MIN_DEPTH, _MAX_DEPTH = 32, 2**24


@dataclass(frozen=True)
class _BenchRun(RunOptions):
    hidden: ClassVar = (
        *("policy", "options", "evict_every", "positions", "prefill", "n_ctx", "type_k", "type_v"),
        *("archive", "archive_file", "archive_type", "resident", "flash", "explain", "chat_template"),
    )

    budget: str | None = redeclared(
        RunOptions,
        "budget",
        default_text="{default_recall:,} tokens with recall, {default_budget:,} with h2o",
    )
    threads: int | None = redeclared(RunOptions, "threads", default_text="one per core")
    verbose: int = redeclared(RunOptions, "verbose", help="-vv shows llama.cpp's log.")


def _depths(text: str) -> list[int]:
    """Parse a value of --depths into numbers of tokens, without duplicates. Raises UsageError."""
    depths = []
    for part in parts(text):
        match = re.fullmatch("([0-9]{1,9})(k?)", part.lower())
        n = int(match[1]) * (1024 if match[2] else 1) if match else None
        if n is None:
            raise UsageError(f"--depths takes numbers of tokens, such as 512,8k, got {part!r}")
        if not _MIN_DEPTH <= n <= _MAX_DEPTH:
            raise UsageError(f"a depth of --depths must be in {_MIN_DEPTH}..{_MAX_DEPTH}, got {n}")
        depths.append(n)
    if not depths:
        raise UsageError("--depths names no depth; give some, such as 512,8k")
    return list(dict.fromkeys(depths))


@dataclass(frozen=True)
class _BenchOptions(Options):
    depths: str = option(
        "--depths LIST",
        "512,8k,32k",
        "Lengths of the stream before a measurement, in tokens, separated by commas; 8k is 8,192.",
        read=tested(_depths),
    )
    rounds: int = option("--rounds N", 5, "Maximum number of rounds per row.", valid=Range(1))
    seconds: float = option(
        "--seconds S",
        6.0,
        "Time after which no further round of a row starts, in seconds.",
        valid=Range(0.001, 1_000_000),
    )


@options
def bench(*, args: _BenchOptions, run: _BenchRun, as_json: JsonLines = False) -> None:
    """Measure how fast this machine reads and writes tokens, and how much memory this takes.

    Each row is one kind of cache at one depth: the full cache (with and without flash attention, in f16 and
    q8_0, and in host memory if there is a GPU), recall, and h2o. To reach a depth quickly, bench repeats the
    keys and values of a few tokens: the speed is real, the text is not. Rows are measured in turns. Ctrl-C
    stops and prints the rows measured so far.
    """
    depths = _depths(args.depths)

    from kvtool.config import archive
    from kvtool.config.model import loaded_model
    from kvtool.config.opening import settings_of
    from kvtool.measure import bench as measure

    run, info, _ = locate_model(run)

    from kvtool.measure.machine import machine

    run = run.changed(threads=run.threads or default_threads())
    with loaded_model(run, info, guarded=True, say=say) as model, output.stopped_by_signals():
        fitted = _fitted(run, info, model.layers)
        has_device = measure.device_free() is not None and run.gpu_layers != 0
        # read all rows in batches that fit into the budget, so that their speeds can be compared
        n_batch = min(policy.n_batch for policy in fitted.values())
        configs = measure.cache_configs({name: policy.n for name, policy in fitted.items()})
        rows = [measure.sized(config, depth, n_batch) for depth in depths for config in configs]
        settings = settings_of(archive.with_type(run, info), model.n_ctx_train, n_batch, 1)
        benchmark = measure.Bench(model, settings, rows, rounds=args.rounds, row_s=args.seconds)
        about = {"model": info.path.stem, "machine": machine() | {"threads": run.threads}}
        n_round = len(rows) * args.rounds
        with tokens_progress("bench", n_round) as step, stopping(benchmark):
            for n_done, row in enumerate(benchmark.measure()):
                step(n_done, f"depth {row.depth:,}: {row.config.name}")
        records = [about | row.record() for row in rows if row.write or row.why]
        if records or not benchmark.stop:
            _print(records, about, as_json=as_json, has_device=has_device)
        if benchmark.stop:
            raise output.Stopped(f"stopped; {len(records)} of {len(rows)} rows are measured")


def _fitted(run: _BenchRun, info: ModelInfo, layers: Layers) -> dict[str, Fitted]:
    """Fit each policy to the budget. Raises UsageError."""
    from kvtool.config.budget import fit_run

    n = info.n_ctx_train
    return {name: fit_run(policies.spec(name), run, layers, n, n, n) for name in _POLICIES}


def _print(records: list[dict[str, Any]], about: dict[str, Any], *, as_json: bool, has_device: bool) -> None:
    if as_json:
        for record in records:
            typer.echo(json_text(record))
    else:
        from kvtool.cli.bench.table import show

        show(table_console(), records, about, has_device=has_device)
