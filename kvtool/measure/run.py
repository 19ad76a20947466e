"""One run: stream a text through a cache with one policy, and return all measurements.

Each run has a separate process, so that its memory can be measured and a crash does not end other runs. The
process executes `main`. It reads a `RunInput` as JSON from stdin, writes a line of JSON after each batch, and
at the end writes a record or an error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.config.run import ScoreOptions
from kvtool.errors import KvtoolError, OutOfMemory, users_traceback, where

if TYPE_CHECKING:
    import numpy as np

    from kvtool.engine.loop import Engine
    from kvtool.measure.divergence import Scores

_MIN_TOKENS = 256
"""Minimum number of tokens per block, in the mean, for the error of a run's own nll.

Parts of a text differ, in subject and in difficulty, so short blocks depend on each other. In a difference of
two runs, these variations mostly cancel: its blocks may be shorter.
"""

Report = Callable[[int, float], None]
"""Function to call after each batch, with the number of tokens scored so far and the sum of their nll."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """Input of a run's process.

    Attributes
    ----------
    options
        Options of the run.
    tokens
        Path of a .npy file with the tokens of the text, i32[n].
    reference
        Path of the file with the full cache's predictions. None if there is nothing to compare with.
    writes
        True if this run uses the full cache and writes `reference`.
    """

    options: ScoreOptions
    tokens: str
    reference: str | None = None
    writes: bool = False


def measure(job: RunInput, report: Report = lambda n, nll: None) -> dict[str, Any]:
    """Execute the run in this process, and return its record. Raises KvtoolError."""
    import numpy as np

    from kvtool import policies
    from kvtool.config.opening import open_run
    from kvtool.config.report import report as describe
    from kvtool.measure import divergence, perplexity
    from kvtool.system.memory import peak_rss_bytes

    tokens, run = np.load(job.tokens), job.options
    if run.archive_file:
        # use a separate file for each process, because runs may be parallel
        run = run.changed(archive_file=f"{run.archive_file}.{os.getpid()}")
    with open_run(run, length=lambda model: len(tokens)) as opened:
        engine = opened.engine
        policies.load_kernels(engine.policy)
        against: AbstractContextManager[Scores | None] = nullcontext()
        if job.reference:
            reference = Path(job.reference), len(tokens), engine.model.n_vocab
            against = (
                divergence.writing(*reference)
                if job.writes
                else closing(divergence.ReferenceReader(*reference))
            )
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
        held = {name: value for name, value in describe(engine, run.policy).items() if name in _HELD}
        return quality(np.concatenate(parts), scores) | {
            "tokens_per_s": len(tokens) / seconds,
            "seconds": seconds,
            "cpu_s": cpu_s,
            "plan_s": engine.cache.plan_s,
            "edit_s": engine.cache.edit_s,
            "kv_peak_bytes": kv_peak_bytes,
            "budget_bytes": budget_bytes(engine, peak_kv),
            **held,
            "archive_file": job.options.archive_file if engine.context.archive else None,
            "peak_rss_bytes": peak_rss_bytes(),
        }


_HELD = ("cells", "kv_bytes", "state_bytes", "archived", "archive_bytes")


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

    from kvtool.measure import statistics
    from kvtool.measure.statistics import block_sums, mean_of_text, perplexity_of

    n, sums = len(nll), block_sums(nll)
    blocks = statistics.joined(sums, statistics.block_counts(n), _MIN_TOKENS)
    value, error = statistics.mean_error(*blocks)
    low, high = (end if end is None else perplexity_of(end) for end in statistics.interval(*blocks))
    record: dict[str, Any] = {
        "n_scored": n,
        "perplexity": perplexity_of(value),
        "perplexity_low": low,
        "perplexity_high": high,
        "nll": value,
        "nll_stderr": None if np.isnan(error) else error,
        "nll_blocks": sums.tolist(),
    }
    names = ("nll_minus_full", "kl", "top1")
    values = (nll - scores.nll, scores.kl, scores.same.astype(np.float64)) if scores else (None,) * 3
    for name, of_tokens in zip(names, values, strict=True):
        mean = (None,) * 3 if of_tokens is None else mean_of_text(block_sums(of_tokens), n)
        record |= zip((name, f"{name}_stderr", f"{name}_margin"), mean, strict=True)
    return record


def encode(job: RunInput) -> bytes:
    """Encode the input of a run's process as JSON."""
    return json.dumps(asdict(job) | {"options": job.options.values()}).encode()


def decode(data: Mapping[str, Any]) -> RunInput:
    """Return the input of a run's process from its decoded JSON object."""
    return RunInput(**{**data, "options": ScoreOptions.from_values(data["options"], given=["policy"])})


def main() -> None:
    """Execute a run in its process. Ctrl-C is ignored here: the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (request := sys.stdin.read()):
        # the parent was stopped before it could send a job
        return
    job = decode(json.loads(request))
    # redirect stdout to stderr: output of a user's policy must not mix with the protocol's lines
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**event: object) -> None:
        try:
            out.write(json.dumps(event) + "\n")
            out.flush()
        except OSError:
            # the parent has ended
            os._exit(1)

    try:
        from kvtool.llama.libllama.crash import guard

        guard()
        send(record=measure(job, lambda n, nll: send(n=n, nll=nll)))
    except KvtoolError as error:
        if job.options.verbose:
            sys.stderr.writelines(users_traceback(error))
        send(error=str(error), exit_code=error.exit_code)
    except MemoryError:
        send(error=str(OutOfMemory()), exit_code=OutOfMemory.exit_code)
    except OSError as error:
        what = f" {error.filename}" if error.filename else ""
        send(error=f"cannot write{what}: {error.strerror or error}", exit_code=KvtoolError.exit_code)
    except Exception as error:  # noqa: BLE001  (the other runs go on)
        send(error=where(error), exit_code=KvtoolError.exit_code)
