"""Does an endless stream keep its quality, its memory and its speed?

    python benchmarks/stream.py FILE --policy buzz --budget 512 --tokens 50000

Streams the text through one engine and scores every token. The perplexity of the last `--tail` tokens is
compared with that of a run that starts afresh at that place; the first `--skip` of them are left out of both,
so that the fresh run has its cache full. With positions `auto` the long stream starts its positions over now
and then and a short fresh run does not; `--fresh-positions in-cache` is another measure. Resident
memory and speed are those of each tenth of the stream. What else slows the machine shows in the tenths'
speeds; so the fresh run takes its steps in turn with the stream's, and both have the last tenth in common.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
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
    if args.tail * N_PART < args.tokens:
        parser.error(f"--tail must be the last tenth of --tokens or more: {args.tokens // N_PART}")

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens)
    policy = policies.fit(args.policy, args.budget, args.evict_every, args.option)
    nll, fresh, parts = _stream(model, policy, tokens, args)
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


def _stream(model: Model, policy: Policy, tokens: np.ndarray, args) -> tuple:
    """(nll, fresh, parts): the nll of every token but the first, of the stream and of the fresh run.

    parts: for each tenth of the stream its tokens, seconds and resident memory; in the last one also the
    seconds and tokens of the fresh run.
    """
    engine = _engine(model, policy, args.positions, args)
    # made and used now, so that its memory is in all tenths alike
    other = _engine(model, policy, args.fresh_positions or args.positions, args)
    perplexity.stream(other, tokens[: 4 * args.budget])
    other.reset()
    own = perplexity.steps(other, tokens[-args.tail :])
    nll, fresh, parts = [], [], []
    part, done = Counter(), 0
    n_scored = len(tokens) - 1
    for scores in _timed(perplexity.steps(engine, tokens), part, ""):
        nll.append(scores)
        done += len(scores)
        # the fresh run stays a step behind at most
        while done - sum(map(len, fresh)) > n_scored - args.tail + 1 + len(scores):
            fresh.append(next(_timed(own, part, "fresh_")))
        if done >= n_scored * (len(parts) + 1) // N_PART:
            parts.append({**part, "rss_bytes": memory.rss_bytes() or memory.peak_rss_bytes()})
            note(f"{done} tokens, {_speed(parts[-1], 'wall_s'):.0f} a second")
            part.clear()
    fresh += own
    engine.close()
    other.close()
    return np.concatenate(nll), np.concatenate(fresh), parts


def _timed(steps: Iterator[np.ndarray], part: Counter, name: str) -> Iterator[np.ndarray]:
    """The steps; their seconds and tokens are added to `part`."""
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        scores = next(steps, None)
        if scores is None:
            return
        part[f"{name}wall_s"] += time.perf_counter() - wall
        part[f"{name}cpu_s"] += time.process_time() - cpu
        part[f"{name}tokens"] += len(scores)
        yield scores


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
        "speed_over_fresh": _speed(last, "wall_s") / _speed(last, "fresh_wall_s", "fresh_tokens"),
        "cpu_speed_over_fresh": _speed(last, "cpu_s") / _speed(last, "fresh_cpu_s", "fresh_tokens"),
        "tenths": parts,
    }


def _speed(part: dict, clock: str, tokens: str = "tokens") -> float:
    return part[tokens] / part[clock]


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
        f"speed {results['speed_ratio']:.3f} (of CPU time {results['cpu_speed_ratio']:.3f}); "
        f"/ fresh run, in turns: speed {results['speed_over_fresh']:.3f} "
        f"(of CPU time {results['cpu_speed_over_fresh']:.3f})"
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
