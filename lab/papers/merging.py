"""Does merging values help? WeightedKV against its evicting variant and other ways to merge, token by token.

    python -m lab.papers.merging wiki.test.raw --budget 256 --nll runs

Every variant streams the first `--max-tokens` tokens of the text and evicts by average attention. They differ
in what happens to the value of an evicted token. For each variant the table shows the mean nll from token
`--budget` on; the mean difference from `evict`, with its standard error from blocks of 64 tokens; the share
of tokens that score better; and the own share: the weight that a value between sinks and window has kept of
itself at the end, the median. What is in the folder of --nll is not measured again.
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
from kvtool.llama.model import Model
from kvtool.measure import perplexity
from kvtool.models.resolve import resolve
from kvtool.policies.weightedkv import WeightedKV
from kvtool.policy import Merge, Plan, State, View, protected
from lab.benchmarks.common import add_common, describe, load_tokens, machine, make_parser, note
from lab.papers.ungroup import ungroup

BLOCK = 64
RIGHT, KEPT, LEFT = range(3)
OWN, WEIGHT, SUM, POOLED = range(4)


@dataclass(frozen=True, slots=True)
class Variant(WeightedKV):
    """WeightedKV with other merges. The victim is the evicted token, its value merges into a neighbour's.

    Attributes
    ----------
    into
        The neighbour: RIGHT, the next token that is live now; KEPT, the next that stays; LEFT, the one
        before, unless it is a sink.
    by_sum
        Whether a value's weight is its attention sum, and not the average.
    equal
        Whether all values have the same weight.
    scale
        Factor of the victim's share.
    most
        A victim whose share would be larger is not merged.
    spare
        Whether a victim is not merged if its neighbour is in the window.
    add
        Whether the victim is added, times the ratio of the averages (at most 1), without scaling the
        neighbour.
    centre
        With add: whether the average output of the row is first subtracted from the victim.
    after
        What a merge does to the neighbour: nothing (OWN); later merges count what went into it (WEIGHT); its
        attention sum grows by the victim's (SUM); sums and steps alive are added (POOLED).
    n_layer
        Layers that merge.
    heads
        Rows that evict together, by the sum of their averages; each merges by its own.
    """

    into: int = RIGHT
    by_sum: bool = False
    equal: bool = False
    scale: float = 1
    most: float = 1
    spare: bool = False
    add: bool = False
    centre: bool = False
    after: int = OWN
    n_layer: int = 1_000
    heads: int = 1

    paper: ClassVar[str] = ""

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """The state: attention sum; steps alive; weight taken over from victims; lost own share."""
        return tuple(np.zeros((n_row, n_cell), np.float32) for _ in range(4))

    def observe(self, view: View, state: State) -> None:
        state[0][:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        mass, steps = (array[:, : view.n_kv] for array in state[:2])
        average = mass / ((view.next - view.pos).astype(np.float32) + steps)
        n_keep = self.budget - self.slack
        keep = np.empty(view.pos.shape, np.bool_)
        first, recent = protected(view, n_keep, self.sinks, self.window)
        order = np.argsort(view.pos, axis=1)
        decides = average if self.heads == 1 else self._summed(average, order)
        keep_highest(view.pos, decides, first, recent, n_keep, keep)
        if not self.merge:
            return Plan(keep)
        place = np.nonzero(~np.take_along_axis(keep, order, axis=1))[1].reshape(len(keep), -1)
        scores = np.take_along_axis(np.take_along_axis(decides, order, axis=1), place, axis=1)
        turn = np.take_along_axis(place, scores.argsort(axis=1, kind="stable"), axis=1)
        n_most = place.size * (view.n_kv if self.centre else 2)
        terms = [np.empty(n_most, kind) for kind in (np.int32, np.int32, np.int32, np.float32)]
        amount = np.ones_like(mass) if self.equal else (mass.copy() if self.by_sum else average)
        parameters = (self.into, self.scale, self.most, self.spare, self.add, self.centre, self.after)
        tokens = (view.next, view.pos, order, average, amount, keep, turn)
        n = _merge(*tokens, first, recent, *parameters, *state, *terms)
        asked = view.layer[terms[0][:n]] < self.n_layer
        state[3][view.layer >= self.n_layer] = 0
        return Plan(keep, Merge(*(term[:n][asked] for term in terms)))

    def _summed(self, average: np.ndarray, order: np.ndarray) -> np.ndarray:
        """The sums over rows that evict together; these hold the same tokens."""
        by_age = np.take_along_axis(average, order, axis=1)
        total = by_age.reshape(-1, self.heads, by_age.shape[1]).sum(axis=1)
        summed = np.empty_like(average)
        np.put_along_axis(summed, order, np.repeat(total, self.heads, axis=0), axis=1)
        return summed


@kernel(
    "i8(i8, i4[:,::1], i8[:,::1], f4[:,::1], f4[:,::1], b1[:,::1], i8[:,::1], i8, i8, "
    "i8, f8, f8, b1, b1, b1, i8, "
    "f4[:,::1], f4[:,::1], f4[:,::1], f4[:,::1], i4[::1], i4[::1], i4[::1], f4[::1])"
)
def _merge(
    next, pos, order, average, amount, keep, turn, first, recent,
    into, scale, most, spare, add, centre, after,
    mass, steps, extra, lost, row_of, dst_of, src_of, weight_of,
):  # fmt: skip
    """Merge row by row and victim by victim, as Variant says. Indices are cells, unless named places."""
    n_row, n = order.shape
    n_evict = turn.shape[1]
    older, newer = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    target, give, hold = np.empty(n_evict, np.int64), np.empty(n_evict), np.empty(n_evict)
    weight, home = np.empty(n + 1), np.empty(n + 1, np.int64)
    taken = np.empty(n)
    n_term = 0
    for row in range(n_row):
        for place in range(n + 1):
            older[place], newer[place] = place - 1, place + 1
            weight[place], home[place] = 1, place
        total_average = 0.0
        for cell in range(n):
            taken[cell] = 0
            total_average += average[row, cell]
        for i in range(n_evict):
            gone = turn[row, i]
            left, right = older[gone], newer[gone]
            older[right] = left
            if left >= 0:
                newer[left] = right
            to = left if into == LEFT else right
            while into == KEPT and not keep[row, order[row, to]]:
                to = newer[to]
            a, b = order[row, gone], order[row, to]
            p, q = np.float64(amount[row, a] + extra[row, a]), np.float64(amount[row, b] + extra[row, b])
            share = scale * (p / (p + q) if p + q > 0 else 0.5)
            skip = share > most or (spare and pos[row, b] >= recent) or pos[row, b] < first
            target[i], give[i], hold[i] = to, share, 1 - share
            if add:
                give[i], hold[i] = min(p / q, 1.0) * scale if q > 0 else 0.0, 1.0
            if skip:
                give[i], hold[i] = 0, 1
                continue
            if after == WEIGHT:
                extra[row, b] += np.float32(p)
            elif after == SUM:
                mass[row, b] += mass[row, a]
            elif after == POOLED:
                mass[row, b] += mass[row, a]
                steps[row, b] += np.float32(next - pos[row, a]) + steps[row, a]
        for i in range(n_evict - 1, -1, -1):
            gone, to = turn[row, i], target[i]
            home[gone] = home[to]
            weight[gone] = weight[to] * give[i]
            weight[to] *= hold[i]
        for i in range(n_evict):
            taken[home[turn[row, i]]] += weight[turn[row, i]]
        # the tokens whose next kept token is the same merge into that one
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
            if centre:
                begin, end = 0, n
            for source in range(begin, end):
                src = order[row, source]
                value = weight[source] if home[source] == place else 0.0
                if centre:
                    value -= taken[place] * average[row, src] / total_average
                if value != 0:
                    row_of[n_term], dst_of[n_term], src_of[n_term], weight_of[n_term] = row, dst, src, value
                    n_term += 1
    return n_term


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "evict": ("values go with their keys", {"merge": False}),
    "paper": ("Algorithm 1", {}),
    "layer-0": ("Algorithm 1 in the first layer, no merge in the others", {"n_layer": 1}),
    "shared-evict": (
        "with --ungroup: three heads, once a group, evict together",
        {"merge": False, "heads": 3},
    ),
    "shared": ("the same, each merging by its own averages", {"heads": 3}),
    "left": ("into the left neighbour", {"into": LEFT}),
    "kept": ("into the next that stays: no chains", {"into": KEPT}),
    "spare": ("never into a token of the window", {"spare": True}),
    "sums": ("weights are attention sums", {"by_sum": True}),
    "equal": ("all weights alike", {"equal": True}),
    "half": ("half of the victim's share", {"scale": 0.5}),
    "tenth": ("a tenth of the victim's share", {"scale": 0.1}),
    "under-30": ("only where the victim's share is 30 % at most", {"most": 0.3}),
    "under-10": ("only where it is 10 % at most", {"most": 0.1}),
    "weight": ("a merged value weighs what went into it", {"after": WEIGHT}),
    "sum": ("the neighbour's sum grows by the victim's", {"after": SUM}),
    "pooled": ("sums and steps alive of the two are added", {"after": POOLED}),
    "add": ("added, times the ratio of averages", {"add": True}),
    "centre": ("the same, less the row's average output", {"add": True, "centre": True}),
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
    print("| variant | what becomes of an evicted value | nll | against evict | better for | own share |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    base = runs["evict"][0][args.budget - 1 :]
    for name, (nll, own) in runs.items():
        scored = nll[args.budget - 1 :]
        against = " | " if name == "evict" else paired(scored - base)
        print(f"| `{name}` | {VARIANTS[name][0]} | {scored.mean():.4f} | {against} | {own:.2f} |")
    note(describe(machine()))


def paired(difference: np.ndarray) -> str:
    """The mean of f64[n], its standard error if neighbours are correlated, and the share below zero."""
    n = len(difference) // BLOCK
    error = difference[: n * BLOCK].reshape(n, BLOCK).mean(axis=1).std(ddof=1) / n**0.5
    return f"{difference.mean():+.4f} +- {error:.4f} | {(difference < 0).mean():.0%}"


def _run(args, model: Model, tokens: np.ndarray, name: str) -> tuple[np.ndarray, float]:
    """The nll f64[n - 1], and the own share of the values between sinks and window at the end."""
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
            found = np.load(path)
            return found["nll"], float(found["own"])
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
    own = float(np.median(1 - engine.state[3][:, live][middle]))
    engine.close()
    note(f"{name}: {nll[args.budget - 1 :].mean():.4f}, {time.perf_counter() - start:.0f} s")
    if path:
        np.savez(path, nll=nll, own=own)
    return nll, own


if __name__ == "__main__":
    main()
