"""Measure the time of a token while other programs use the same cores.

    python -m lab.benchmarks.busy FILE --policy h2o --budget 512 --others 0,1,2
    python -m lab.benchmarks.busy FILE --spins 300,30000

Each row of the table is a process: kvtool with its default number of threads, with all cores and with one
thread, and stock llama.cpp with all cores. The rows take turns of --tokens tokens. Meanwhile 0, 1 or 2 other
processes decode with kvtool's defaults without a pause. --spins adds rows for kvtool with other values of
GOMP_SPINCOUNT, which sets how long threads wait before they sleep.

The column "over its share" is a row's time with k other processes, divided by the time that kvtool would need
with 1 / (k + 1) of the cores. The divisor is the minimum of two products. Both use kvtool's times without
other processes: (time with all cores) * (k + 1), and (time with one thread) * max(1, (k + 1) / cores). If the
ratio is above 1, the row has lost time by waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from kvtool.system.cpu import default_threads
from lab.benchmarks.common import (
    add_common,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    show,
    spread,
    spread_of_ratios,
    write_json,
)
from lab.benchmarks.overhead import N_STOCK, Kvtool, Stock

SPIN = "GOMP_SPINCOUNT"
_OURS, _ALL, _ONE, _STOCK = "kvtool", "kvtool, all cores", "kvtool, one thread", "stock, all cores"


class Row:
    """A child process that decodes on request.

    n_threads: number of threads; if 0, kvtool chooses. spin: value of GOMP_SPINCOUNT; None to not set it.
    """

    def __init__(self, args, kind: str, n_threads: int, spin: str | None = None) -> None:
        self.n_threads = n_threads or default_threads()
        self.spin = spin
        command = [sys.executable, "-m", "lab.benchmarks.busy", str(args.file), "--child", kind]
        command += ["-t", str(n_threads), "--policy", args.policy, "--budget", str(args.budget)]
        command += ["-m", args.model] if args.model else []
        environment = {name: value for name, value in os.environ.items() if name != SPIN}
        environment |= {SPIN: spin} if spin else {}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> float:
        """Return the next number that the process prints: 0 when it is ready, later the seconds per token."""
        return float(self._process.stdout.readline())

    def ask(self, n: int) -> None:
        """Let the process decode n tokens. If n is 0, it decodes without end."""
        print(n, file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def child(args) -> None:
    """For each number on stdin, decode that many tokens, and print the mean seconds per token.

    If the number is 0, decode without end.
    """
    model = load_model(args.model)
    tokens = load_tokens(model, args.file, 4 * args.budget)
    args.threads = args.threads or None
    how = SimpleNamespace(**vars(args), clock="wall", evict_every=16, positions="auto")
    if args.child == _STOCK:
        decoder = Stock(model, args.budget, tokens, N_STOCK, "off", how)
    else:
        decoder = Kvtool(model, args.policy, tokens, "off", how)
    decoder.step()
    print(0, flush=True)
    for line in sys.stdin:
        n = int(line)
        while not n:
            decoder.step()
        print(statistics.fmean(decoder.step() for _ in range(n)), flush=True)


@contextmanager
def others(args, n: int):
    """Run n more decoding processes during the block."""
    with ExitStack() as stack:
        rows = [Row(args, _OURS, 0) for _ in range(n)]
        for row in rows:
            stack.callback(row.close)
        for row in rows:
            row.wait()
            row.ask(0)
        yield


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument(
        "--others", default="0,1,2", help="numbers of other processes, separated by commas; the first is 0"
    )
    parser.add_argument("--spins", default="", help="lengths of GOMP_SPINCOUNT, separated by commas")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a turn: three evictions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return

    n_core = default_threads()
    with ExitStack() as stack:
        rows = {
            _OURS: Row(args, _OURS, 0),
            _ALL: Row(args, _OURS, n_core),
            _ONE: Row(args, _OURS, 1),
            _STOCK: Row(args, _STOCK, n_core),
        }
        for spin in filter(None, args.spins.split(",")):
            rows[f"{_ALL}, spins {spin}"] = Row(args, _OURS, n_core, spin)
        for row in rows.values():
            stack.callback(row.close)
            row.wait()
        times = _measure(args, rows)
    results = _results(args, times)
    write_json(args.json, results)
    _print(results)


def _measure(args, rows: dict[str, Row]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds per token in each round, by row and number of other processes."""
    times: dict[tuple[str, int], list[float]] = {}
    for n in map(int, args.others.split(",")):
        with others(args, n):
            for _ in range(args.rounds):
                for name, row in rows.items():
                    row.ask(args.tokens)
                    times.setdefault((name, n), []).append(row.wait())
        note(f"beside {n}: done")
    return times


def _results(args, times: dict[tuple[str, int], list[float]]) -> dict:
    cells = []
    for (name, n), each in times.items():
        explained = min(
            statistics.median(times[_ALL, 0]) * (n + 1),
            statistics.median(times[_ONE, 0]) * max((n + 1) / default_threads(), 1),
        )
        cells.append(
            {
                "row": name,
                "others": n,
                "ms": spread([1e3 * t for t in each]),
                "over_stock": spread_of_ratios(each, times[_STOCK, n]),
                "over_all": spread_of_ratios(each, times[_ALL, n]),
                "over_share": statistics.median(each) / explained,
            }
        )
    options = {name: getattr(args, name) for name in ("policy", "budget", "tokens", "rounds")}
    return {"machine": machine(), "options": options, "cells": cells}


def _print(results: dict) -> None:
    console = Console()
    console.print(describe(results["machine"]))
    console.print(describe(results["options"]))
    table = Table("others", "row", box=None)
    for name in ("ms a token", "over stock", "over all cores", "over its share"):
        table.add_column(name, justify="right")
    for cell in results["cells"]:
        ratios = (show(cell[name], 2) for name in ("over_stock", "over_all"))
        ms, over = show(cell["ms"], 1), f"{cell['over_share']:.2f}"
        table.add_row(str(cell["others"]), cell["row"], ms, *ratios, over)
    console.print(table)


if __name__ == "__main__":
    main()
