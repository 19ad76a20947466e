"""Compare the time to read a prompt: kvtool with a policy, and stock llama.cpp with a cell for each token.

    python -m lab.benchmarks.reading FILE --tokens 8192 --policies h2o,streamingllm --budget 1024

Both read the prompt in batches of --batch tokens. Stock reads it with and without flash attention, and the
faster time is used. Stock and the policies take turns. Each ratio is computed from two times of the same
round. Only the last token has logits.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
from rich.table import Table

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from lab.benchmarks.common import (
    CLOCKS,
    add_common,
    add_plot,
    console,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    plot_ratios,
    show,
    spread,
    spread_of_ratios,
    stock_context,
    write_json,
)


class Stock:
    """Stock llama.cpp with a cell for each token."""

    def __init__(self, model: Model, tokens: np.ndarray, flash: str, args) -> None:
        self.context = stock_context(model, len(tokens), args.batch, args.threads, flash)
        # keep the arrays alive, because llama_batch_get_one only points to the tokens
        steps = (tokens[at : at + args.batch].tolist() for at in range(0, len(tokens), args.batch))
        self.steps = [(api.llama_token * len(step))(*step) for step in steps]

    def read(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        for step in self.steps:
            if api.llama_decode(self.context, api.llama_batch_get_one(step, len(step))):
                sys.exit("llama.cpp cannot decode")
        api.llama_get_logits(self.context)


class Kvtool:
    def __init__(self, model: Model, name: str, tokens: np.ndarray, args) -> None:
        policy = policies.fit(name, args.budget, args.evict_every)
        settings = Settings(n_batch=args.batch, flash=args.flash, n_threads=args.threads)
        self.engine = Engine(model, policy, settings)
        self.tokens = tokens

    def read(self) -> None:
        self.engine.reset()
        self.engine.read(self.tokens)
        self.engine.context.logits()


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    add_plot(parser)
    parser.add_argument("--policies", default="h2o,buzz,streamingllm,tova", help="names, separated by commas")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="tokens of a batch, for both")
    parser.add_argument("--evict-every", type=int)
    parser.add_argument("--flash", default="auto", help="kvtool's attention path")
    parser.add_argument("--stock", default="off,on", help="stock's attention paths, separated by commas")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu, if other programs are running")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens)
    names = args.policies.split(",")
    readers: dict[str, Stock | Kvtool] = {
        **{f"stock, flash {flash}": Stock(model, tokens, flash, args) for flash in args.stock.split(",")},
        **{name: Kvtool(model, name, tokens, args) for name in names},
    }
    times: dict[str, list[float]] = defaultdict(list)
    now = CLOCKS[args.clock]
    for i in range(args.rounds):
        for name, reader in readers.items():
            start = now()
            reader.read()
            times[name].append(now() - start)
        note(f"round {i + 1} of {args.rounds}")

    seconds = {name: spread(values) for name, values in times.items()}
    best = min((name for name in times if name not in names), key=lambda name: seconds[name]["median"])
    ratios = {name: spread_of_ratios(times[name], times[best]) for name in names}
    results = {"machine": machine(), "model": model.path.name, "tokens": len(tokens), "budget": args.budget}
    results |= {"batch": args.batch, "best": best, "seconds": seconds, "over_stock": ratios}
    title = f"{len(tokens):,} tokens read, budget {args.budget}, {args.batch} tokens a step"
    table = Table(title=title)
    table.add_column("")
    for column in ("seconds", f"over {best}"):
        table.add_column(column, justify="right")
    for name in readers:
        table.add_row(name, show(seconds[name], 1), show(ratios[name]) if name in ratios else "")
    console().print(table)
    print(describe(results["machine"]))
    write_json(args.json, results)
    plot_ratios(args.plot, f"{title}: time over stock's", ratios, 1.0)


if __name__ == "__main__":
    main()
