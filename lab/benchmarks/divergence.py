"""Measure KL and top-1 of a cache type against f16, in kvtool and in stock llama-perplexity.

    python -m lab.benchmarks.divergence FILE --stock path/to/llama-perplexity --type q8_0

Both programs read the same pieces of 512 tokens, in batches of 64 and with flash attention. Only the second
half of each piece is compared. llama-perplexity stores the log-probabilities of all tokens in 16 bits. kvtool
stores the log-probabilities of the most likely tokens, and treats all remaining tokens as one token.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.measure import divergence, perplexity
from lab.benchmarks.common import add_common, load_model, make_parser, write_json

N_WINDOW, N_BATCH = 512, 64


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--stock", type=Path, required=True, help="the program llama-perplexity")
    parser.add_argument("--type", default="q8_0", help="type of keys and values")
    parser.add_argument("--chunks", type=int, default=8, help="number of pieces")
    parser.add_argument(
        "--top", default=str(divergence.N_TOP), help="tokens that kvtool keeps, separated by commas"
    )
    args = parser.parse_args()

    model = load_model(args.model)
    results = {"stock": _stock(args, model.path)}
    tokens = model.tokenize(args.file.read_bytes().decode("utf-8-sig"), start=True)[: args.chunks * N_WINDOW]
    for n_top in map(int, args.top.split(",")):
        divergence.N_TOP = n_top
        results[f"kvtool, {n_top} kept"] = _ours(args, model, tokens)
    for name, result in results.items():
        ratio = result["kl"] / results["stock"]["kl"]
        print(f"{name}: KL {result['kl']:.6f} ({ratio:.3f} of stock's), top-1 {result['top1']:.3%}")
    write_json(args.json, results)


def _ours(args, model, tokens: np.ndarray) -> dict[str, float]:
    n = len(tokens) // N_WINDOW * (N_WINDOW - 1) + 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference"
        with path.open("wb") as file:
            _read(args, model, tokens, "f16", divergence.ReferenceWriter(file, n, model.n_vocab))
        scores = divergence.ReferenceReader(path, n, model.n_vocab)
        _read(args, model, tokens, args.type, scores)
        scores.close()

    def scored(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, N_WINDOW - 1)[:, N_WINDOW // 2 :]

    return {"kl": float(scored(scores.kl).mean()), "top1": float(scored(scores.same).mean())}


def _read(args, model, tokens: np.ndarray, kind: str, scores: divergence.Scores) -> None:
    settings = Settings(
        n_batch=N_BATCH,
        n_output=N_BATCH,
        over_budget=False,
        type_k=kind,
        type_v=kind,
        flash="on",
        n_threads=args.threads,
    )
    engine = Engine(model, policies.fit("full", N_WINDOW), settings)
    perplexity.windows(engine, tokens, N_WINDOW, score=scores.score)
    engine.close()


def _stock(args, path: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [args.stock, "-m", path, "-f", args.file, "-c", N_WINDOW, "-b", N_BATCH, "-ub", N_BATCH]
        command += ["--chunks", args.chunks, "-t", args.threads, "-fa", "on"]
        command += ["--kl-divergence-base", Path(folder) / "base"]
        _say(command)
        stdout = _say([*command, "-ctk", args.type, "-ctv", args.type, "--kl-divergence"])
    return {
        "kl": float(re.search(r"Mean +KLD: +([\d.]+)", stdout)[1]),
        "top1": float(re.search(r"Same top p: +([\d.]+)", stdout)[1]) / 100,
    }


def _say(command: list) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
