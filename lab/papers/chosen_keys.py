"""How well the keys that a policy keeps of a prompt stand for all: BumbleBee's Figure 8 in numbers.

    python -m lab.papers.chosen_keys FILE --policies h2o,bumblebee:sinks=0 --budget 20 [--png chosen.png]

The text is read whole and evicted from once. Of each row: the mean over all tokens of the similarity, the
positive part of the cosine of keys before RoPE, to the nearest key that stays. 1 is a key that stays
itself. That is the paper's facility location, a part of BumbleBee's objective. The picture shows the keys
of some heads in a plane, by t-SNE; it needs matplotlib and scikit-learn.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.measure.grid import split_policy
from lab.benchmarks.common import add_common, load_model, load_tokens, make_parser, note
from lab.papers.maps.measure import drawn_layers
from lab.papers.maps.observe import What, observe


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--policies", default="random,streamingllm,h2o,bumblebee:sinks=0")
    parser.add_argument("--budget", type=float, default=20, metavar="PERCENT", help="of the tokens read")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--png", type=Path, help="draw the keys of --rows; needs matplotlib, scikit-learn")
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 40, 85], help="rows that are drawn")
    args = parser.parse_args()

    model = load_model(args.model)
    tokens = load_tokens(model, args.file, args.max_tokens)
    keys = unit_keys(model, tokens, args.threads)
    n_cell = int(len(tokens) * args.budget / 100)
    kept = {label: stay(model, tokens, label, n_cell, args.threads) for label in args.policies.split(",")}
    found = {label: nearest(keys, each) for label, each in kept.items()}
    for label, similarity in found.items():
        print(f"{label}: {similarity.mean():.4f}, rows from {similarity.min():.3f} to {similarity.max():.3f}")
    if args.json:
        about = {"file": args.file.name, "model": Path(model.path).name, "tokens": len(tokens)}
        about |= {"budget": n_cell, **records.versions()}
        rows = {label: similarity.tolist() for label, similarity in found.items()}
        args.json.write_text(json.dumps(about | {"nearest": rows}) + "\n", encoding="utf-8")
    if args.png:
        draw(args.png, keys, kept, args.rows)


def unit_keys(model: Model, tokens: np.ndarray, n_threads: int) -> np.ndarray:
    """Keys before RoPE f32[row, n, dim] of length 1."""
    found: list[np.ndarray] = []

    def visit(what: What, layer: int, head: int, array: np.ndarray) -> None:
        found.append(array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-30))

    observe(model, tokens, {What.KEYS_BEFORE}, drawn_layers(model, "values"), visit, n_threads)
    return np.array(found)


def stay(model: Model, tokens: np.ndarray, label: str, n_cell: int, n_threads: int) -> list[np.ndarray]:
    """The positions that each row keeps of the text, read whole."""
    note(label)
    name, options = split_policy(label)
    policy = policies.fit(name, n_cell, None, list(options))
    engine = Engine(model, policy, Settings(prefill="whole", n_threads=n_threads, flash="off"))
    try:
        engine.read(tokens)
        return [pos[:live] for pos, live in zip(engine.rows.pos, engine.rows.live, strict=True)]
    finally:
        engine.close()


def nearest(keys: np.ndarray, kept: list[np.ndarray]) -> np.ndarray:
    """f64[row]: the mean over a row's tokens of the similarity to the nearest key that stays."""
    return np.array(
        [np.maximum(row @ row[pos].T, 0).max(axis=1).mean() for row, pos in zip(keys, kept, strict=True)]
    )


def draw(path: Path, keys: np.ndarray, kept: dict[str, list[np.ndarray]], rows: list[int]) -> None:
    """A panel for each row and policy: all keys by t-SNE, those that stay in colour."""
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    figure = Figure(figsize=(2.6 * len(kept), 2.6 * len(rows)), dpi=90, layout="constrained")
    panels = figure.subplots(len(rows), len(kept), squeeze=False)
    for line, row in zip(panels, rows, strict=True):
        plane = TSNE(metric="cosine", init="random", random_state=0).fit_transform(keys[row])
        for axes, (label, of_rows) in zip(line, kept.items(), strict=True):
            axes.scatter(*plane.T, s=4, color="0.75", linewidths=0)
            axes.scatter(*plane[of_rows[row]].T, s=9, color="tab:red", marker="^", linewidths=0)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"{label}, row {row}", fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
