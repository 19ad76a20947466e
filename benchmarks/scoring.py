"""What a cell of kvtool compare costs over stock llama.cpp scoring the same tokens.

    python benchmarks/scoring.py FILE --policies h2o,buzz --budget 256

Stock decodes the text in chunks of 64 with logits of every token; before each the cache is cut back, so that
a chunk ends with 512 cells. It only decodes: what it would do with its logits is not counted. The cells are
measured with everything that compare measures, KL and top-1 against the full cache among it. CPU time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
from common import add_common, describe, load_model, load_tokens, machine, write_json

from kvtool.llama import Model
from kvtool.measure.cell import Job, measure

N_CHUNK, N_CELL = 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.add_argument("--policies", default="h2o", help="names, with commas")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.tokens)
    results: dict[str, object] = {"machine": machine(), "tokens": len(tokens), "budget": args.budget}
    results["stock"] = stock = _stock(model, tokens, args.threads)
    print(f"stock: {1e3 * stock / len(tokens):.2f} ms a token")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        np.save(path, tokens)
        for name in ("full", *args.policies.split(",")):
            job = Job(
                model=str(model.path),
                tokens=str(path),
                policy=name,
                options=(),
                budget=len(tokens) if name == "full" else args.budget,
                evict_every=None,
                type_k="f16",
                type_v="f16",
                positions="auto",
                n_ctx=model.n_ctx_train,
                n_batch=N_CHUNK,
                flash="auto",
                threads=args.threads,
                reference=str(Path(folder) / "full.ref"),
                writes=name == "full",
            )
            results[name] = found = measure(job)["cpu_s"]
            print(f"{name}: {1e3 * found / len(tokens):.2f} ms a token, {found / stock:.3f} of stock's")
    print(describe(results["machine"]))
    write_json(args.json, results)


def _stock(model: Model, tokens: np.ndarray, n_threads: int) -> float:
    """Seconds of CPU time for all tokens."""
    params = api.llama_context_default_params()
    params.n_ctx = N_CELL
    params.n_batch = params.n_ubatch = N_CHUNK
    params.n_threads = params.n_threads_batch = n_threads
    # as kvtool chooses on a CPU
    params.flash_attn_type = 0
    context = api.llama_init_from_model(model._model, params)
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
