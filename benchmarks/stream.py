"""Does an endless stream keep its quality, its memory and its speed?

    python benchmarks/stream.py FILE --policy buzz --budget 512 --tokens 50000

Streams the text through one engine and scores every token. The perplexity of the last `--tail` tokens is
compared with that of a run that starts afresh at that place; the first `--skip` of them are left out of both,
so that the fresh run has its cache full. With positions `auto` the long stream has gone over to in-cache
positions and a short fresh run has not; `--fresh-positions in-cache` compares like with like. Resident
memory and speed are those of each tenth of the stream.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
from common import add_common, describe, load_model, load_tokens, machine, note, write_json
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.engine import Engine, Settings
from kvtool.llama import Model
from kvtool.measure import memory, perplexity
from kvtool.policy import Policy

N_PART = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--policy", default="buzz")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--evict-every", type=int)
    parser.add_argument("-o", "--option", action="append", default=[], help="name=value, of the policy")
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument("--fresh-positions", choices=("auto", "original", "in-cache"))
    parser.add_argument("--flash", default="auto", choices=("auto", "off", "on"))
    parser.add_argument("--tokens", type=int, default=50000)
    parser.add_argument("--tail", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=1024)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")
    args = parser.parse_args()
    if not args.skip < args.tail <= args.tokens:
        parser.error("--skip must be below --tail, and --tail at most --tokens")

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens)
    policy = policies.fit(args.policy, args.budget, args.evict_every, args.option)
    nll, parts = _stream(model, policy, tokens, args)
    note("the fresh run")
    fresh = _fresh(model, policy, tokens[-args.tail :], args)
    # the first token of the fresh run has no score
    scored = args.tail - 1 - args.skip
    results = _results(args, model.path.name, nll[-scored:], fresh[-scored:], parts)
    write_json(args.json, results)
    _print(results)
    if args.plot:
        _plot(args.plot, nll, parts)


def _engine(model: Model, policy: Policy, positions: str, args) -> Engine:
    # a step scores at most as many tokens as its batch holds
    settings = Settings(
        positions=positions, n_batch=256, n_output=256, flash=args.flash, n_threads=args.threads
    )
    return Engine(model, policy, settings)


def _stream(model: Model, policy: Policy, tokens: np.ndarray, args) -> tuple[np.ndarray, list[dict]]:
    """The nll of every token but the first, and for each tenth its tokens, seconds and resident memory."""
    engine = _engine(model, policy, args.positions, args)
    parts: list[dict] = []
    done, wall, cpu = 0, time.perf_counter(), time.process_time()

    def progress(nll: np.ndarray) -> None:
        nonlocal done, wall, cpu
        done += len(nll)
        if done < (len(tokens) - 1) * (len(parts) + 1) // N_PART:
            return
        now_wall, now_cpu = time.perf_counter(), time.process_time()
        parts.append(
            {
                "tokens": done - sum(part["tokens"] for part in parts),
                "wall_s": now_wall - wall,
                "cpu_s": now_cpu - cpu,
                "rss_bytes": memory.rss_bytes() or memory.peak_rss_bytes(),
            }
        )
        wall, cpu = now_wall, now_cpu
        note(f"{done} tokens, {parts[-1]['tokens'] / parts[-1]['wall_s']:.0f} a second")

    nll = perplexity.stream(engine, tokens, progress)
    engine.close()
    return nll, parts


def _fresh(model: Model, policy: Policy, tokens: np.ndarray, args) -> np.ndarray:
    engine = _engine(model, policy, args.fresh_positions or args.positions, args)
    nll = perplexity.stream(engine, tokens)
    engine.close()
    return nll


def _results(args, model: str, tail: np.ndarray, fresh: np.ndarray, parts: list[dict]) -> dict:
    options = ("policy", "budget", "evict_every", "option", "positions", "fresh_positions", "flash")
    options += ("tokens", "tail", "skip", "threads")
    second, last = parts[1], parts[-1]
    difference = tail - fresh
    return {
        "machine": machine(),
        "model": model,
        "options": {name: getattr(args, name) for name in options},
        "perplexity": math.exp(tail.mean()),
        "fresh_perplexity": math.exp(fresh.mean()),
        "perplexity_ratio": math.exp(difference.mean()),
        # of the mean difference in nats, as if tokens were independent
        "difference_error": float(difference.std() / math.sqrt(len(difference))),
        "rss_ratio": last["rss_bytes"] / second["rss_bytes"],
        "speed_ratio": _speed(last, "wall_s") / _speed(second, "wall_s"),
        "cpu_speed_ratio": _speed(last, "cpu_s") / _speed(second, "cpu_s"),
        "tenths": parts,
    }


def _speed(part: dict, clock: str) -> float:
    return part["tokens"] / part[clock]


def _print(results: dict) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=110)
    options = results["options"]
    title = f"{options['policy']}, budget {options['budget']}, positions {options['positions']}"
    table = Table(title=f"{title}, {options['tokens']} tokens")
    for column in ("tenth", "tokens", "resident MiB", "tokens/s", "tokens/s of CPU time"):
        table.add_column(column, justify="right")
    for i, part in enumerate(results["tenths"], 1):
        table.add_row(
            str(i),
            str(part["tokens"]),
            f"{part['rss_bytes'] / 2**20:.1f}",
            f"{_speed(part, 'wall_s'):.1f}",
            f"{_speed(part, 'cpu_s'):.1f}",
        )
    console.print(table)
    console.print(
        f"perplexity of the last {options['tail']} tokens but {options['skip']}: "
        f"{results['perplexity']:.3f}, of a fresh run {results['fresh_perplexity']:.3f}, "
        f"ratio {results['perplexity_ratio']:.4f} (+-{results['difference_error']:.4f})"
    )
    console.print(
        f"last tenth / second tenth: memory {results['rss_ratio']:.4f}, "
        f"speed {results['speed_ratio']:.3f} (of CPU time {results['cpu_speed_ratio']:.3f})"
    )
    console.print(describe(results["machine"]))


def _plot(path: Path, nll: np.ndarray, parts: list[dict]) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        note("no plot: matplotlib is not installed")
        return
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    n = max(len(nll) // 100, 1)
    mean = nll[: len(nll) // n * n].reshape(-1, n).mean(axis=1)
    top.plot(n * np.arange(1, len(mean) + 1), np.exp(mean))
    top.set_ylabel(f"perplexity of {n} tokens")
    at = np.cumsum([part["tokens"] for part in parts])
    bottom.plot(at, [part["rss_bytes"] / 2**20 for part in parts], marker="o")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("resident MiB")
    bottom.set_xlabel("tokens")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
