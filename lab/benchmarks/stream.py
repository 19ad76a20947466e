"""Does an endless stream keep its quality, its memory and its speed?

    python -m lab.benchmarks.stream FILE --policy h2o --budget 512 --tokens 200000 --plot stream.png

The program streams the text through one engine and scores every token. A second, fresh engine reads the same
tokens, but its cache is emptied at the start of each segment of `--segment` tokens. The two engines take
turns, batch by batch, so that other programs slow down both of them. The fresh engine runs in a separate
process, so that its memory is not measured.

The first `--skip` tokens of a segment are left out of both perplexities, because the fresh engine's cache is
not full yet. With `--from`, the last table and the plot also show earlier measurements (JSON files). Without
FILE, they show only the earlier measurements.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.table import Table

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity
from kvtool.system import memory
from lab.benchmarks.common import (
    add_common,
    console,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    write_json,
)


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser, needs_file=False)
    parser.add_argument("--policy", default="buzz")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--evict-every", type=int)
    parser.add_argument(
        "-o", "--option", action="append", default=[], help="a parameter of the policy, name=value"
    )
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument("--flash", default="auto", choices=("auto", "off", "on"))
    parser.add_argument("--tokens", type=int, default=50000)
    parser.add_argument("--segment", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=1024)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw a picture; needs matplotlib")
    parser.add_argument(
        "--from", dest="others", type=Path, nargs="*", default=[], help="JSON files of earlier measurements"
    )
    args = parser.parse_args()
    if not args.skip < args.segment <= args.tokens // 2:
        parser.error("--skip must be below --segment, and two segments must be in --tokens")
    if not (args.file or args.others):
        parser.error("a FILE is needed, or --from")

    several = [json.loads(path.read_text()) for path in args.others]
    if args.file:
        several.append(_run(args))
        write_json(args.json, several[-1])
        _print(several[-1])
    _summary(several)
    if args.plot:
        _plot(args.plot, several)


def _run(args) -> dict[str, object]:
    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens // args.segment * args.segment)
    options = ("policy", "budget", "evict_every", "option", "positions", "flash")
    return {
        "machine": machine(),
        "model": model.path.name,
        "options": {name: getattr(args, name) for name in (*options, "tokens", "segment", "skip", "threads")},
        "segments": _segments(model, tokens, args),
    }


def _engine(model: Model, args) -> Engine:
    policy = policies.fit(args.policy, args.budget, args.evict_every, args.option)
    # n_output equals n_batch, because every token of a batch is scored
    settings = Settings(
        positions=args.positions, n_batch=256, n_output=256, flash=args.flash, n_threads=args.threads
    )
    return Engine(model, policy, settings)


def _segments(model: Model, tokens: np.ndarray, args) -> list[dict[str, float]]:
    """Return for each segment: nll, fresh_nll, the error of their difference, speeds and resident memory."""
    engine = _engine(model, args)
    stream, timed, segments = perplexity.steps(engine, tokens), Counter(), []
    # nll[i] belongs to token i of the segment; the first token of the text has no nll
    nll = np.full(1, np.nan)
    with _fresh_process(args) as pipe:
        for start in range(0, len(tokens), args.segment):
            timed.clear()
            pipe.send(tokens[start : start + args.segment])
            fresh = np.full(1, np.nan)
            while len(nll) < args.segment:
                nll = np.append(nll, next(_timed(stream, timed, "")))
                while len(fresh) < min(len(nll), args.segment):
                    pipe.send(None)
                    scores, fresh_timed = pipe.recv()
                    fresh = np.append(fresh, scores)
            streamed, restarted = (scores[args.skip : args.segment] for scores in (nll, fresh))
            nll = nll[args.segment :]
            difference = streamed - restarted
            segments.append(
                {
                    "start": start,
                    "nll": float(streamed.mean()),
                    "fresh_nll": float(restarted.mean()),
                    # this is the standard error if tokens are independent
                    "error": float(difference.std() / math.sqrt(len(difference))),
                    "rss_bytes": memory.rss_bytes() or memory.peak_rss_bytes(),
                    "cache_bytes": engine.cache_bytes,
                    **timed,
                    **fresh_timed,
                }
            )
            last = segments[-1]
            note(
                f"{start + args.segment} tokens, ratio {_ratio(last):.4f}, "
                f"{_speed(last, 'wall_s'):.0f} a second"
            )
    engine.close()
    return segments


@contextmanager
def _fresh_process(args) -> Iterator[Connection]:
    """Yield a connection to `_fresh`, which runs in a new process that inherits nothing."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=_fresh, args=(end, args), daemon=True)
    process.start()
    # close this process's copy, so that `recv` raises EOFError if the new process dies
    end.close()
    try:
        yield pipe
    finally:
        pipe.close()
        process.join()


def _fresh(pipe: Connection, args) -> None:
    """Score segments of the text, each from an empty cache.

    The pipe brings the tokens of a segment, and then a None for each batch. For a None, decode the next batch
    and send its scores.
    """
    engine = _engine(load_model(args.model), args)
    with suppress(EOFError):
        while True:
            tokens, timed = pipe.recv(), Counter()
            engine.reset()
            steps = _timed(perplexity.steps(engine, tokens), timed, "fresh_")
            n_scored = 1
            while n_scored < len(tokens):
                pipe.recv()
                scores = next(steps)
                n_scored += len(scores)
                pipe.send((scores, dict(timed)))
    engine.close()


def _timed(steps: Iterator[np.ndarray], total: Counter, name: str) -> Iterator[np.ndarray]:
    """Yield the batches, and add their seconds and tokens to `total`."""
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        scores = next(steps, None)
        if scores is None:
            return
        total[f"{name}wall_s"] += time.perf_counter() - wall
        total[f"{name}cpu_s"] += time.process_time() - cpu
        total[f"{name}tokens"] += len(scores)
        yield scores


def _ratio(segment: dict) -> float:
    """Return the stream's perplexity divided by the fresh engine's perplexity."""
    return math.exp(segment["nll"] - segment["fresh_nll"])


def _speed(segment: dict, clock: str, who: str = "") -> float:
    return segment[f"{who}tokens"] / segment[f"{who}{clock}"]


def _speed_over_fresh(segment: dict) -> float:
    """Return the stream's speed divided by the fresh engine's speed, by CPU time."""
    return _speed(segment, "cpu_s") / _speed(segment, "cpu_s", "fresh_")


def _print(results: dict) -> None:
    options = results["options"]
    title = f"{options['policy']}, budget {options['budget']}, positions {options['positions']}"
    table = Table(title=title)
    for column in (
        "from",
        "perplexity",
        "fresh",
        "ratio",
        "resident MiB",
        "tokens/s",
        "of CPU time",
        "over fresh",
    ):
        table.add_column(column, justify="right")
    for segment in results["segments"]:
        table.add_row(
            f"{segment['start']:,}",
            f"{math.exp(segment['nll']):.2f}",
            f"{math.exp(segment['fresh_nll']):.2f}",
            f"{_ratio(segment):.4f} +-{segment['error']:.4f}",
            f"{segment['rss_bytes'] / 2**20:.2f}",
            f"{_speed(segment, 'wall_s'):.1f}",
            f"{_speed(segment, 'cpu_s'):.1f}",
            f"{_speed_over_fresh(segment):.3f}",
        )
    console().print(table)
    console().print(describe(results["machine"]))


def _summary(several: list[dict]) -> None:
    """Print one line per measurement: ranges over its segments, and growth of memory in the last 3/4."""
    table = Table(title="over a fresh start at the same place, segment by segment")
    for column in ("", "tokens", "perplexity", "mean", "speed", "resident MiB", "more in the last 3/4"):
        table.add_column(column, justify="right")
    for results in several:
        segments = results["segments"]
        ratios = [_ratio(one) for one in segments]
        speeds = [_speed_over_fresh(one) for one in segments]
        rss = [one["rss_bytes"] / 2**20 for one in segments]
        table.add_row(
            _label(results),
            f"{segments[-1]['start'] + results['options']['segment']:,}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            f"{math.prod(ratios) ** (1 / len(ratios)):.3f}",
            f"{min(speeds):.3f} to {max(speeds):.3f}",
            f"{rss[-1]:.1f}",
            f"{rss[-1] - rss[len(rss) // 4 - 1]:.2f}",
        )
    console().print(table)


def _label(results: dict) -> str:
    return " ".join([results["options"]["policy"], *results["options"]["option"]])


def _plot(path: Path, several: list[dict]) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        note("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(8, 9), layout="constrained")
    for results in several:
        segments, options = results["segments"], results["options"]
        label = _label(results)
        at = [one["start"] + options["segment"] for one in segments]
        axes[0].plot(at, [_ratio(one) for one in segments], marker=".", label=label)
        axes[1].plot(at, [one["rss_bytes"] / 2**20 for one in segments], marker=".", label=label)
        axes[2].plot(at, [_speed_over_fresh(one) for one in segments], marker=".", label=label)
    for axis, name in zip(
        axes, ("perplexity over a fresh start's", "resident MiB", "speed over a fresh start's"), strict=True
    ):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0].axhspan(0.97, 1.03, alpha=0.1)
    axes[1].set_ylim(bottom=0)
    axes[2].set_ylim(0, 1.5)
    axes[0].legend()
    axes[-1].set_xlabel(f"tokens streamed ({several[0]['model']}, {several[0]['options']['budget']} cells)")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
