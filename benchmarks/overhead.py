"""What kvtool costs a token over stock llama.cpp with as many cells, and what it saves over a long cache.

    python benchmarks/overhead.py FILE --policies h2o,buzz,streamingllm,tova --budget 512

Stock is the same library through llama_cpp's low-level API with nothing of kvtool enabled: single tokens of
the text, no sampling, a cache kept full by removing a block's tokens after the block. All of it runs in one
process; short blocks take turns, and a kvtool block is compared with the stock blocks just before and just
after it. A kvtool block goes from one eviction to another, so that it contains its full share of them
(BUZZ evicts seldom: its blocks are longer). Ratios are paired by round. Where other programs run as well,
`--clock cpu` with one thread leaves out the time that was theirs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict

import llama_cpp.llama_cpp as api
import numpy as np
from common import add_common, describe, load_model, load_tokens, machine, note, show, spread, write_json
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.engine import Engine, Settings
from kvtool.llama import FLASH, Model

SHORT, LONG = "stock", "stock, long"

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Stock:
    """Stock llama.cpp with n_cell cells, all but the block's tokens filled once."""

    def __init__(self, model: Model, n_cell: int, tokens: np.ndarray, n_block: int, flash: str, args) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = n_cell
        params.n_batch = params.n_ubatch = min(n_cell, 512)
        params.n_threads = params.n_threads_batch = args.threads
        params.flash_attn_type = FLASH[flash]
        self.context = api.llama_init_from_model(model._model, params)
        if not self.context:
            sys.exit(f"llama.cpp cannot make a context of {n_cell} cells")
        self.now = CLOCKS[args.clock]
        self.n_fill = n_cell - n_block
        self.n_block = n_block
        self.tokens = tokens
        self._fill(min(n_cell, 512))
        self.batch = api.llama_batch_init(1, 0, 1)
        self.batch.n_tokens = 1
        self.batch.n_seq_id[0] = 1
        self.batch.seq_id[0][0] = 0
        self.batch.logits[0] = True

    def _fill(self, n_batch: int) -> None:
        for at in range(0, self.n_fill, n_batch):
            part = self.tokens[at : min(at + n_batch, self.n_fill)]
            # the name keeps the array alive: llama_batch_get_one only points to it
            array = (api.llama_token * len(part))(*part.tolist())
            if api.llama_decode(self.context, api.llama_batch_get_one(array, len(part))) != 0:
                sys.exit("llama.cpp cannot decode")

    def block(self) -> tuple[float, int]:
        """Seconds and tokens."""
        batch, context = self.batch, self.context
        tokens = self.tokens[self.n_fill : self.n_fill + self.n_block].tolist()
        start = self.now()
        for i, token in enumerate(tokens):
            batch.token[0] = token
            batch.pos[0] = self.n_fill + i
            if api.llama_decode(context, batch) != 0:
                sys.exit("llama.cpp cannot decode")
            api.llama_get_logits(context)
        seconds = self.now() - start
        api.llama_memory_seq_rm(api.llama_get_memory(context), 0, self.n_fill, -1)
        return seconds, len(tokens)


class Kvtool:
    """An engine in its steady state, and where its time goes: measured from outside."""

    def __init__(self, model: Model, name: str, tokens: np.ndarray, flash: str, args) -> None:
        policy = policies.fit(name, args.budget, args.evict_every)
        settings = Settings(positions=args.positions, flash=flash, n_threads=args.threads)
        self.engine = Engine(model, policy, settings)
        self.now = CLOCKS[args.clock]
        self.tokens = tokens
        self.n_block = args.block
        self.at = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.n_token = self.n_eviction = 0
        self._warm_up()
        self.engine.context.decode = self._timed("decode", self.engine.context.decode)
        self.engine._apply = self._timed("apply", self.engine._apply)
        self.engine._evict = self._timed("evict", self.engine._evict)

    def _warm_up(self) -> None:
        """Two evictions, then up to the next one: what follows is as it will always be."""
        engine, n_seen = self.engine, 0
        while n_seen < 2 or engine.n_kv < engine.policy.budget:
            before = engine.n_evicted
            n = min(engine.room(), engine.policy.budget - engine.n_kv)
            n_seen += engine.n_evicted > before
            engine.step(self._next(n))

    def _next(self, n: int) -> np.ndarray:
        # the text starts over where it ends; nothing is scored here
        part = np.take(self.tokens, np.arange(self.at, self.at + n), mode="wrap")
        self.at += n
        return part

    def _timed(self, name: str, function):
        def call(*args, **kwargs):
            start = self.now()
            result = function(*args, **kwargs)
            self.seconds[name] += self.now() - start
            self.n_eviction += name == "evict"
            return result

        return call

    def block(self) -> tuple[float, int]:
        """Seconds and tokens, from just before an eviction to just before another."""
        engine, budget, n = self.engine, self.engine.policy.budget, 0
        start = self.now()
        while n < self.n_block or engine.n_kv < budget:
            engine.room()
            engine.step(self._next(1))
            engine.context.logits()
            n += 1
        seconds = self.now() - start
        self.seconds["all"] += seconds
        self.n_token += n
        return seconds, n

    def split(self) -> dict[str, float]:
        """Milliseconds a token: llama.cpp's decode call, reading signals and planning, applying, the rest."""
        ms = {name: 1e3 * seconds / self.n_token for name, seconds in self.seconds.items()}
        return {
            "decode": ms["decode"],
            "read_plan": ms["evict"] - ms["apply"],
            "apply": ms["apply"],
            "rest": ms["all"] - ms["decode"] - ms["evict"],
            "tokens_an_eviction": self.n_token / max(self.n_eviction, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--policies", default="h2o,buzz,streamingllm,tova", help="names, with commas")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--evict-every", type=int, default=16)
    parser.add_argument("--long", type=int, default=8192, help="cells of the long stock cache; 0: none")
    parser.add_argument("--flash", default="off,on", help="attention paths, with commas")
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument("--block", type=int, default=32, help="tokens; more where evictions need it")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: on a busy machine")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, max(args.long, 4 * args.budget))
    names = args.policies.split(",")
    paths = args.flash.split(",")
    cells = _cells(args, model, tokens, names, paths)
    times = _measure(args, cells, names, paths)
    results = _results(args, model.path.name, cells, times, names, paths)
    write_json(args.json, results)
    _print(args, results)


def _cells(args, model: Model, tokens: np.ndarray, names: list[str], paths: list[str]) -> dict:
    cells: dict[tuple[str, str], Stock | Kvtool] = {}
    # a long cache costs many times as much a token: fewer of them tell as much
    n_block_long = max(args.block // 4, 1)
    for flash in paths:
        cells[SHORT, flash] = Stock(model, args.budget, tokens, args.block, flash, args)
        for name in names:
            note(f"filling {name}, flash attention {flash}")
            cells[name, flash] = Kvtool(model, name, tokens, flash, args)
        if args.long:
            note(f"filling {args.long} cells of stock llama.cpp, flash attention {flash}")
            cells[LONG, flash] = Stock(model, args.long, tokens, n_block_long, flash, args)
    return cells


def _measure(args, cells: dict, names: list[str], paths: list[str]) -> dict:
    """Seconds a token by (cell, path) and round; a policy's stock blocks under (name, path, "stock")."""
    times: dict[tuple, list[float]] = defaultdict(list)

    def block(*key: str) -> float:
        seconds, n = cells[key].block()
        return seconds / n

    for cell in cells.values():
        cell.block()
        if isinstance(cell, Kvtool):
            cell.seconds.clear()
            cell.n_token = cell.n_eviction = 0
    for i in range(args.rounds):
        for flash in paths:
            before = block(SHORT, flash)
            for name in names:
                times[name, flash].append(block(name, flash))
                after = block(SHORT, flash)
                times[name, flash, "stock"].append((before + after) / 2)
                before = after
            if args.long:
                times[LONG, flash].append(block(LONG, flash))
        note(f"round {i + 1} of {args.rounds}")
    return times


def _results(args, model: str, cells: dict, times: dict, names: list[str], paths: list[str]) -> dict:
    options = ("policies", "budget", "evict_every", "long", "positions", "block", "rounds", "threads")
    results: dict[str, object] = {
        "machine": machine(),
        "model": model,
        "options": {name: getattr(args, name) for name in (*options, "clock")},
        "cells": [],
    }
    best = None
    if args.long:
        best = min(paths, key=lambda flash: statistics.median(times[LONG, flash]))
        results["best_long"] = best
        results["long_ms"] = {flash: spread([1e3 * t for t in times[LONG, flash]]) for flash in paths}
    for flash in paths:
        for name in names:
            ours, stock = times[name, flash], times[name, flash, "stock"]
            cell = {
                "policy": name,
                "flash": flash,
                "ms": spread([1e3 * t for t in ours]),
                "stock_ms": spread([1e3 * t for t in stock]),
                "over_stock": spread([a / b for a, b in zip(ours, stock, strict=True)]),
                "split_ms": cells[name, flash].split(),
            }
            if best:
                cell["long_over_ours"] = spread([b / a for a, b in zip(ours, times[LONG, best], strict=True)])
            results["cells"].append(cell)
    return results


def _print(args, results: dict) -> None:
    title = f"budget {args.budget}, an eviction every {args.evict_every} tokens, positions {args.positions}"
    table = Table(title=title)
    table.add_column("policy")
    table.add_column("flash")
    columns = [
        "ms a token",
        f"stock, {args.budget} cells",
        "over stock",
        "decode",
        "read, plan",
        "apply",
        "rest",
        "tokens an eviction",
    ]
    if args.long:
        columns.insert(3, f"stock {args.long} / ours")
    for column in columns:
        table.add_column(column, justify="right")
    for cell in results["cells"]:
        split = cell["split_ms"]
        row = [
            show(cell["ms"], 1),
            show(cell["stock_ms"], 1),
            show(cell["over_stock"]),
            *(f"{split[name]:.2f}" for name in ("decode", "read_plan", "apply", "rest")),
            f"{split['tokens_an_eviction']:.0f}",
        ]
        if args.long:
            row.insert(3, show(cell["long_over_ours"], 2))
        table.add_row(cell["policy"], cell["flash"], *row)
    # a file or a pipe has no width: nothing is cut off there
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    if args.long:
        for flash, ms in results["long_ms"].items():
            best = ", the one compared with" if flash == results["best_long"] else ""
            console.print(f"stock, {args.long} cells, flash {flash}: {show(ms, 1)} ms a token{best}")
    console.print("median (least-most) of the rounds; the split is a mean")
    console.print(describe(results["machine"]))


if __name__ == "__main__":
    main()
