"""Compare the CPU time of `kvtool compare` with stock llama.cpp, which decodes the same tokens.

    python -m lab.benchmarks.scoring FILE --policies h2o,buzz --budget 256

Stock decodes the text in batches of 64, with logits of every token. Before each batch, its cache is cut to
448 cells, so that it has 512 cells after the batch. Stock only decodes: its logits are not used.

kvtool's runs measure everything that `kvtool compare` measures, with KL and top-1 against the full cache.
Stock and the policies take turns. Each ratio is computed from two times of the same round.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from kvtool.config.opening import open_run
from kvtool.config.run import ScoreOptions
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from kvtool.measure.run import measure
from lab.benchmarks.common import (
    add_common,
    add_plot,
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

N_CHUNK, N_CELL = 64, 512


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    add_plot(parser)
    parser.add_argument("--policies", default="h2o", help="names, separated by commas")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens)
    names = args.policies.split(",")
    ms: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:

        def scored(name: str) -> float:
            budget = None if name == "full" else str(args.budget)
            run = ScoreOptions(
                policy=name, budget=budget, model=str(model.path), n_batch=N_CHUNK, threads=args.threads
            )
            reference = Path(folder) / "full.ref"
            with open_run(run, length=lambda model: len(tokens)) as opened:
                return measure(opened.engine, tokens, reference, writes=name == "full")["cpu_s"]

        # write the predictions of the full cache: KL and top-1 of all other runs compare with them
        scored("full")
        for i in range(args.rounds):
            for name in ("stock", *names):
                seconds = _stock(model, tokens, args.threads) if name == "stock" else scored(name)
                ms[name].append(1e3 * seconds / len(tokens))
            note(f"round {i + 1} of {args.rounds}")
    ratios = {name: spread_of_ratios(ms[name], ms["stock"]) for name in names}
    results = {"machine": machine(), "model": model.path.name, "tokens": len(tokens), "budget": args.budget}
    results |= {"ms_a_token": {name: spread(values) for name, values in ms.items()}, "over_stock": ratios}
    print(f"stock: {show(spread(ms['stock']), 2)} ms a token")
    for name in names:
        print(f"{name}: {show(spread(ms[name]), 2)} ms a token, {show(ratios[name])} of stock's")
    print(describe(results["machine"]))
    write_json(args.json, results)
    plot_ratios(args.plot, f"time to score a token over stock's, budget {args.budget}", ratios, 1.1)


def _stock(model: Model, tokens: np.ndarray, n_threads: int) -> float:
    """Return the CPU time for all tokens in seconds."""
    # flash attention is off, because kvtool does not use it on a CPU
    context = stock_context(model, N_CELL, N_CHUNK, n_threads, "off")
    batch = api.llama_batch_init(N_CHUNK, 0, 1)

    def decode(part: np.ndarray, pos_0: int) -> None:
        batch.n_tokens = len(part)
        for i, token in enumerate(part.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos_0 + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if api.llama_decode(context, batch):
            sys.exit("llama.cpp cannot decode")
        api.llama_get_logits(context)

    n_keep = N_CELL - N_CHUNK
    for at in range(0, n_keep, N_CHUNK):
        decode(np.resize(tokens, N_CELL)[at : at + N_CHUNK], at)
    start = time.process_time()
    for at in range(0, len(tokens), N_CHUNK):
        api.llama_memory_seq_rm(api.llama_get_memory(context), 0, n_keep, -1)
        decode(tokens[at : at + N_CHUNK], n_keep)
    seconds = time.process_time() - start
    api.llama_batch_free(batch)
    api.llama_free(context)
    return seconds


if __name__ == "__main__":
    main()
