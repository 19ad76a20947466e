"""The perplexity of every policy at every budget: the README's table.

    python benchmarks/policies.py FILE --budgets 128,256,512 --json policies.jsonl

Each cell streams the same first `--max-tokens` of the text through one cache and scores every token from
`--first` on; by default all but the first, as `kvtool perplexity` does. Finished cells are appended to
the JSONL as they come; a second run with the same file does only what is missing, and prints the whole table.
`full` keeps everything, whatever the budget. Rows that may differ take what they need, and are held to each
budget as well.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
from common import add_common, describe, load_model, load_tokens, machine, note

from kvtool import models, policies
from kvtool.engine import Engine, Settings
from kvtool.measure import perplexity

KEY = ("policy", "budget", "evict_every", "model", "file", "max_tokens", "first", "positions", "flash")
"""What makes a cell another cell."""

_worker: dict[str, object] = {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--first", type=int, default=1, help="tokens before it are not scored")
    parser.add_argument("--budgets", default="128,256,512", help="cells, with commas")
    parser.add_argument("--policies", default=",".join(policies.names()), help="names, with commas")
    parser.add_argument("--evict-every", type=int, help="default: as kvtool itself")
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument("--flash", default="auto", choices=("auto", "off", "on"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with the model in memory")
    args = parser.parse_args()
    if not 0 < args.first < args.max_tokens:
        parser.error("--first must be in 1..--max-tokens - 1")

    # wrong names and budgets are told before an hour of work, not after
    names, budgets = args.policies.split(","), [int(budget) for budget in args.budgets.split(",")]
    for name in names:
        for budget in _budgets(args, name, budgets):
            policies.fit(name, budget, args.evict_every)
    wanted = [_cell(args, name, budget) for name in names for budget in _budgets(args, name, budgets)]
    there = _read(args.json)
    missing = [cell for cell in wanted if _key(cell) not in there]
    note(f"{len(wanted) - len(missing)} cells are there, {len(missing)} to do")
    for cell in _measured(args, missing):
        there[_key(cell)] = cell
        note(f"{cell['policy']} {cell['budget']}: {cell['perplexity']:.3f}, {cell['tokens_s']:.0f} tokens/s")
        if args.json:
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps(cell) + "\n")
    print(_markdown([there[_key(cell)] for cell in wanted], names, budgets, args.max_tokens))
    note(describe(machine()))


def _budgets(args, name: str, budgets: list[int]) -> list[int]:
    """Rows that may differ take what they need, and are held to each budget as well."""
    if name == "full":
        return [args.max_tokens]
    return [*budgets, args.max_tokens] if policies.load(name).ragged else budgets


def _cell(args, name: str, budget: int) -> dict[str, object]:
    return {
        "policy": name,
        "budget": budget,
        "evict_every": args.evict_every,
        "model": models.resolve(args.model).name,
        # the same text in another folder is the same text
        "file": args.file.name,
        "max_tokens": args.max_tokens,
        "first": args.first,
        "positions": args.positions,
        "flash": args.flash,
    }


def _key(cell: dict[str, object]) -> tuple:
    return tuple(cell[name] for name in KEY)


def _read(path: Path | None) -> dict[tuple, dict[str, object]]:
    if not path or not path.exists():
        return {}
    cells = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # a run that was killed may have left half a line
        try:
            cells.append(json.loads(line))
        except ValueError:
            continue
    return {_key(cell): cell for cell in cells}


def _measured(args, cells: list[dict]):
    """The cells with their results, as they are finished."""
    if not cells:
        return
    if args.jobs == 1:
        _start(args)
        yield from map(_measure, cells)
        return
    # a fork would share llama.cpp's and numba's state
    with multiprocessing.get_context("spawn").Pool(args.jobs, _start, (args,)) as pool:
        yield from pool.imap_unordered(_measure, cells)


def _start(args) -> None:
    model = load_model(args.model)
    _worker.update(args=args, model=model, tokens=load_tokens(model, args.file, args.max_tokens))


def _measure(cell: dict[str, object]) -> dict[str, object]:
    args, model, tokens = _worker["args"], _worker["model"], _worker["tokens"]
    if cell["policy"] == "full":
        policy = policies.load("full")(budget=cell["budget"], slack=0)
    else:
        policy = policies.fit(cell["policy"], cell["budget"], cell["evict_every"])
    settings = Settings(
        positions=args.positions,
        n_batch=64,
        n_output=64,
        over_budget=False,
        flash=args.flash,
        n_threads=args.threads,
    )
    engine = Engine(model, policy, settings)
    start, cpu = time.perf_counter(), time.process_time()
    nll: np.ndarray = perplexity.stream(engine, tokens)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    cache_bytes, host_bytes, mean_cells = engine.cache_bytes, engine.host_bytes, float(engine.live.mean())
    engine.close()
    scored = nll[args.first - 1 :]
    return cell | {
        "perplexity": math.exp(scored.mean()),
        "nll": float(scored.mean()),
        "nll_error": float(scored.std() / math.sqrt(len(scored))),
        "n_scored": len(scored),
        "tokens_s": len(tokens) / seconds,
        "tokens_cpu_s": len(tokens) / cpu_s,
        "cache_bytes": cache_bytes,
        "host_bytes": host_bytes,
        "cells": mean_cells,
        "machine": machine(),
    }


def _markdown(cells: list[dict], names: list[str], budgets: list[int], n_token: int) -> str:
    """Policies as rows, budgets as columns; first what has no budget."""
    found = {(cell["policy"], cell["budget"]): cell for cell in cells}
    lines = ["| policy | " + " | ".join(str(budget) for budget in budgets) + " |"]
    lines.append("| --- |" + " ---: |" * len(budgets))
    for name in names:
        if cell := found.get((name, n_token)):
            free = f"{name}, {cell['cells']:.0f} cells at the end"
            lines.insert(2, f"| {free} |" + f" {cell['perplexity']:.2f} |" * len(budgets))
    for name in names:
        if (name, budgets[0]) in found:
            row = [f"{found[name, budget]['perplexity']:.2f}" for budget in budgets]
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
