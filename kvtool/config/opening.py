"""From options to an engine: a model that can run, a policy that fits, and the notes that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtool import policies
from kvtool.config import archive, budget
from kvtool.config.ahead import n_ahead_of
from kvtool.config.run import RunOptions
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, UsageError
from kvtool.llama import endpoints
from kvtool.models import resolve
from kvtool.models.header import ModelInfo
from kvtool.models.layers import Layers

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
    run: RunOptions
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
    note
        What to say where batches of the size asked for do not fit into it.
    """

    policy: Policy
    n: int
    n_batch: int
    in_bytes: bool
    note: str | None


@contextmanager
def open_run(
    run: RunOptions,
    *,
    length: Callable[[Model], int] | None = None,
    find: Find = resolve.resolve,
    guarded: bool = False,
    n_output: int = 1,
) -> Iterator[Opened]:
    """Loads the model, fits the policy, and makes the engine; closes them at the end.

    Parameters
    ----------
    run
        The options.
    length
        Given the loaded model, returns how many tokens there will be; `full` has no more cells.
    find
        Finds the model's file.
    guarded
        Whether a crash of compiled code ends the process with one line: for programs.
    n_output
        The most tokens of a step that give logits, where the run is not for scores.

    Raises
    ------
    KvtoolError
        For what cannot work. What can be known of that before the model is loaded is known then.
    """
    wanted, limit, workers = resolved(run)
    path, info = located(run.model, find)
    n_ctx, cut = n_ctx_of(run.n_ctx, info.n_ctx_train)
    text = _budget(run, wanted.kind, n_ctx)
    found = early_fitted(wanted, run, text, info) if wanted.kind.evicts else None

    # what is wrong with an option is said where there is no llama.cpp as well
    from kvtool.engine.loop import Engine

    notes = [cut, patch_note({wanted.name: wanted.kind})]
    with loaded(path, run.gpu_layers, workers, verbose=run.verbose > 1, guarded=guarded) as model:
        n_tokens = length(model) if length else n_ctx
        notes.append(gpu_note(run.gpu_layers))
        run, note = instead(run, wanted.kind, model.layers)
        if note:
            notes.append(note)
            wanted, found = resolved(run).wanted, None
            text = _budget(run, wanted.kind, n_ctx)
        if not wanted.kind.evicts:
            text = str(min(n_ctx, n_tokens))
        if found is None or found.in_bytes or not _suits(found.policy, model.layers):
            found = fitted(wanted, run, text, info.n_ctx_train, model.layers)
        if found.in_bytes and run.scores:
            found = _beside_made(found, wanted, model)
        notes.append(found.note)
        n_output = found.n_batch if run.scores else n_output
        n_ahead = n_ahead_of(run, model.layers, wanted.kind, found.n_batch)
        settings = settings_of(run, limit, n_ctx, found.n_batch, n_output, n_ahead)
        engine = Engine(model, found.policy, settings)
        try:
            yield Opened(engine, info, run, [note for note in notes if note])
        finally:
            engine.close()


class Resolved(NamedTuple):
    """What options stand for, whatever the model is.

    Attributes
    ----------
    wanted
        The policy, without its budget.
    limit
        Of the archive, see `archive.limit`.
    workers
        Of --rpc, "HOST:PORT" each.
    """

    wanted: policies.PolicySpec
    limit: dict[str, int]
    workers: tuple[str, ...]


def resolved(run: RunOptions) -> Resolved:
    """What the options stand for. Raises UsageError for those that cannot work, whatever the model is."""
    kind = policies.load(run.policy)
    if not kind.evicts and "budget" in run.typed:
        raise UsageError(
            f"`{run.policy}` keeps every token and takes no --budget; --ctx-size sets its cache size"
        )
    check_stream(run, run.policy)
    params = policies.parse_options(run.policy, kind, run.options)
    wanted = policies.PolicySpec(run.policy, kind, params, run.evict_every if kind.evicts else None)
    return Resolved(wanted, archive.checked(run, {run.policy: kind}), workers_of(run.rpc, run.gpu_layers))


def check_stream(run: RunOptions, name: str) -> None:
    """Raises UsageError where a text is streamed under a policy that reads it twice. name: the policy's."""
    if run.scores and run.prefill is None and policies.has_reconstruction(policies.load(name)):
        raise UsageError(
            f"`{name}` reads a prompt twice, but here the text is read only once; choose another policy, or "
            "use generate or eval"
        )


def instead(run: RunOptions, kind: type[Policy], layers: Layers) -> tuple[RunOptions, str | None]:
    """The options that hold where nothing can be recalled and nobody asked for that, and what to say of it.

    kind: the policy. layers: of the loaded model.
    """
    why = _no_recall(run.positions, has_alibi=layers.has_alibi)
    if not (run.instead and why and policies.recalls(kind)):
        return run, None
    note = f"recall does not work {why}; the policy is {run.instead}"
    return run.changed(policy=run.instead), note


def located(model: str | None, find: Find = resolve.resolve) -> tuple[Path, ModelInfo]:
    """The model's file, downloaded if need be, and its header. Raises KvtoolError."""
    if model == "":
        raise UsageError("the model's name is empty; leave out --model for the default")
    path = find(model)
    return path, resolve.check(path)


def workers_of(rpc: str | None, gpu_layers: int | None) -> tuple[str, ...]:
    """The workers that --rpc names, "HOST:PORT" each. Raises UsageError."""
    if rpc is None:
        return ()
    if gpu_layers == 0:
        raise UsageError("--gpu-layers 0 leaves no layer for the workers of --rpc; leave out one of them")
    return tuple(endpoints.parse(rpc))


@contextmanager
def loaded(
    path: Path, gpu_layers: int | None, workers: Sequence[str], *, verbose: bool, guarded: bool = False
) -> Iterator[Model]:
    """The model in memory; freed at the end. Raises KvtoolError."""
    from kvtool.llama import crash
    from kvtool.llama.log import set_verbose
    from kvtool.llama.model import Model

    set_verbose(verbose)
    if guarded:
        crash.guard()
    if workers:
        from kvtool.llama.workers import add_rpc

        add_rpc(*workers)
    model = Model(path, n_gpu_layers=gpu_layers)
    try:
        yield model
    finally:
        model.close()


def _budget(run: RunOptions, kind: type[Policy], n_ctx: int) -> str:
    """The budget as it was given, or the default one."""
    if run.budget is not None:
        return run.budget
    # rows that may differ keep what they need; the budget is only a cap
    n = n_ctx if kind.capped else run.default_recall if policies.recalls(kind) else run.default_budget
    return str(min(n, n_ctx))


def _no_recall(positions: str, *, has_alibi: bool) -> str | None:
    """Why a policy that recalls has nothing to recall; None where it has."""
    if has_alibi:
        return "in this model (ALiBi)"
    return "with --positions in-cache" if positions == "in-cache" else None


def n_ctx_of(asked: int | None, n_ctx_train: int) -> tuple[int, str | None]:
    """The context length, and what to say where more than the trained one is asked for."""
    if asked and asked > n_ctx_train:
        return (
            n_ctx_train,
            f"--ctx-size {asked:,} is above the model's trained length; {n_ctx_train:,} is used",
        )
    return asked or n_ctx_train, None


def gpu_note(gpu_layers: int | None) -> str | None:
    """Return the note on --gpu-layers without a GPU, or None. Call it once workers are known."""
    from kvtool.llama.devices import has_gpu

    if not gpu_layers or has_gpu():
        return None
    return f"--gpu-layers {gpu_layers} does nothing: kvtool finds no GPU (`kvtool doctor` lists the devices)"


def patch_note(kinds: Mapping[str, type[Policy]]) -> str | None:
    """What to say where llama.cpp is not patched. Raises LibraryError if one of the policies needs it."""
    from kvtool.llama.library import HOW_TO_BUILD, UNPATCHED, is_patched

    if is_patched():
        return None
    plain = ", ".join(runnable())
    if needing := [name for name, kind in kinds.items() if kind.needs_patch()]:
        raise LibraryError(
            f"{UNPATCHED}, which {', '.join(needing)} needs; {HOW_TO_BUILD}, or choose one of {plain}"
        )
    return (
        f"{UNPATCHED}: only {plain} run, and all KV heads keep the same tokens; for the rest {HOW_TO_BUILD}"
    )


def runnable() -> dict[str, type[Policy]]:
    """kvtool's policies that run with the installed llama.cpp, those that never evict first."""
    from kvtool.llama.library import is_patched

    kinds = {name: policies.load(name) for name in policies.names()}
    found = {name: kind for name, kind in kinds.items() if is_patched() or not kind.needs_patch()}
    return dict(sorted(found.items(), key=lambda item: item[1].evicts))


def early_fitted(wanted: policies.PolicySpec, run: RunOptions, text: str, info: ModelInfo) -> Fitted:
    """Return what `fitted` does before the model is loaded.

    Raises UsageError, with the smallest budget that works for the model of this header.
    """
    try:
        return fitted(wanted, run, text, info.n_ctx_train)
    except UsageError:
        fitted(wanted, run, text, info.n_ctx_train, info.plain_layers)
        raise


def fitted(
    wanted: policies.PolicySpec, run: RunOptions, text: str, n_ctx_train: int, layers: Layers | None = None
) -> Fitted:
    """Return the policy for a budget as it was typed, and the batch size that goes with it.

    layers: of the loaded model; None before it is loaded. If a batch may exceed the budget, a budget in bytes
    includes the batch. Raises UsageError, with the smallest budget that works.
    """
    n_batch = run.n_batch or run.default_n_batch
    n, batch = budget.parse(text, n_ctx_train, layers, n_batch, run.type_k, run.type_v)
    if batch and not run.scores:
        n -= max(batch - wanted.slack(n), 0)
    policy = wanted.fit(n, partial(_on, layers) if layers else lambda policy: policy)
    if batch and policy.budget > n:
        raise UsageError(
            f"--budget {text}: with these parameters a row takes more than its budget at times, so bytes "
            "would not bound it; give it in tokens (512) or as a share (10%)"
        )
    is_less = run.n_batch and batch and batch < n_batch
    note = f"--batch-size {n_batch:,} does not fit into {text}; {batch:,} is used" if is_less else None
    return Fitted(policy, n, batch or n_batch, batch is not None, note)


def _on(layers: Layers, policy: Policy) -> Policy:
    """The policy for a model with these layers. Raises ValueError for a budget that is too small for it."""
    return policy.on(layers.n_group, layers.has_values)


def _suits(policy: Policy, layers: Layers) -> bool:
    with suppress(ValueError):
        return bool(_on(layers, policy))
    return False


def _beside_made(found: Fitted, wanted: policies.PolicySpec, model: Model) -> Fitted:
    """The same in as many cells less as a step fills with what is recalled, so that bytes bound those too."""
    from kvtool.engine.stream import on_model

    policy = on_model(found.policy, model)
    if not policy.recall:
        return found
    n = 2 * found.n - policy.n_live - policy.recall.n_filled(model.layers.has_values)
    return found._replace(policy=wanted.fit(n), n=n) if n < found.n else found


def settings_of(
    run: RunOptions, limit: Mapping[str, int], n_ctx: int, n_batch: int, n_output: int, n_ahead: int = 0
) -> Settings:
    """The engine's settings. limit: of the archive. Raises UsageError."""
    own: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_batch, "n_threads": run.threads, **limit}
    names = {each.name for each in fields(Settings)} - own.keys() - {"archive", "archive_bytes"}
    shared = {name: getattr(run, name) for name in names if hasattr(run, name)}
    return Settings(**shared, **own, n_output=n_output, n_ahead=n_ahead, over_budget=not run.scores)
