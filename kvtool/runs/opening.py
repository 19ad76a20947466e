"""From options to an engine: a model that can run, a policy that fits, and the notes that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtool import policies
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, UsageError
from kvtool.llama import endpoints
from kvtool.models import budget, resolve
from kvtool.models.header import ModelInfo
from kvtool.models.layers import Layers
from kvtool.options.run import Run
from kvtool.runs import archive

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine
    from kvtool.llama.model import Model
    from kvtool.policy import Policy

Find = Callable[[str | None], Path]
"""From what -m says to a model's file, which is downloaded if need be."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, and what it was made of.

    Attributes
    ----------
    engine
        Ready to read.
    info
        The header of its model.
    run
        The options that hold: another policy than asked for, for example, where that cannot run.
    notes
        What a user should know of how the options were taken, a line each.
    """

    engine: Engine
    info: ModelInfo
    run: Run
    notes: list[str]


class Fitted(NamedTuple):
    """A policy for a budget.

    Attributes
    ----------
    policy
        The policy.
    n
        The budget in cells.
    n_batch
        The most tokens of a batch.
    in_bytes
        Whether the budget is in bytes, so that it depends on the model's layers.
    """

    policy: Policy
    n: int
    n_batch: int
    in_bytes: bool


@contextmanager
def open_run(
    run: Run,
    *,
    length: Callable[[Model], int] | None = None,
    instead: str | None = None,
    find: Find = resolve.resolve,
    guarded: bool = False,
) -> Iterator[Opened]:
    """Loads the model, fits the policy, and makes the engine; closes them at the end.

    Parameters
    ----------
    run
        The options.
    length
        Given the loaded model, returns how many tokens there will be; `full` has no more cells.
    instead
        The policy in place of one that recalls, where nothing can be recalled. Without it that is refused.
    find
        Finds the model's file.
    guarded
        Whether a crash of compiled code ends the process with one line: for programs.

    Raises
    ------
    KvtoolError
        For what cannot work. What can be known of that before the model is loaded is known then.
    """
    check_options(run)
    path, info = located(run, find)
    n_ctx, kind, text = n_ctx_of(run, info), policies.load(run.policy), run.budget
    if text is None:
        # rows that may differ keep what they need; the budget is only a cap
        text = str(n_ctx if kind.ragged else min(run.default_budget, n_ctx))
    found = fitted(run, info.n_ctx_train, None, text) if kind.evicts else None

    # what is wrong with an option is said where there is no llama.cpp as well
    from kvtool.engine.loop import Engine

    with loaded(path, run, guarded=guarded) as model:
        notes = [n_ctx_note(run, info), patch_note([run.policy])]
        n_tokens = length(model) if length else n_ctx
        if why := _no_recall(run, model.layers) if instead else None:
            notes.append(f"nothing can be recalled {why}: the policy is {instead}")
            run = run.changed(policy=instead)
        if found and (found.in_bytes or why):
            found = fitted(run, info.n_ctx_train, model.layers, text)
        if found:
            notes.append(n_batch_note(run, text, found))
        else:
            found = unbounded(run, min(n_ctx, n_tokens))
        n_output = found.n_batch if run.scores else 1
        engine = Engine(model, found.policy, settings_of(run, n_ctx, found.n_batch, n_output))
        try:
            yield Opened(engine, info, run, [note for note in notes if note])
        finally:
            engine.close()


def check_options(run: Run, names: Sequence[str] = ()) -> None:
    """Raise UsageError for options that cannot work, whatever the model is.

    names: the policies, if not the run's.
    """
    if not names:
        policy = policies.load(run.policy)
        if not policy.evicts and "budget" in run.typed:
            raise UsageError(
                f"`{run.policy}` keeps every token and takes no --budget; -c sets its cache size"
            )
        policies.parse_options(policy, run.options)
    archive.check_file(run.archive_file)
    archive.limit(run)
    archive.check_recalls(names or [run.policy], run.typed)
    workers_of(run)


def located(run: Run, find: Find = resolve.resolve) -> tuple[Path, ModelInfo]:
    """The model's file, downloaded if need be, and its header. Raises KvtoolError."""
    if run.model == "":
        raise UsageError("the model's name is empty; leave out -m for the default")
    path = find(run.model)
    return path, resolve.check(path)


def workers_of(run: Run) -> tuple[str, ...]:
    """The workers that --rpc names, "HOST:PORT" each. Raises UsageError."""
    if run.rpc is None:
        return ()
    if run.gpu_layers == 0:
        raise UsageError("-ngl 0 leaves no layer for the workers of --rpc; leave out one of the two")
    return tuple(endpoints.parse(run.rpc))


@contextmanager
def loaded(path: Path, run: Run, *, guarded: bool = False) -> Iterator[Model]:
    """The model in memory; freed at the end. Raises KvtoolError."""
    from kvtool.llama import crash
    from kvtool.llama.log import set_verbose
    from kvtool.llama.model import Model

    set_verbose(run.verbose > 1)
    if guarded:
        crash.guard()
    patch_note([run.policy])
    if workers := workers_of(run):
        from kvtool.llama.workers import add_rpc

        add_rpc(*workers)
    model = Model(path, n_gpu_layers=run.gpu_layers)
    try:
        yield model
    finally:
        model.close()


def _no_recall(run: Run, layers: Layers) -> str | None:
    """Why the policy, which recalls, has nothing to recall; None where it has, or does not recall."""
    why = None
    if layers.has_alibi:
        why = "in this model (ALiBi)"
    elif run.prefill == "whole":
        why = "from a prompt that is read whole"
    elif run.positions == "in-cache":
        why = "with --positions in-cache"
    return why if policies.recalls(policies.load(run.policy)) else None


def n_ctx_of(run: Run, info: ModelInfo) -> int:
    """The context length: the trained one, or less if less is asked for."""
    return min(run.n_ctx or info.n_ctx_train, info.n_ctx_train)


def n_ctx_note(run: Run, info: ModelInfo) -> str | None:
    """What to say where a context length above the trained one is cut."""
    if not run.n_ctx or run.n_ctx <= info.n_ctx_train:
        return None
    return f"-c {run.n_ctx:,} is above the model's trained length; it runs with {info.n_ctx_train:,}"


def n_batch_note(run: Run, budget_text: str, found: Fitted) -> str | None:
    """What to say where batches of the size asked for do not fit into a budget in bytes."""
    if not run.n_batch or run.n_batch <= found.n_batch:
        return None
    return f"-b {run.n_batch:,} does not fit into {budget_text}; it runs with {found.n_batch:,}"


def patch_note(names: Sequence[str]) -> str | None:
    """What to say where llama.cpp is not patched. Raises LibraryError if one of the policies needs it."""
    from kvtool.llama.library import HOW_TO_BUILD, UNPATCHED, is_patched

    if is_patched():
        return None
    plain = ", ".join(runnable())
    if needing := [name for name in names if policies.load(name).needs_patch()]:
        raise LibraryError(
            f"{UNPATCHED}, which {', '.join(needing)} needs; {HOW_TO_BUILD}, or choose one of {plain}"
        )
    return (
        f"{UNPATCHED}: only {plain} run, and all KV heads keep the same tokens; for the rest {HOW_TO_BUILD}"
    )


def runnable() -> list[str]:
    """kvtool's policies that run with the installed llama.cpp, those that never evict first."""
    from kvtool.llama.library import is_patched

    kinds = {name: policies.load(name) for name in policies.names()}
    return sorted(
        (name for name in kinds if is_patched() or not kinds[name].needs_patch()),
        key=lambda name: kinds[name].evicts,
    )


def fitted(run: Run, n_ctx_train: int, layers: Layers | None, text: str) -> Fitted:
    """The policy for a budget as it was typed, and the batch size that goes with it. Raises UsageError.

    layers: of the loaded model; None before that. Where a batch may go over the budget, one in bytes has to
    hold the batch, too.
    """
    n_batch = run.n_batch or run.default_n_batch
    n, batch = budget.parse(text, n_ctx_train, layers, n_batch, run.type_k, run.type_v)
    if batch and not run.scores:
        n -= max(batch - (run.evict_every or policies.default_slack(n)), 0)
    policy = policies.fit(run.policy, n, run.evict_every, run.options)
    if batch:
        budget.check_bytes(text, n, policy.budget)
    return Fitted(policy, n, batch or n_batch, batch is not None)


def unbounded(run: Run, n: int) -> Fitted:
    """A policy that never evicts, with n cells. Raises UsageError."""
    policy = policies.fit(run.policy, n, None, run.options)
    return Fitted(policy, n, run.n_batch or run.default_n_batch, in_bytes=False)


def settings_of(run: Run, n_ctx: int, n_batch: int, n_output: int) -> Settings:
    """The engine's settings. Raises UsageError."""
    own: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_threads": run.threads, **archive.limit(run)}
    names = {each.name for each in fields(Settings)} - own.keys() - {"archive", "archive_bytes"}
    shared = {name: getattr(run, name) for name in names if hasattr(run, name)}
    return Settings(**shared, **own, n_output=n_output, over_budget=not run.scores)
