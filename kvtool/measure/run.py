"""One run: stream a text through a cache with one policy, and return all measurements."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError, OutOfMemory, users_traceback, where

if TYPE_CHECKING:
    import numpy as np

    from kvtool.engine.loop import Engine
    from kvtool.llama.loaded.model import Model
    from kvtool.measure.divergence import Scores
    from kvtool.measure.grid import Run

Report = Callable[[int, float], None]
"""Function to call after each batch, with the number of tokens scored so far and the sum of their nll."""


def outcome(
    model: Model,
    run: Run,
    tokens: np.ndarray,
    reference: Path | None,
    report: Report,
    *,
    writes: bool = False,
) -> dict[str, Any]:
    """Execute a run of a grid in a cache of its own. Return its measurements, or `error` and `exit_code`.

    reference, writes: see `measure`. With -v, the traceback of an error in a user's policy goes to stderr.
    """
    from kvtool.engine.loop import Engine

    try:
        with closing(Engine(model, run.policy, run.settings)) as engine:
            return measure(engine, tokens, reference, report, writes=writes)
    except KvtoolError as caught:
        if run.options.verbose:
            sys.stderr.writelines(users_traceback(caught))
        return {"error": str(caught), "exit_code": caught.exit_code}
    except MemoryError:
        return {"error": str(OutOfMemory()), "exit_code": OutOfMemory.exit_code}
    except OSError as caught:
        what = f" {caught.filename}" if caught.filename else ""
        said = f"cannot write{what}: {caught.strerror or caught}"
    except Exception as caught:  # noqa: BLE001  (the other runs go on)
        said = where(caught)
    return {"error": said, "exit_code": KvtoolError.exit_code}


def measure(
    engine: Engine,
    tokens: np.ndarray,
    reference: Path | None = None,
    report: Report = lambda n, nll: None,
    *,
    writes: bool = False,
) -> dict[str, Any]:
    """Stream tokens i32[n] through the engine's empty cache, and return the measurements. Raises KvtoolError.

    reference: file with the full cache's predictions, or None if there is nothing to compare with.
    writes: True if the engine has the full cache and writes `reference`.
    """
    import numpy as np

    from kvtool import policies
    from kvtool.config.report import report as describe
    from kvtool.measure import divergence, perplexity

    policies.load_kernels(engine.policy)
    against: AbstractContextManager[Scores | None] = nullcontext()
    if reference:
        of = reference, len(tokens), engine.model.n_vocab
        against = divergence.writing(*of) if writes else closing(divergence.ReferenceReader(*of))
    with against as scores:
        parts, n, total, kv_peak_bytes, peak_kv = [], 0, 0.0, engine.cache_bytes, 0.0
        start, cpu = time.perf_counter(), time.process_time()
        for nll in perplexity.steps(engine, tokens, scores.score if scores else perplexity.nll_of):
            parts.append(nll)
            n, total = n + len(nll), total + float(nll.sum())
            kv_peak_bytes = max(kv_peak_bytes, engine.cache_bytes)
            peak_kv = max(peak_kv, engine.mean_kv)
            report(n, total)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    held = {name: value for name, value in describe(engine, "").items() if name in _HELD}
    return quality(np.concatenate(parts), scores) | {
        "tokens_per_s": len(tokens) / seconds,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "plan_s": engine.cache.plan_s,
        "edit_s": engine.cache.edit_s,
        "kv_peak_bytes": kv_peak_bytes,
        "budget_bytes": budget_bytes(engine, peak_kv),
        **held,
    }


_HELD = ("cells", "kv_bytes", "state_bytes", "archived", "archive_bytes", "archive_file")


def budget_bytes(engine: Engine, peak_kv: float = 0.0) -> int:
    """Size of keys and values in all rows, in bytes, if each row uses all cells of its budget.

    If rows keep different numbers of cells, the budget is only a cap. A row is then counted as peak_kv cells:
    the largest mean number of cells during the run. llama.cpp's padding is not counted.
    """
    n = peak_kv if engine.policy.ragged else engine.policy.budget
    return round(sum(engine.cache.cell_bytes) * n)


def fixed_bytes(engine: Engine) -> int:
    """Size of the cache outside the rows in bytes: sliding windows and recurrent states."""
    context = engine.context
    return context.cache_bytes - int(sum(engine.cache.cell_bytes * context.layer_cells))


def quality(nll: np.ndarray, scores: Scores | None = None) -> dict[str, Any]:
    """Return the fields of a record about the quality of predictions.

    nll: f64[n], nll of each scored token in nats. scores: comparison with the full cache, or None.
    """
    import numpy as np

    from kvtool.measure.statistics import block_sums, mean_of_text, perplexity_of

    n, sums = len(nll), block_sums(nll)
    value, error, margin = mean_of_text(sums, n)
    record: dict[str, Any] = {
        "n_scored": n,
        "perplexity": perplexity_of(value),
        "perplexity_low": perplexity_of(value - margin) if margin else None,
        "perplexity_high": perplexity_of(value + margin) if margin else None,
        "nll": value,
        "nll_stderr": error,
        "nll_blocks": sums.tolist(),
    }
    names = ("nll_minus_full", "kl", "top1")
    values = (nll - scores.nll, scores.kl, scores.same.astype(np.float64)) if scores else (None,) * 3
    for name, of_tokens in zip(names, values, strict=True):
        mean = (None,) * 3 if of_tokens is None else mean_of_text(block_sums(of_tokens), n)
        record |= zip((name, f"{name}_stderr", f"{name}_margin"), mean, strict=True)
    return record
