"""Measure the time of one plan of every policy, with made-up attention and keys and without a model.

    python -m lab.benchmarks.selection --rows 256 --cells 1024 --evict 64 --dim 128

A full cache evicts, grows by as many tokens, and evicts again. The time is the time of the engine's calls
`observe`, `plan` and `move` on one thread. It does not include reading signals and editing the cache.

The last columns are for two shapes: SmolLM2-135M with 512 cells, and an 8B model (32 layers with 8 KV heads
of 128 dimensions) with 1,024 cells. They show three numbers: the time per generated token if an eviction
comes every 16 tokens, the bytes of the policy's state, and the ratio of these bytes to the bytes of an f16
cache. `name:option=value:...` is a policy with options. `full`, which never evicts, is left out, and so are
policies whose rows may keep different numbers of cells.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from kvtool import policies
from kvtool.policy import PER_CELL, Policy, Signal, View
from lab.benchmarks.common import CLOCKS, console, describe, machine, make_parser, note, spread, write_json

N_WARM = 2
"""Number of evictions before the first eviction that is timed."""


@dataclass(frozen=True)
class Shape:
    """The size of a cache.

    Attributes
    ----------
    name
        Name of the model.
    rows
        Number of (layer, KV head) pairs.
    n_head
        Number of KV heads of a layer.
    cells
        The budget: number of cells of a row.
    evict
        Number of tokens from one eviction to the next.
    dim
        Dimension of a key.
    """

    name: str
    rows: int
    n_head: int
    cells: int
    evict: int
    dim: int

    @property
    def cache_bytes(self) -> int:
        """Size of keys and values in f16, in bytes."""
        return 2 * 2 * self.rows * self.cells * self.dim


MODELS = [
    Shape("SmolLM2-135M", rows=90, n_head=3, cells=512, evict=16, dim=64),
    Shape("8B", rows=256, n_head=8, cells=1024, evict=16, dim=128),
]


class Cache:
    """A cache of made-up tokens: keys lie around a few centres, and few tokens get attention."""

    def __init__(self, policy: Policy, shape: Shape, clock: str) -> None:
        self.policy, self.shape = policy, shape
        self.now = CLOCKS[clock]
        self.rng = np.random.default_rng(0)
        self.centers = self.rng.standard_normal((64, shape.dim), np.float32)
        self.layer = np.arange(shape.rows, dtype=np.int32) // np.int32(shape.n_head)
        self.pos = np.zeros((shape.rows, shape.cells), np.int32)
        self.state = policy.start(shape.rows, shape.cells, shape.dim)
        self.n_kv = self.next = 0

    def step(self) -> dict[str, float]:
        """Grow to the budget and evict once. Return the seconds of each call, and the number evicted."""
        view = self._grow()
        start = self.now()
        self.policy.observe(view, self.state)
        observed = self.now()
        plan = self.policy.plan(view, self.state)
        planned = self.now()
        source = _source(plan.keep)
        moving = self.now()
        self.policy.move(self.state, source)
        moved = self.now()
        self.n_kv = source.shape[1]
        self.pos[:, : self.n_kv] = np.take_along_axis(self.pos, source, axis=1)
        for array in self.state:
            array[:, self.n_kv :] = 0
        seconds = {"observe": observed - start, "plan": planned - observed, "move": moved - moving}
        return {**seconds, "all": sum(seconds.values()), "evicted": self.shape.cells - self.n_kv}

    def _grow(self) -> View:
        n_new = self.shape.cells - self.n_kv
        self.pos[:, self.n_kv :] = np.arange(self.next, self.next + n_new)
        self.next += n_new
        shape = self.pos.shape
        attention = self.rng.pareto(1, shape).astype(np.float32)
        attention *= n_new / attention.sum(axis=1, keepdims=True)
        made_up = {
            Signal.SQUARES: attention**2 / n_new,
            Signal.HITS: np.minimum(np.floor(attention), n_new),
            Signal.IMPORTANT: np.where(attention > 1, np.int32(self.next), np.int32(0)),
        }
        signals = {
            name: made_up.get(signal, attention)
            for signal, name in PER_CELL.items()
            if signal in self.policy.reads
        }
        if Signal.KEYS in self.policy.reads:
            chosen = self.rng.integers(len(self.centers), size=(shape[0], n_new))
            signals["keys"] = self.rng.standard_normal((*chosen.shape, self.shape.dim), np.float32)
            signals["keys"] += self.centers[chosen]
        if Signal.FUTURE in self.policy.reads:
            of_future = shape[0], 3, shape[1]
            signals["future_mean"] = self.rng.standard_normal(of_future, np.float32)
            signals["future_variance"] = self.rng.standard_normal(of_future, np.float32) ** 2
        if Signal.VALUE_NORMS in self.policy.reads:
            signals["value_norms"] = self.rng.standard_normal(shape, np.float32) ** 2
        if self.policy.reads & (Signal.HITS | Signal.FUTURE):
            signals["n_head"] = np.full(shape[0], 3, np.int32)
        return View(self.pos.copy(), self.layer, self.next, **signals)


def _source(keep: np.ndarray) -> np.ndarray:
    """Return i64[row, n_keep]: the index, before the eviction, of each cell after the eviction.

    As in the engine, kept cells from n_keep on move to the places of evicted cells.
    """
    n_keep = int(keep[0].sum())
    source = np.tile(np.arange(n_keep), (len(keep), 1))
    row, hole = np.nonzero(~keep[:, :n_keep])
    source[row, hole] = n_keep + np.nonzero(keep[:, n_keep:])[1]
    return source


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cells", type=int, default=1024)
    parser.add_argument("--evict", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--policies", default=",".join(policies.names()), help="names, separated by commas")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu, if other programs are running")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()

    typed = Shape("asked", args.rows, min(8, args.rows), args.cells, args.evict, args.dim)
    # refuse wrong names and options before the work starts
    chosen = {
        spec: [(shape, _fit(spec, shape)) for shape in (typed, *MODELS)] for spec in args.policies.split(",")
    }
    results = {"machine": machine(), "options": {**vars(args), "json": None}, "policies": []}
    for spec, fitted in chosen.items():
        if any(not policy.evicts or policy.ragged for _, policy in fitted):
            continue
        note(spec)
        measured = {shape.name: _measure(policy, shape, args) for shape, policy in fitted}
        results["policies"].append({"policy": spec, **measured})
    write_json(args.json, results)
    _print(args, results)


def _fit(spec: str, shape: Shape) -> Policy:
    name, *options = spec.split(":")
    return policies.fit(name, shape.cells, shape.evict, options)


def _measure(policy: Policy, shape: Shape, args) -> dict[str, object]:
    cache = Cache(policy, shape, args.clock)
    for _ in range(N_WARM):
        cache.step()
    steps = [cache.step() for _ in range(args.repeat)]
    ms = {name: spread([1e3 * step[name] for step in steps]) for name in ("observe", "plan", "move", "all")}
    state_bytes = sum(array.nbytes for array in cache.state)
    return {
        "ms": ms,
        "ms_token": statistics.median(1e3 * step["all"] / step["evicted"] for step in steps),
        "evicted": statistics.median(step["evicted"] for step in steps),
        "state_bytes": state_bytes,
        "state_share": state_bytes / shape.cache_bytes,
    }


def _print(args, results: dict) -> None:
    title = f"one eviction of {args.evict} of {args.cells} cells in {args.rows} rows, keys of {args.dim}"
    table = Table(title=title)
    table.add_column("policy")
    columns = ["evicted", "observe ms", "plan ms", "move ms", "state MiB"]
    for shape in MODELS:
        columns += [f"{shape.name}: ms a token", "state MiB", "of K and V"]
    for column in columns:
        table.add_column(column, justify="right")
    for policy in results["policies"]:
        typed = policy["asked"]
        row = [f"{typed['evicted']:.0f}"]
        row += [f"{typed['ms'][name]['median']:.1f}" for name in ("observe", "plan", "move")]
        row.append(f"{typed['state_bytes'] / 2**20:.1f}")
        for shape in MODELS:
            numbers = policy[shape.name]
            row += [f"{numbers['ms_token']:.2f}", f"{numbers['state_bytes'] / 2**20:.1f}"]
            row.append(f"{numbers['state_share']:.1%}")
        table.add_row(policy["policy"], *row)
    out = console(200)
    out.print(table)
    out.print(f"medians of {args.repeat}, {args.clock} clock")
    out.print(describe(results["machine"]))


if __name__ == "__main__":
    main()
