"""Table of the policies and options that run with each kind of model; docs/models.md names the exceptions.

    python tests/engine/kinds_table.py DIR

DIR has small random models, one per architecture; `make check-archs DIR=...` writes them.

For each entry of the table, an engine scores a text that is three times as long as the trained context. "yes"
means that the engine has evicted tokens and that all scores are finite. In the column "sessions", the text
has 400 tokens, and "yes" means that a restored session continues bit for bit. After "no", the entry gives the
reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from kvtool import policies
from kvtool.errors import KvtoolError
from kvtool.measure import perplexity
from tests.engine.running import open_engine, text

KINDS = {
    "plain attention": "llama-dense",
    "sliding windows": "gemma3-dense",
    "windows, attention sinks": "gpt-oss-moe",
    "chunked windows": "llama4-moe",
    "layers without positions": "smollm3-dense",
    "M-RoPE": "qwen2vl-dense",
    "interleaved M-RoPE": "qwen3vl-dense",
    "short convolutions": "lfm2moe-moe",
    "Mamba 2 layers": "granitehybrid-dense",
    "Mamba 2 in every layer": "falcon-h1-dense",
    "gated delta net": "qwen35-dense",
    "lightning attention": "minimax-01-moe",
    "latent attention (MLA)": "deepseek2-moe",
    "MLA, recurrent layers": "kimi-linear-moe",
    "MLA, an index": "deepseek32-moe",
    "blocks, an index": "minimax-m3-moe",
    "ALiBi": "bloom-dense",
    "learned positions": "gpt2-dense",
}
"""Example of each kind: the name of a model file in DIR."""

EXACT = {"type_k": "f32", "type_v": "f32", "flash": "off"}
FLASH = {"flash": "on"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    columns = {
        "all policies": lambda path: _all(
            path, [n for n in policies.names() if n not in ("full", "recall", "corm")]
        ),
        "ragged": lambda path: _run(path, "corm"),
        "recall": lambda path: _run(path, "recall"),
        "whole": lambda path: _run(path, "snapkv", whole=True),
        "in-cache": lambda path: _run(path, "h2o", positions="in-cache", **EXACT),
        "q8_0, q4_0": _quantized,
        "sessions": _session,
    }
    print("| kind | for example | " + " | ".join(columns) + " |")
    print("| --- | --- |" + " --- |" * len(columns))
    for kind, name in KINDS.items():
        path = args.folder / f"{name}.gguf"
        cells = [column(path) for column in columns.values()]
        print(f"| {kind} | {name.rsplit('-', 1)[0]} | " + " | ".join(cells) + " |", flush=True)


def _all(path: Path, names: list[str]) -> str:
    results = {name: _run(path, name) for name in names}
    wrong = [name for name, result in results.items() if result != "yes"]
    for name in wrong:
        print(f"{path.stem}: {name}: {results[name]}", file=sys.stderr)
    return "yes" if not wrong else f"but {', '.join(wrong)}"


def _quantized(path: Path) -> str:
    results = {_run(path, "h2o", type_k=kind, type_v=kind, **FLASH) for kind in ("q8_0", "q4_0")}
    return "; ".join(sorted(results))


def _fitted(name: str):
    return policies.fit(name, 96 if name in ("corm", "recall", "buzz") else 64, 8)


def _run(path: Path, name: str, whole: bool = False, **settings: str) -> str:
    how = {"type_k": "f16", "type_v": "f16", "flash": "auto"} | settings
    if whole:
        how["prefill"] = "whole"
    try:
        with open_engine(path, _fitted(name), **how) as engine:
            tokens = text(3 * engine.model.n_ctx_train, n_vocab=engine.model.n_vocab)
            if whole:
                engine.read(tokens[:200])
                tokens = tokens[200:]
            nll = perplexity.stream(engine, tokens)
            return "yes" if np.isfinite(nll).all() and engine.n_evicted > 0 else "NO"
    except KvtoolError as error:
        return f"no: {error}"


def _session(path: Path) -> str:
    with open_engine(path, _fitted("h2o"), **EXACT) as engine:
        tokens = text(400, n_vocab=engine.model.n_vocab)
        perplexity.stream(engine, tokens[:300])
        saved = {name: array.copy() for name, array in engine.save()}
        want = perplexity.stream(engine, tokens[300:])
    with open_engine(path, _fitted("h2o"), **EXACT) as other:
        other.restore(saved)
        return "yes" if (perplexity.stream(other, tokens[300:]) == want).all() else "NO"


if __name__ == "__main__":
    main()
