"""Measure the time of a token with recall for several lengths of the archive; compare with a full cache.

    python -m lab.benchmarks.archive FILE --sizes 8192,32768,131072 -t 1

The time depends only on the number of tokens. Therefore the program reads only 1,200 tokens of the text, and
repeats the resulting archive (or full cache) up to the requested size. As in a stream, all archived tokens
except the newest 4,096 are clustered.

Policies and the full cache take turns, token by token, so that other programs slow them down equally. CPU
time is measured. No eviction is measured, because the number of timed tokens is smaller than the distance
between two evictions.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.engine import loop, snapshot
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.llama.segment import CLUSTERS
from lab.benchmarks.common import (
    add_common,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    write_json,
)

N_READ = 1200

N_STEP = 12
"""Number of timed tokens. It is smaller than the distance between two evictions."""

N_NEAR = 4096

N_FRAME = 6000
"""Number of positions before the numbering starts again at 0."""


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--sizes", default="8192,32768", help="tokens of the archive and of the full cache")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument(
        "--policies",
        default="streamingllm recall recall:exact=512",
        help="each with its options, such as recall:exact=512",
    )
    args = parser.parse_args()
    model = load_model(args.model)
    tokens = load_tokens(model, args.file, N_READ + N_STEP)
    # allow a full cache beyond the trained context: only its speed matters here
    loop.check = lambda *_: None
    rows = []
    for size in map(int, args.sizes.split(",")):
        engines = {name: _recalling(model, name, tokens, size, args) for name in args.policies.split()}
        for flash in ("off", "on"):
            engines[f"full, flash {flash}"] = _full(model, tokens, size, flash, args)
        times = _in_turn(engines, tokens)
        best = min(times[name] for name in times if name.startswith("full"))
        rows += [
            {"size": size, "what": name, "ms": 1e3 * seconds, "times_as_fast": best / seconds}
            for name, seconds in times.items()
        ]
        note(f"{size:,} tokens done")
    table = Table(*("tokens", "what", "ms a token", "times as fast as full"))
    for row in rows:
        table.add_row(f"{row['size']:,}", row["what"], f"{row['ms']:.1f}", f"{row['times_as_fast']:.2f}")
    Console().print(table)
    note(describe(machine()))
    write_json(args.json, {"machine": machine(), "rows": rows})


def _in_turn(engines: dict[str, loop.Engine], tokens: np.ndarray) -> dict[str, float]:
    """Return the median CPU seconds per token of each engine. Close the engines."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(N_READ, N_READ + N_STEP):
        for name, engine in engines.items():
            start = time.process_time()
            engine.step(tokens[i : i + 1])
            times[name].append(time.process_time() - start)
    for engine in engines.values():
        engine.close()
    # leave out the first two tokens, which touch newly allocated memory
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def _saved(
    engine: loop.Engine, tokens: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[tuple[str, str], int]]:
    """Read the text. Return the arrays that the engine saves, and its counters. Close the engine."""
    engine.read(tokens[:N_READ])
    arrays = {name: np.array(values) for name, values in engine.save()}
    engine.close()
    return arrays, dict(zip(snapshot._COUNTERS, arrays["engine"].tolist(), strict=True))


def _put(
    engine: loop.Engine, arrays: dict[str, np.ndarray], counters: dict[tuple[str, str], int]
) -> loop.Engine:
    # `Engine.restore` would refuse a full cache that is longer than the trained context
    snapshot._put(engine.cache, arrays, counters)
    return engine


def _repeated(values: np.ndarray, n_own: int, n: int) -> np.ndarray:
    """Return u8, the bytes of n tokens, which repeat the n_own tokens of `values`."""
    rows = values.reshape(-1).view(np.uint8).reshape(n_own, -1)
    return np.concatenate([rows] * -(-n // n_own))[:n].reshape(-1)


def _recalling(model: Model, spec: str, tokens: np.ndarray, size: int, args) -> loop.Engine:
    name, *options = spec.split(":")
    policy = policies.fit(name, args.budget, None, options)
    settings = Settings(n_threads=args.threads, n_ctx=None)
    arrays, counters = _saved(loop.Engine(model, policy, settings), tokens)
    if "archive" in arrays:
        begin, end = arrays["archive"][:2].tolist()
        more = size - (end - begin)
        # leave out the saved clusters: `Engine.restore` then clusters the repeated tokens
        arrays = {key: values for key, values in arrays.items() if not key.startswith(CLUSTERS)}
        for key in [key for key in arrays if key.startswith("archive.")]:
            arrays[key] = _repeated(arrays[key], end - begin, size)
        arrays["pos"] = np.where(arrays["pos"] < begin, arrays["pos"], arrays["pos"] + more).astype(np.int32)
        for counter in (("rows", "n_past"), ("cache", "n_planned"), ("signals", "since")):
            counters[counter] += more
        base = counters["rows", "n_past"] - counters["rows", "next_rot"]
        far = max(begin, counters["rows", "n_past"] - N_NEAR)
        # let positions start again every N_FRAME tokens, as in a long stream
        bases = range(base, 0, -N_FRAME)[::-1]
        frames = [number for start in bases for number in (max(begin, start), start)]
        frames[0] = begin
        arrays["archive"] = np.array([begin, end + more, far, *frames], np.int64)
    return _put(loop.Engine(model, policy, settings), arrays, counters)


def _full(model: Model, tokens: np.ndarray, size: int, flash: str, args) -> loop.Engine:
    def engine(n_cell: int) -> loop.Engine:
        policy = policies.fit("full", n_cell, None, [])
        return loop.Engine(model, policy, Settings(n_threads=args.threads, flash=flash, n_ctx=n_cell))

    arrays, counters = _saved(engine(N_READ + N_STEP), tokens)
    longer = engine(size + N_STEP)
    n_row = len(arrays["pos"])
    arrays["pos"] = arrays["rot"] = np.tile(np.arange(size, dtype=np.int32), (n_row, 1))
    arrays["live"] = np.full_like(arrays["live"], size)
    arrays["layer_cells"] = np.full_like(arrays["layer_cells"], longer.n_cell)
    for key in [key for key in arrays if key.startswith("cells.")]:
        halves = np.split(arrays[key].reshape(-1).view(np.uint8), 2)
        arrays[key] = np.concatenate([_repeated(half, N_READ, size) for half in halves])
    for counter in ("n_kv", "n_past", "next_rot"):
        counters["rows", counter] = size
    return _put(longer, arrays, counters)


if __name__ == "__main__":
    main()
