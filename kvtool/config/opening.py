"""Make an engine from options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvtool import policies
from kvtool.config import archive, budget
from kvtool.config.drafting import max_draft_tokens, uses_mtp
from kvtool.config.model import find_model, opened_on_model
from kvtool.config.notes import file_note, gpu_note, resident_note, within_context
from kvtool.config.run import ChatOptions, RunOptions
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.models.header import ModelInfo
from kvtool.models.layers import Layers
from kvtool.units import PLAIN, parse_bytes

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine
    from kvtool.llama.loaded.model import Model
    from kvtool.policy import Policy


_N_CELL = 4096
"""A GPU keeps room for this many cells per row if the cache size is unknown until the model is loaded."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine with an empty cache, and the options with which it runs.

    run: the options that are used. They may have another policy than the requested ones: see
    `replace_recall`.
    notes: notes for the user about options that were changed or that have no effect.
    """

    engine: Engine
    info: ModelInfo
    run: RunOptions
    notes: list[str]


@contextmanager
def open_run(
    run: RunOptions,
    *,
    length: Callable[[Model], int] | None = None,
    guarded: bool = False,
    n_output: int = 1,
) -> Iterator[Opened]:
    """Load the model, fit the policy to the budget, and make the engine. Close model and engine at the end.

    All options that can be checked without the model are checked before the model is loaded. Raises
    KvtoolError if the options cannot work.

    length: function that takes the loaded model and returns the length of the text in tokens. If the policy
    never evicts, the cache gets no more cells than this.
    guarded: see `opened_on_model`. Only for command-line programs.
    n_output: maximum number of tokens of a step for which logits are computed. Ignored if all tokens are
    scored.
    """
    spec = check(run)
    info = find_model(run.model)
    run, n_ctx, limits = within_context(run, info.n_ctx_train)
    fitted = budget.fit_cells(spec, run, info, n_ctx)

    # imported here, so that wrong options are reported before llama.cpp is loaded
    from kvtool.engine import residents
    from kvtool.engine.checks import for_model
    from kvtool.engine.loop import Engine

    n_cell = fitted.policy.n_live + fitted.n_batch if fitted else min(n_ctx, _N_CELL)
    if run.resident and spec.kind.has_recall():
        n_cell += residents.n_cells(run.resident, n_ctx)
    placed_notes: list[str] = []

    def open_on(model: Model) -> tuple[Engine, RunOptions, list[str | None]]:
        n_text = length(model) if length else n_ctx
        own, replaced_note = replace_recall(run, spec.kind, model.layers)
        own_spec, own_fitted = (check(own), None) if replaced_note else (spec, fitted)
        own = archive.with_type(own, info)
        own_fitted = own_fitted or budget.fit_run(
            own_spec, own, model.layers, min(n_ctx, n_text), n_ctx, info.n_ctx_train
        )
        n_batch, policy = own_fitted.n_batch, own_fitted.policy
        n_draft = max_draft_tokens(own, model.layers, own_spec.kind, n_batch)
        settings = settings_of(own, n_ctx, n_batch, n_batch if own.scores else n_output, n_draft)
        engine = Engine(model, policy, settings)
        engine.cache.smallest_budget = lambda n_pinned, n_held: own_spec.smallest_budget(
            n_held, partial(for_model, model=model), n_pinned=n_pinned
        )
        return engine, own, [replaced_note, own_fitted.note, resident_note(engine)]

    with opened_on_model(
        run,
        info,
        open_on,
        guarded=guarded,
        mtp=uses_mtp(run, info),
        n_cell=n_cell,
        say=placed_notes.append,
    ) as (engine, own, own_notes):
        notes = [file_note(run.model, info.path), *limits, gpu_note(run), *placed_notes, *own_notes]
        try:
            yield Opened(engine, info, own, [note for note in notes if note])
        finally:
            engine.close()


def check(run: RunOptions) -> policies.PolicySpec:
    """Return the policy that the options name. Raises UsageError if no model works with the options."""
    spec = policies.spec(run.policy, run.evict_every, run.options)
    if not spec.kind.evicts:
        if "budget" in run.typed:
            raise UsageError(
                f"`{run.policy}` keeps every token and takes no --budget; --ctx-size sets its cache size"
            )
        spec = spec._replace(evict_every=None)
    check_read_once(run, run.policy)
    archive.check(run, {run.policy: spec.kind})
    return spec


def check_read_once(run: RunOptions, policy: str) -> None:
    """Raise UsageError if a text is streamed and the policy reads texts twice."""
    if run.scores and run.prefill is None and policies.load(policy).has_reconstruction():
        raise UsageError(
            f"`{policy}` reads a prompt twice, but here the text is read only once; choose another policy, "
            "or use generate or eval"
        )


def replace_recall(run: RunOptions, kind: type[Policy], layers: Layers) -> tuple[RunOptions, str | None]:
    """Replace the default policy, recall, if it does not work with the model or with --positions in-cache.

    Returns the options and a note, which is None if the policy was not replaced.
    """
    if not (run.instead and kind.has_recall()):
        return run, None
    if layers.only_full:
        note = f"this model runs only with the policy full: {layers.only_full}"
        return run.changed(policy="full"), note
    if layers.has_alibi:
        obstacle = "in this model (ALiBi)"
    elif run.positions == "in-cache":
        obstacle = "with --positions in-cache"
    else:
        return run, None
    note = f"recall does not work {obstacle}; the policy is {run.instead}"
    return run.changed(policy=run.instead), note


def _checkpoint_bytes(run: RunOptions) -> int | None:
    """Return the limit of the checkpoints in bytes, or None for the default.

    The limit is 0 for runs that never go back to an earlier state.
    """
    if not isinstance(run, ChatOptions):
        return 0
    return None if run.checkpoints is None else parse_bytes(run.checkpoints)


def settings_of(run: RunOptions, n_ctx: int, n_batch: int, n_output: int, n_draft: int = 0) -> Settings:
    """Return the engine's settings. Raises UsageError."""
    return Settings(
        positions=run.positions,
        prefill=run.prefill,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_output=n_output,
        n_draft=n_draft,
        over_budget=not run.scores,
        type_k=run.type_k,
        type_v=run.type_v,
        archive_file=str(run.archive_file) if run.archive_file else None,
        archive_type=PLAIN * run.is_plain + run.archive_type,
        resident=run.resident,
        checkpoints=_checkpoint_bytes(run),
        flash=run.flash,
        n_threads=run.threads,
        **archive.limit(run.archive, run.archive_file),
    )
