"""Measure the error of attention's outputs after one merge and after one eviction in the full cache.

    python -m lab.papers.one_merge wiki.test.raw

In every row (layer and KV head), the victims are the `--victims` tokens with the lowest average attention
after `--at` tokens, except sinks and window. For each victim alone, the full cache is changed in two ways:
the victim is evicted, or it is merged as in WeightedKV. The error is the squared difference from the outputs
of the full cache, summed over all later queries. Runs a llama or qwen2 model in NumPy, with weights in F32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from kvtool.models.resolve import resolve
from lab.benchmarks.common import add_common, load_model, load_tokens, make_parser, note, write_json
from lab.papers.ungroup import ungroup
from tests import tiny
from tests.reference.models import linear
from tests.reference.transformer import Llama


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--at", type=int, default=512, help="tokens before the merge")
    parser.add_argument("--victims", type=int, default=64, help="tokens of each row")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=124)
    parser.add_argument("--ungroup", action="store_true", help="give every query head its own KV head")
    args = parser.parse_args()

    tokens = load_tokens(load_model(args.model), args.file, args.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = resolve(args.model)
        if args.ungroup:
            ungroup(path, path := Path(folder) / "ungrouped.gguf")
        tiny.dequantize(path, Path(folder) / "f32.gguf")
        model = Llama(Path(folder) / "f32.gguf")
    merges = []
    for attention, output, value in rows(model, tokens):
        average = average_of(attention, args.at)
        lowest = average[args.sinks : args.at - args.window].argsort()[: args.victims]
        for gone in (args.sinks + lowest).tolist():
            later = attention[:, args.at :], output[:, args.at :]
            merges.append(one_merge(*later, value, average, gone))
    results = {name: np.array([merge[name] for merge in merges]) for name in merges[0]}
    print(f"{len(merges)} merges, later queries: {len(tokens) - args.at}")
    print("| | 10 % | median | 90 % |")
    print("| --- | ---: | ---: | ---: |")
    for name, values in results.items():
        low, median, high = np.quantile(values, [0.1, 0.5, 0.9])
        print(f"| {name} | {low:.2f} | {median:.2f} | {high:.2f} |")
    write_json(args.json, {name: values.tolist() for name, values in results.items()})


def rows(model: Llama, tokens: np.ndarray):
    """Yield the arrays of each row.

    These are attention f64[head, query, token], output f64[head, query, dim] and value f64[token, dim].
    """
    n, group = len(tokens), model.n_head // model.n_head_kv
    later = np.triu(np.ones((n, n), np.bool_), 1)
    x = model.embd[tokens].astype(np.float64)
    for number, layer in enumerate(model.layers):
        note(f"layer {number + 1} of {model.n_layer}")
        h = model.norm(x, layer["attn_norm"])
        query, key, value = (
            linear(layer, name, h).reshape(n, -1, model.head_dim).swapaxes(0, 1)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        query, key = (model.rotate(model.pairs(each), np.arange(n), number) for each in (query, key))
        output = np.empty_like(query)
        for i in range(model.n_head_kv):
            mine = slice(i * group, (i + 1) * group)
            scores = query[mine] @ key[i].T / np.sqrt(model.head_dim)
            scores[:, later] = -np.inf
            attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attention /= attention.sum(axis=-1, keepdims=True)
            output[mine] = attention @ value[i]
            yield attention, output[mine], value[i]
        x = x + output.swapaxes(0, 1).reshape(n, -1) @ layer["attn_output"].T
        h = model.norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T


def average_of(attention, at: int):
    """Return f64[token], the attention that each of the first `at` tokens gets.

    It is the sum over the heads, and the mean over the queries that see the token.
    """
    return attention[:, :at, :at].sum(axis=(0, 1)) / np.arange(at, 0, -1)


def share_of(average, gone: int) -> float:
    """Share of the evicted value in its mixture with the neighbour's value."""
    return average[gone] / max(average[gone] + average[gone + 1], np.finfo(float).tiny)


def one_merge(attention, output, value, average, gone: int) -> dict[str, float]:
    """Return the errors of merging token `gone`, and of evicting it.

    attention: f64[head, query, token], of the later queries. output: f64[head, query, dim], of the same
    queries.
    """
    lost, read = attention[:, :, gone, None], attention[:, :, gone + 1, None]
    share = share_of(average, gone)
    error = (output - lost * value[gone]) / (1 - lost) - output
    change = read / (1 - lost) * (value[gone] - value[gone + 1])
    evicted, merged = error**2, (error + share * change) ** 2
    best = np.clip(-(error * change).sum() / max((change**2).sum(), np.finfo(float).tiny), 0, 1)
    # the error that the merge adds for each query, the largest first
    added = np.sort((merged - evicted).sum(axis=2).ravel())[::-1]
    few = max(len(added) // 20, 1)
    ratio = np.log(np.maximum(lost, 1e-12) / np.maximum(read, 1e-12))
    one, other = value[gone], value[gone + 1]
    return {
        "share of the evicted value": share,
        "error of the merge / of the eviction": merged.sum() / evicted.sum(),
        "the same without the 5 % of queries that it harms most": 1 + added[few:].sum() / evicted.sum(),
        "the same with the best share in hindsight": ((error + best * change) ** 2).sum() / evicted.sum(),
        "best share in hindsight": best,
        "standard deviation of log(attention / neighbour's)": ratio.std(),
        "correlation of the two attentions": np.corrcoef(lost.ravel(), read.ravel())[0, 1],
        "cosine of the two values": one @ other / np.linalg.norm(one) / np.linalg.norm(other),
    }


if __name__ == "__main__":
    main()
