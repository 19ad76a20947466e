"""How much precision do keys lose when they are rotated again and again?

    python -m lab.benchmarks.drift FILE --evictions 1000,10000

The program streams the text once for each type of keys, with in-cache positions and an eviction at every
token. With StreamingLLM, each eviction rotates the keys of the sinks again. After each number of evictions in
`--evictions`, the next `--score` tokens are predicted. The reference is a stream with F32 keys, which lose
almost no precision. The table shows the mean of KL(reference || type) in nats. With `--positions auto`, the
same keys would be rotated only once per context.
"""

from __future__ import annotations

import numpy as np
from rich.table import Table

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.loaded.model import Model
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
    add_common(parser)
    parser.add_argument("--policy", default="streamingllm", help="one that reads no attention")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--evictions", default="1000,10000", help="numbers of evictions, separated by commas")
    parser.add_argument("--types", default="f16,q8_0", help="types of the keys, separated by commas")
    parser.add_argument("--positions", default="in-cache", choices=("in-cache", "auto"))
    parser.add_argument("--score", type=int, default=128)
    args = parser.parse_args()

    model = load_model(args.model)
    after = [0, *(int(n) for n in args.evictions.split(","))]
    tokens = load_tokens(model, args.file, args.budget + after[-1] + args.score)
    exact = _predictions(model, tokens, "f32", after, args)
    divergence = {}
    for kind in args.types.split(","):
        predictions = _predictions(model, tokens, kind, after, args)
        divergence[kind] = [_kl(p, q) for p, q in zip(exact, predictions, strict=True)]
        note(f"{kind}: {divergence[kind]}")
    results = {
        "machine": machine(),
        "model": model.path.name,
        "options": {name: getattr(args, name) for name in ("policy", "budget", "positions", "score")},
        "evictions": after,
        "kl": divergence,
    }
    write_json(args.json, results)
    table = Table(title=f"KL from F32 keys in nats, {args.policy}, {args.budget} cells, {args.positions}")
    for column in ("keys", *(f"{n:,} evictions" for n in after)):
        table.add_column(column, justify="right")
    for kind, values in divergence.items():
        table.add_row(kind, *(f"{value:.5f}" for value in values))
    console().print(table)
    console().print(describe(results["machine"]))


def _predictions(model: Model, tokens: np.ndarray, type_k: str, after: list[int], args) -> list[np.ndarray]:
    """Return log-probabilities f32[score, n_vocab] of the next tokens after each number of evictions."""
    settings = Settings(positions=args.positions, n_batch=1, type_k=type_k, n_threads=args.threads)
    engine = Engine(model, policies.fit(args.policy, args.budget, 1), settings)
    starts = [args.budget - 1 + n for n in after]
    by_start = [[] for _ in starts]
    for at, token in enumerate(tokens):
        engine.read(np.array([token], np.int32))
        for start, logits in zip(starts, by_start, strict=True):
            if start <= at < start + args.score:
                logits.append(_log_softmax(engine.context.logits()[0]))
    engine.close()
    return [np.array(logits) for logits in by_start]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


if __name__ == "__main__":
    main()
