"""What an engine will do, told beforehand."""

from __future__ import annotations

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.engine.prefill import n_cells


def first_plan(engine: Engine, n_text: int = 0) -> int | None:
    """After how many tokens of a new stream the first plan comes; None: never.

    n_text: how many of them are read as one text. The others come one by one.
    """
    policy, settings = engine.policy, engine.settings
    if not policy.slack:
        return None
    if engine.reads_whole(n_text):
        return n_text
    due = min(policy.budget, policy.slack) if policy.ragged else policy.n_live
    if not settings.over_budget or policy.recall:
        return due
    # a text is read in whole batches, as long as they fit
    n_batch = settings.n_batch
    return max(due, min(-(-due // n_batch) * n_batch, n_text, engine.n_cell))


def whole_signal_bytes(engine: Engine, n: int) -> int:
    """Bytes of the signals beside these, and of queries."""
    return engine.context.signal_bytes(np.full_like(engine.context.layer_cells, n_cells(engine, n)))
