"""Functions that all benchmarks use: describe the machine, read tokens, compute medians, draw plots."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console

from kvtool.cli.texts import first_tokens
from kvtool.errors import InputError
from kvtool.llama.cache.decoder import FLASH
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from kvtool.measure.machine import machine as describe_machine
from kvtool.models.resolve import resolve
from kvtool.system.texts import TextSource

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def make_parser(about: str) -> argparse.ArgumentParser:
    """Return a parser. Its --help shows `about`, a module's docstring, without rewrapping it."""
    module = sys.modules["__main__"].__spec__
    return argparse.ArgumentParser(
        prog=module and f"python -m {module.name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_common(parser: argparse.ArgumentParser, needs_file: bool = True) -> None:
    parser.add_argument("file", type=Path, nargs=None if needs_file else "?", help="a text, UTF-8")
    parser.add_argument("-m", "--model", help="a name of models.txt or a path (default: kvtool's)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the ratios; needs matplotlib")


def machine() -> dict[str, object]:
    """Describe the machine without its GPUs, and the versions of kvtool and llama.cpp."""
    return {name: value for name, value in describe_machine().items() if name != "devices"}


def mcnemar(lost: int, won: int) -> float:
    """Return p of McNemar's exact test.

    lost: number of items that only the first run gets right. won: number that only the second run gets right.
    """
    # if both runs are equally good, an item on which they differ is lost or won with probability 1/2
    tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1)) / 2 ** (lost + won)
    return min(2 * tail, 1)


def describe(what: dict[str, object]) -> str:
    """Format as "name value, name value"."""
    return ", ".join(f"{name} {value}" for name, value in what.items())


def load_model(name: str | None) -> Model:
    """Load the model with this name or path. None means kvtool's default model."""
    return Model(resolve(name))


def stock_context(model: Model, n_cell: int, n_batch: int, n_threads: int, flash: str) -> object:
    """Return a context of stock llama.cpp, in which nothing of kvtool is enabled.

    If it cannot be created, the program ends.
    """
    params = api.llama_context_default_params()
    params.n_ctx = n_cell
    params.n_batch = params.n_ubatch = n_batch
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = FLASH[flash]
    context = api.llama_init_from_model(model._model, params)
    if not context:
        sys.exit(f"llama.cpp cannot make a context of {n_cell} cells")
    return context


def load_tokens(model: Model, path: Path, n: int) -> np.ndarray:
    """Return the first n tokens of the text. If it is shorter or cannot be read, the program ends."""
    try:
        with closing(TextSource(str(path))) as text:
            return first_tokens(model, text, n, n_min=n)
    except InputError as error:
        sys.exit(str(error))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread_of_ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return `spread` of our values, each divided by the other's value of the same round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def show(values: dict[str, float], digits: int = 3) -> str:
    """Format a result of `spread`, as in "1.020 (0.990-1.051)"."""
    return "{median:.{d}f} ({min:.{d}f}-{max:.{d}f})".format(**values, d=digits)


def console(width: int = 110) -> Console:
    """Return the console. In a file or a pipe it has this width, so that nothing is cut off."""
    return Console(width=None if sys.stdout.isatty() else width)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path | None, results: dict[str, object]) -> None:
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def plot_ratios(path: Path | None, title: str, ratios: dict[str, dict[str, float]], target: float) -> None:
    """Draw a bar for each ratio (a result of `spread`), and lines at 1 and at `target`."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.35 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    medians = [ratio["median"] for ratio in ratios.values()]
    off = [[abs(ratio["median"] - ratio[end]) for ratio in ratios.values()] for end in ("min", "max")]
    axes.barh(list(ratios), medians, xerr=off, height=0.6, color="tab:blue", ecolor="0.3", capsize=3)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.axvline(target, color="tab:red", linewidth=1, linestyle="--", label=f"target {target:g}")
    axes.invert_yaxis()
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside lower right", fontsize="small")
    figure.savefig(path)
