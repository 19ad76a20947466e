"""Compare WeightedKV with its evicting variant and with other merges, token by token.

    python -m lab.papers.merging wiki.test.raw --budget 256 --nll runs

Every variant streams the first `--max-tokens` tokens of the text and evicts by average attention. A variant
decides what happens to the value of an evicted token. Only tokens from number `--budget` on are scored. The
table has four numbers for each variant: the mean nll, the mean difference from `evict` (its standard error
comes from blocks of 64 tokens), the share of tokens whose nll is lower than with `evict`, and a median weight
(column "own share"). The cached value of a token is a weighted sum of its original value and the values of
victims. The median is over the weights that the original values have at the end of the text, in the tokens
between sinks and window. A variant that already has a result in the folder of --nll is not measured again.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.kernels.kernel import kernel
from kvtool.kernels.selection import keep_highest
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity
from kvtool.models.resolve import resolve
from kvtool.policies.weightedkv import WeightedKV
from kvtool.policy import Merge, Plan, State, View, protected
from lab.benchmarks.common import add_common, describe, load_tokens, machine, make_parser, note
from lab.papers.ungroup import ungroup

BLOCK = 64


@dataclass(frozen=True, slots=True)
class Variant(WeightedKV):
    """WeightedKV with another way to merge the victim (the evicted token) into a neighbour.

    Attributes
    ----------
    left
        True if the neighbour is the live token before the victim. False for the live token after it. No
        victim is merged into a sink.
    scale
        Factor that multiplies the victim's share in the merged value.
    counts
        True if a merged value counts more in later merges: with its own weight plus the weights of all its
        victims.
    together
        Number of rows that evict the same tokens. These rows choose the tokens by the sum of their average
        attention, but each row merges by its own average.
    """

    left: bool = False
    scale: float = 1
    counts: bool = False
    together: int = 1

    paper: ClassVar[str] = ""

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return the state, three arrays f32[row, cell].

        The arrays have, for each token, the sum of its attention, the weight of the victims that were merged
        into it, and 1 minus the weight of its original value in the cached value.
        """
        return tuple(np.zeros((n_row, n_cell), np.float32) for _ in range(3))

    def observe(self, view: View, state: State) -> None:
        state[0][:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        average = state[0][:, : view.n_kv] / (view.next - view.pos).astype(np.float32)
        n_keep = self.budget - self.slack
        keep = np.empty(view.pos.shape, np.bool_)
        first, recent = protected(view, n_keep, self.sinks, self.window)
        order = np.argsort(view.pos, axis=1)
        decides = average if self.together == 1 else self._summed(average, order)
        keep_highest(view.pos, decides, first, recent, n_keep, keep)
        if not self.merge:
            return Plan(keep)
        place = np.nonzero(~np.take_along_axis(keep, order, axis=1))[1].reshape(len(keep), -1)
        scores = np.take_along_axis(np.take_along_axis(decides, order, axis=1), place, axis=1)
        victims = np.take_along_axis(place, scores.argsort(axis=1, kind="stable"), axis=1)
        terms = [np.empty(place.size * 2, kind) for kind in (np.int32, np.int32, np.int32, np.float32)]
        tokens = (view.pos, order, average, keep, victims, first)
        n = _merge(*tokens, self.left, self.scale, self.counts, *state[1:], *terms)
        return Plan(keep, Merge(*(term[:n] for term in terms)))

    def _summed(self, average: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return the average attention, summed over rows that evict together and hold the same tokens."""
        by_age = np.take_along_axis(average, order, axis=1)
        total = by_age.reshape(-1, self.together, by_age.shape[1]).sum(axis=1)
        summed = np.empty_like(average)
        np.put_along_axis(summed, order, np.repeat(total, self.together, axis=0), axis=1)
        return summed


@kernel(
    "i8(i4[:,::1], i8[:,::1], f4[:,::1], b1[:,::1], i8[:,::1], i8, b1, f8, b1, "
    "f4[:,::1], f4[:,::1], i4[::1], i4[::1], i4[::1], f4[::1])"
)
def _merge(
    pos, order, average, keep, victims, first, left, scale, counts,
    extra, lost, row_of, dst_of, src_of, weight_of,
):  # fmt: skip
    """Write the terms of all rows' merges (row, target cell, source cell, weight). Return their number.

    victims: i8[row, victim], the tokens that each row evicts, in the order of eviction. A token is given as
    its index among the row's tokens, sorted by position.
    """
    n_row, n = order.shape
    n_evict = victims.shape[1]
    older, newer = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    target, give = np.empty(n_evict, np.int64), np.empty(n_evict)
    weight, home = np.empty(n + 1), np.empty(n + 1, np.int64)
    taken = np.empty(n)
    n_term = 0
    for row in range(n_row):
        for place in range(n + 1):
            older[place], newer[place] = place - 1, place + 1
            weight[place], home[place] = 1, place
        for cell in range(n):
            taken[cell] = 0
        for i in range(n_evict):
            gone = victims[row, i]
            before, after = older[gone], newer[gone]
            older[after] = before
            if before >= 0:
                newer[before] = after
            to = before if left else after
            a, b = order[row, gone], order[row, to]
            p, q = np.float64(average[row, a] + extra[row, a]), np.float64(average[row, b] + extra[row, b])
            is_sink = pos[row, b] < first
            target[i] = to
            give[i] = 0 if is_sink else scale * (p / (p + q) if p + q > 0 else 0.5)
            if counts and not is_sink:
                extra[row, b] += np.float32(p)
        for i in range(n_evict - 1, -1, -1):
            gone, to = victims[row, i], target[i]
            home[gone] = home[to]
            weight[gone] = weight[to] * give[i]
            weight[to] *= 1 - give[i]
        for i in range(n_evict):
            taken[home[victims[row, i]]] += weight[victims[row, i]]
        # the victims of a kept token lie between it and the nearest kept tokens on both sides
        for place in range(n):
            if taken[place] == 0:
                continue
            dst = order[row, place]
            lost[row, dst] = 1 - (1 - lost[row, dst]) * weight[place] / (weight[place] + taken[place])
            begin, end = place, place + 1
            while begin > 0 and not keep[row, order[row, begin - 1]]:
                begin -= 1
            while end < n and not keep[row, order[row, end]]:
                end += 1
            for source in range(begin, end):
                value = weight[source] if home[source] == place else 0.0
                if value != 0:
                    row_of[n_term], dst_of[n_term], src_of[n_term] = row, dst, order[row, source]
                    weight_of[n_term] = value
                    n_term += 1
    return n_term


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "evict": ("evicted with its key", {"merge": False}),
    "paper": ("Algorithm 1", {}),
    "left": ("into the left neighbour", {"left": True}),
    "half": ("half of the victim's share", {"scale": 0.5}),
    "tenth": ("a tenth of the victim's share", {"scale": 0.1}),
    "weight": ("the merged value's weight counts its victims", {"counts": True}),
    "shared-evict": ("with --ungroup: three heads evict together", {"merge": False, "together": 3}),
    "shared": ("the same, each merging by its own averages", {"together": 3}),
}


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--evict-every", type=int, default=16)
    parser.add_argument("--window", type=int, help="default: weightedkv's")
    parser.add_argument("--positions", default="auto", choices=("auto", "original", "in-cache"))
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="separated by commas; default: %(default)s"
    )
    parser.add_argument("--ungroup", action="store_true", help="give every query head its own KV head")
    parser.add_argument("--nll", type=Path, metavar="FOLDER", help="keep results in this folder")
    args = parser.parse_args()

    names = ["evict", *(name for name in args.variants.split(",") if name != "evict")]
    with tempfile.TemporaryDirectory() as folder:
        path = resolve(args.model)
        if args.ungroup:
            ungroup(path, path := Path(folder) / "ungrouped.gguf")
        model = Model(path)
        tokens = load_tokens(model, args.file, args.max_tokens)
        runs = {name: _run(args, model, tokens, name) for name in names}
    print("| variant | an evicted value is | nll | against evict | better for | own share |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    base = runs["evict"][0][args.budget - 1 :]
    for name, (nll, own_share) in runs.items():
        scored = nll[args.budget - 1 :]
        against = " | " if name == "evict" else paired(scored - base)
        print(f"| `{name}` | {VARIANTS[name][0]} | {scored.mean():.4f} | {against} | {own_share:.2f} |")
    note(describe(machine()))


def paired(difference: np.ndarray) -> str:
    """Format three numbers of f64[n]: the mean, its standard error, and the share of values below 0.

    The error is computed from blocks, because neighbouring values depend on each other.
    """
    n = len(difference) // BLOCK
    error = difference[: n * BLOCK].reshape(n, BLOCK).mean(axis=1).std(ddof=1) / n**0.5
    return f"{difference.mean():+.4f} +- {error:.4f} | {(difference < 0).mean():.0%}"


def _run(args, model: Model, tokens: np.ndarray, name: str) -> tuple[np.ndarray, float]:
    """Return the nll f64[n - 1], and the number in the column "own share"."""
    path = None
    if args.nll:
        args.nll.mkdir(parents=True, exist_ok=True)
        parts = (
            Path(args.model or "default").stem,
            "ungrouped" if args.ungroup else "grouped",
            args.file.stem,
        )
        parts += (args.max_tokens, args.budget, args.evict_every, args.window or "half", args.positions, name)
        path = args.nll / ("-".join(map(str, parts)) + ".npz")
        if path.exists():
            stored = np.load(path)
            return stored["nll"], float(stored["own"])
    window = {} if args.window is None else {"window": args.window}
    policy = Variant.fit(args.budget, args.evict_every, **window, **VARIANTS[name][1])
    settings = Settings(
        positions=args.positions, n_batch=64, n_output=64, over_budget=False, n_threads=args.threads
    )
    engine = Engine(model, policy, settings)
    start = time.perf_counter()
    nll = perplexity.stream(engine, tokens)
    live = slice(0, engine.n_kv)
    pos = engine.rows.pos[:, live]
    middle = (pos >= policy.sinks) & (pos < engine.n_past - policy.window)
    own_share = float(np.median(1 - engine.state[2][:, live][middle]))
    engine.close()
    note(f"{name}: {nll[args.budget - 1 :].mean():.4f}, {time.perf_counter() - start:.0f} s")
    if path:
        np.savez(path, nll=nll, own=own_share)
    return nll, own_share


if __name__ == "__main__":
    main()
