"""Compare the time of a token in kvtool with stock llama.cpp, with as many cells and with a long cache.

    python -m lab.benchmarks.overhead FILE --policies h2o,buzz,streamingllm,tova --budget 512

Stock is the same library through llama_cpp's low-level API, with nothing of kvtool enabled. It decodes single
tokens of the text without sampling. Its cache stays full: when no cell is free, the last tokens are removed.

Everything runs in one process. kvtool and stock take turns token by token, so other programs slow down both.
A round of a policy ends when the next eviction is due, so that it always includes whole periods from one
eviction to the next. BUZZ evicts seldom, so its rounds are longer. `stock again` compares stock with stock:
its ratio shows the noise. If other programs are running, use `--clock cpu` with one thread to leave out their
time.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

import numpy as np
from rich.table import Table

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from lab.benchmarks.common import (
    CLOCKS,
    add_common,
    add_plot,
    console,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    plot_ratios,
    show,
    spread,
    spread_of_ratios,
    stock_context,
    write_json,
)

SHORT, AGAIN, LONG = "stock", "stock again", "stock, long"

N_STOCK = 16
"""Number of cells that stock frees when its cache is full. kvtool also frees 16 cells by default."""

N_LONG = 8
"""Number of tokens of a round with the long cache. It is small, because each of them takes long."""


class Stock:
    """Stock llama.cpp with n_cell cells.

    Steps fill the last n_block cells again and again. All cells before them stay full.
    """

    def __init__(self, model: Model, n_cell: int, tokens: np.ndarray, n_block: int, flash: str, args) -> None:
        self.context = stock_context(model, n_cell, min(n_cell, 512), args.threads, flash)
        self.now = CLOCKS[args.clock]
        self.n_fill = n_cell - n_block
        self.n_block = n_block
        self.tokens = tokens
        self.n_done = 0
        self._fill(min(n_cell, 512))
        self.batch = api.llama_batch_init(1, 0, 1)
        self.batch.n_tokens = 1
        self.batch.n_seq_id[0] = 1
        self.batch.seq_id[0][0] = 0
        self.batch.logits[0] = True

    def _fill(self, n_batch: int) -> None:
        for at in range(0, self.n_fill, n_batch):
            part = self.tokens[at : min(at + n_batch, self.n_fill)]
            # keep the array in a variable, because llama_batch_get_one only points to it
            array = (api.llama_token * len(part))(*part.tolist())
            if api.llama_decode(self.context, api.llama_batch_get_one(array, len(part))) != 0:
                sys.exit("llama.cpp cannot decode")

    def step(self) -> float:
        """Decode one token. Return the time in seconds."""
        if self.n_done == self.n_block:
            api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, self.n_fill, -1)
            self.n_done = 0
        at = self.n_fill + self.n_done
        token = int(self.tokens[at])
        self.n_done += 1
        start = self.now()
        self.batch.token[0] = token
        self.batch.pos[0] = at
        if api.llama_decode(self.context, self.batch) != 0:
            sys.exit("llama.cpp cannot decode")
        api.llama_get_logits(self.context)
        return self.now() - start


class Kvtool:
    """An engine in its steady state. Some of its methods are wrapped, so that their time is measured."""

    def __init__(self, model: Model, name: str, tokens: np.ndarray, flash: str, args) -> None:
        policy = policies.fit(name, args.budget, args.evict_every)
        # a step that may exceed the budget needs more cells, and kvtool must have as many cells as stock
        settings = Settings(
            positions=args.positions, n_batch=64, over_budget=False, flash=flash, n_threads=args.threads
        )
        self.engine = Engine(model, policy, settings)
        self.now = CLOCKS[args.clock]
        self.tokens = tokens
        self.at = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.n_token = self.n_eviction = 0
        self._warm_up()
        self.engine.context.decode = self._timed("decode", self.engine.context.decode)
        cache = self.engine.cache
        cache.apply = self._timed("apply", cache.apply)
        self.engine.evict = self._timed("evict", self.engine.evict)

    def _warm_up(self) -> None:
        """Decode until the third eviction is due. From then on, evictions come at a fixed interval."""
        engine, n_seen = self.engine, 0
        while n_seen < 2 or engine.n_kv < engine.policy.budget:
            before = engine.n_evicted
            engine.evict_if_due()
            n_seen += engine.n_evicted > before
            # decode the last token alone: this makes the graph for single tokens
            engine.step(self._next(min(engine.room(), max(engine.policy.budget - engine.n_kv - 1, 1))))

    def _next(self, n: int) -> np.ndarray:
        # at the end of the text, start again at its beginning: nothing is scored
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

    @property
    def is_due(self) -> bool:
        """True if the next step starts with an eviction."""
        return self.engine.n_kv >= self.engine.policy.budget

    def step(self) -> float:
        """Decode one token. If an eviction is due, evict first. Return the time in seconds."""
        token = self._next(1)
        start = self.now()
        self.engine.step(token)
        self.engine.context.logits()
        seconds = self.now() - start
        self.seconds["all"] += seconds
        self.n_token += 1
        return seconds

    def split(self) -> dict[str, float]:
        """Return the milliseconds per token of decode, of signals and plan, of edits, and of the rest.

        Also return the number of tokens per eviction.
        """
        ms = {name: 1e3 * seconds / self.n_token for name, seconds in self.seconds.items()}
        return {
            "decode": ms["decode"],
            "read_plan": ms["evict"] - ms["apply"],
            "apply": ms["apply"],
            "rest": ms["all"] - ms["decode"] - ms["evict"],
            "tokens_an_eviction": self.n_token / max(self.n_eviction, 1),
        }


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    add_plot(parser)
    parser.add_argument("--policies", default="h2o,buzz,streamingllm,tova", help="names, separated by commas")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--evict-every", type=int, default=16)
    parser.add_argument("--long", type=int, default=8192, help="cells of the long stock cache; 0 for none")
    parser.add_argument("--flash", default="off,on", help="attention paths, separated by commas")
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument("--block", type=int, default=32, help="fewest tokens of a round")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu, if other programs are running")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", type=float, default=1.03, help="the line in the picture")
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
    ratios = {f"{cell['policy']}, flash {cell['flash']}": cell["over_stock"] for cell in results["cells"]}
    plot_ratios(args.plot, f"time of a token over stock's, {args.budget} cells", ratios, args.target)


def _cells(args, model: Model, tokens: np.ndarray, names: list[str], paths: list[str]) -> dict:
    cells: dict[tuple[str, str], Stock | Kvtool] = {}
    for flash in paths:
        for name in (SHORT, AGAIN):
            cells[name, flash] = Stock(model, args.budget, tokens, N_STOCK, flash, args)
        for name in names:
            note(f"filling {name}, flash attention {flash}")
            cells[name, flash] = Kvtool(model, name, tokens, flash, args)
        if args.long:
            note(f"filling {args.long} cells of stock llama.cpp, flash attention {flash}")
            cells[LONG, flash] = Stock(model, args.long, tokens, N_LONG, flash, args)
    return cells


def _measure(args, cells: dict, names: list[str], paths: list[str]) -> dict:
    """Return the seconds per token, a number for each round.

    The key (name, flash) has the time of kvtool or of a stock cache; flash is "on" or "off". The key
    (name, flash, "stock") has the time of stock in the same rounds.
    """
    times: dict[tuple, list[float]] = defaultdict(list)
    for cell in cells.values():
        # do not time stock's first single token, which makes a new graph
        if isinstance(cell, Stock):
            cell.step()
    for i in range(args.rounds):
        for flash in paths:
            for name in (AGAIN, *names):
                ours, stock = _duel(cells[name, flash], cells[SHORT, flash], args.block)
                times[name, flash].append(ours)
                times[name, flash, "stock"].append(stock)
            if args.long:
                steps = [cells[LONG, flash].step() for _ in range(cells[LONG, flash].n_block)]
                times[LONG, flash].append(statistics.fmean(steps))
        note(f"round {i + 1} of {args.rounds}")
    return times


def _duel(cell: Stock | Kvtool, stock: Stock, n_min: int) -> tuple[float, float]:
    """Step `cell` and `stock` in turns. Return the seconds per token of each.

    Make at least n_min steps, and continue until the next eviction of `cell` is due.
    """
    ours, theirs = [], []
    while len(ours) < n_min or (isinstance(cell, Kvtool) and not cell.is_due):
        ours.append(cell.step())
        theirs.append(stock.step())
    return statistics.fmean(ours), statistics.fmean(theirs)


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
        for name in (AGAIN, *names):
            ours, stock = times[name, flash], times[name, flash, "stock"]
            cell = {
                "policy": name,
                "flash": flash,
                "ms": spread([1e3 * t for t in ours]),
                "stock_ms": spread([1e3 * t for t in stock]),
                "over_stock": spread_of_ratios(ours, stock),
                "split_ms": cells[name, flash].split() if name != AGAIN else None,
            }
            if best:
                cell["long_over_ours"] = spread_of_ratios(times[LONG, best], ours)
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
        ]
        if split:
            row += [f"{split[name]:.2f}" for name in ("decode", "read_plan", "apply", "rest")]
            row.append(f"{split['tokens_an_eviction']:.0f}")
        if args.long:
            row.insert(3, show(cell["long_over_ours"], 2))
        table.add_row(cell["policy"], cell["flash"], *row)
    out = console(200)
    out.print(table)
    if args.long:
        for flash, ms in results["long_ms"].items():
            best = ", the one compared with" if flash == results["best_long"] else ""
            out.print(f"stock, {args.long} cells, flash {flash}: {show(ms, 1)} ms a token{best}")
    out.print("median (least-most) of the rounds; the split is a mean")
    out.print(describe(results["machine"]))


if __name__ == "__main__":
    main()
