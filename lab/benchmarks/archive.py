"""Measure the time of a token with recall for several lengths of the archive; compare with a full cache.

    python -m lab.benchmarks.archive FILE --sizes 8192,32768,131072 -t 1

The time depends only on the number of tokens. Therefore the program reads only a few tokens of the text, and
repeats the resulting archive (or full cache) up to the requested size (see kvtool/measure/depths.py). As in a
stream, only the newest archived tokens, half of the trained context, are not clustered.

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
from kvtool.engine import loop
from kvtool.engine.settings import Settings
from kvtool.llama.cache.segment import TABLE
from kvtool.llama.loaded.model import Model
from kvtool.measure import depths
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
        engines = {name: _evicting(model, name, tokens, size, args) for name in args.policies.split()}
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


def _evicting(model: Model, spec: str, tokens: np.ndarray, size: int, args) -> loop.Engine:
    """Return an engine with `size` tokens in its archive, if the policy recalls."""
    name, *options = spec.split(":")
    policy = policies.fit(name, args.budget, None, options)
    settings = Settings(archive_type="q8_0", n_threads=args.threads)
    saved = depths.start(model, policy, settings, tokens[:N_READ], lambda: False)
    if TABLE in saved:
        begin, end = saved[TABLE][:2].tolist()
        saved = depths.lengthened(saved, size - (end - begin), model.n_ctx_train)
    engine = loop.Engine(model, policy, settings)
    engine.restore(saved)
    return engine


def _full(model: Model, tokens: np.ndarray, size: int, flash: str, args) -> loop.Engine:
    """Return an engine with `size` tokens in a full cache."""
    policy = policies.fit("full", size + N_STEP)
    engine = loop.Engine(model, policy, Settings(n_threads=args.threads, flash=flash))
    depths.fill(engine, tokens, size)
    return engine


if __name__ == "__main__":
    main()
