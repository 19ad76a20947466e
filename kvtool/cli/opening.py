"""From options to what runs: a checked model, a fitted policy, an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kvtool.cli.archive import archive_of, check_archive_file, check_archive_type, check_recalls
from kvtool.cli.locate import locate
from kvtool.errors import LibraryError, UsageError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine
    from kvtool.engine.settings import Settings
    from kvtool.llama.model import Model as LoadedModel
    from kvtool.models.header import ModelInfo
    from kvtool.models.layers import Layers
    from kvtool.policy import Policy as FittedPolicy


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The shared options. Each field but the last has the name of a command's parameter.

    typed: the names of the parameters that were typed, and have neither their default nor a session's value.
    """

    model: str | None
    policy: str
    budget: str | None
    options: list[str] | None
    evict_every: int | None
    positions: str
    n_ctx: int | None
    n_batch: int | None
    threads: int | None
    gpu_layers: int | None
    type_k: str
    type_v: str
    flash: str
    verbose: int
    prefill: str | None = None
    rpc: str | None = None
    archive: str | None = None
    archive_file: str | None = None
    archive_type: str = "q8_0"
    typed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, context: typer.Context) -> EngineOptions:
        """The options of the running command."""
        names = {field.name for field in fields(cls)}
        params = {name: value for name, value in context.params.items() if name in names}
        return cls(**params, typed=frozenset(name for name in params if is_typed(context, name)))


@dataclass(frozen=True, slots=True)
class Opened:
    """What `open_engine` gives.

    Attributes
    ----------
    engine
        Ready to read.
    info
        The header of its model.
    policy
        The name of its policy.
    """

    engine: Engine
    info: ModelInfo
    policy: str


class Fitted(NamedTuple):
    """What `fitted` gives.

    Attributes
    ----------
    policy
        The policy for the budget.
    n_batch
        The most tokens of a batch.
    in_bytes
        Whether the budget was typed in bytes, so that it depends on the model's layers.
    """

    policy: FittedPolicy
    n_batch: int
    in_bytes: bool


# the whole way


@contextmanager
def open_engine(
    wanted: EngineOptions,
    *,
    default_budget: int,
    n_batch: int,
    length: Callable[[Any], int] | None = None,
    scoring: bool = False,
    instead: str | None = None,
) -> Iterator[Opened]:
    """Load the model, fit the policy and make the engine; close them at the end. Raises KvtoolError.

    default_budget: cells of a row unless --budget is given. n_batch: unless -b is given. length: given the
    loaded model, returns how many tokens there will be; `full` allocates no more cells. scoring: the logits
    of every token are needed, and no batch may go over the budget. instead: the policy in place of one that
    recalls, where nothing can be recalled; without it that is refused.
    """
    from kvtool import policies

    path, info = checked_model(wanted)
    n_ctx = n_ctx_of(wanted.n_ctx, info)
    n_batch = wanted.n_batch or n_batch
    kind = policies.load(wanted.policy)
    # rows that may differ keep what they need; the budget is only a cap
    text = wanted.budget
    if text is None:
        text = str(n_ctx if kind.ragged else min(default_budget, n_ctx))
    # what is wrong with it is said before the model is loaded
    found = fitted(wanted, info, None, text, n_batch, over_budget=not scoring) if kind.evicts else None

    with loaded(path, wanted) as model:
        n_tokens = length(model) if length else n_ctx
        asked, wanted = wanted, able(wanted, model.layers, instead) if instead else wanted
        if found and (found.in_bytes or wanted is not asked):
            found = fitted(wanted, info, model.layers, text, n_batch, over_budget=not scoring)
        if found:
            policy, n_batch = found.policy, found.n_batch
            say_n_batch(wanted, text, n_batch)
        else:
            policy = policies.fit(wanted.policy, min(n_ctx, n_tokens), None, wanted.options)
        settings = settings_of(wanted, n_ctx, n_batch, n_batch if scoring else 1, over_budget=not scoring)

        from kvtool.engine.loop import Engine

        engine = Engine(model, policy, settings)
        try:
            yield Opened(engine, info, wanted.policy)
        finally:
            engine.close()


def able(wanted: EngineOptions, layers: Layers, instead: str) -> EngineOptions:
    """The options with another policy in place of one that recalls, where nothing can be recalled."""
    from kvtool import policies

    why = None
    if layers.has_alibi:
        why = "in this model (ALiBi)"
    elif wanted.prefill == "whole":
        why = "from a prompt that is read whole"
    elif wanted.positions == "in-cache":
        why = "with --positions in-cache"
    if not why or not policies.recalls(policies.load(wanted.policy)):
        return wanted
    sys.stderr.write(f"nothing can be recalled {why}: the policy is {instead}\n")
    return replace(wanted, policy=instead)


def take_saved(context: typer.Context, saved: Mapping[str, Any]) -> None:
    """Use a session's options for those that were not typed."""
    for name, value in saved.items():
        if name in context.params and not is_typed(context, name):
            context.params[name] = value


def is_default(context: typer.Context, name: str) -> bool:
    """Whether the running command's parameter of that name was neither typed nor set in a settings file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the running command's parameter of that name was typed."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def take_positional(context: typer.Context, name: str, option: str, flag: str) -> str | None:
    """The value of an option that may come as an argument too. Raises UsageError for both."""
    params = context.params
    if params[name] is not None:
        if is_typed(context, option):
            raise UsageError(
                f"{params[name]!r} and {flag} {params[option]!r} stand for the same; leave out one"
            )
        params[option] = params[name]
        # typed, too: it beats what a session has saved
        source = context.get_parameter_source(name)
        if source:
            context.set_parameter_source(option, source)
    value: str | None = params[option]
    return value


def system_text(text: str | None, file: str | None) -> str | None:
    """The system prompt from an option or a file. Raises UsageError for both, InputError for a bad file."""
    from kvtool.cli import utf8
    from kvtool.cli.texts import read_text

    if file is None:
        return utf8.option("--system", text)
    if text is not None:
        raise UsageError("--system and --system-file are both given; leave out one")
    return read_text(file).rstrip("\n")


# step by step


def checked_model(wanted: EngineOptions) -> tuple[Path, ModelInfo]:
    """The model's file, downloaded if need be, and its header. Raises KvtoolError.

    Options that cannot work are refused first, before a download.
    """
    from kvtool.cli.flags import check_cache_types

    check_cache_types(wanted.type_k, wanted.type_v)
    check_archive_type(wanted.archive_type)
    check_flash(wanted.flash)

    from kvtool import policies

    policy = policies.load(wanted.policy)
    if not policy.evicts and "budget" in wanted.typed:
        raise UsageError(f"`{wanted.policy}` keeps every token and takes no --budget; -c sets its cache size")
    policies.parse_options(policy, wanted.options or [])
    check_archive_file(wanted.archive_file)
    if wanted.archive is not None:
        archive_of(wanted.archive, wanted.archive_file, wanted.rpc)
    check_recalls([wanted.policy], wanted.typed)
    workers_of(wanted.rpc, wanted.gpu_layers)
    path, info = resolved(wanted.model)
    say_n_ctx(wanted.n_ctx, info)
    return path, info


def check_flash(flash: str) -> None:
    """Raise UsageError for a value that -fa does not take."""
    if flash not in ("on", "off", "auto"):
        raise UsageError(f"-fa must be on, off or auto, got {flash!r}")


def workers_of(rpc: str | None, gpu_layers: int | None) -> tuple[str, ...]:
    """The workers that --rpc names, "HOST:PORT" each. Raises UsageError."""
    if rpc is None:
        return ()

    from kvtool.llama import endpoints

    if gpu_layers == 0:
        raise UsageError("-ngl 0 leaves no layer for the workers of --rpc; leave out one of the two")
    return tuple(endpoints.parse(rpc))


def resolved(model: str | None) -> tuple[Path, ModelInfo]:
    """The file of a name or path, downloaded if need be, and its header. Raises KvtoolError."""
    from kvtool.models.resolve import check

    if model == "":
        raise UsageError("the model's name is empty; leave out -m for the default")
    path = locate(model)
    return path, check(path)


@contextmanager
def loaded(path: Path, wanted: EngineOptions) -> Iterator[LoadedModel]:
    """The model in memory; freed at the end. Raises KvtoolError."""
    from kvtool.llama.crash import guard
    from kvtool.llama.log import set_verbose
    from kvtool.llama.model import Model

    set_verbose(wanted.verbose > 1)
    guard()
    check_patch([wanted.policy])
    if workers := workers_of(wanted.rpc, wanted.gpu_layers):
        from kvtool.llama.workers import add_rpc

        add_rpc(*workers)
    model = Model(path, n_gpu_layers=wanted.gpu_layers)
    try:
        yield model
    finally:
        model.close()


def check_patch(names: Sequence[str]) -> None:
    """Warn on stderr if llama.cpp is not patched. Raises LibraryError if one of the policies needs it."""
    from kvtool import policies
    from kvtool.llama.library import HOW_TO_BUILD, is_patched

    if is_patched():
        return
    needing = [name for name in names if policies.load(name).needs_patch()]
    plain = ", ".join(runnable())
    without = "this llama.cpp was built without kvtool's patch"
    if needing:
        raise LibraryError(
            f"{without}, which {', '.join(needing)} needs; {HOW_TO_BUILD}, or choose one of {plain}"
        )
    sys.stderr.write(
        f"{without}: only {plain} run, and all KV heads keep the same tokens; for the rest {HOW_TO_BUILD}\n"
    )


def runnable() -> list[str]:
    """kvtool's policies that run with the installed llama.cpp, those that never evict first."""
    from kvtool import policies
    from kvtool.llama.library import is_patched

    kinds = {name: policies.load(name) for name in policies.names()}
    return sorted(
        (name for name in kinds if is_patched() or not kinds[name].needs_patch()),
        key=lambda name: kinds[name].evicts,
    )


def n_ctx_of(asked: int | None, info: ModelInfo) -> int:
    """The context length: the trained one, or less if less is asked for."""
    return min(asked or info.n_ctx_train, info.n_ctx_train)


def say_n_ctx(asked: int | None, info: ModelInfo) -> None:
    """Say on stderr that a context length above the trained one is cut."""
    if asked and asked > info.n_ctx_train:
        sys.stderr.write(
            f"-c {asked:,} is above the model's trained length; it runs with {info.n_ctx_train:,}\n"
        )


def fitted(
    wanted: EngineOptions,
    info: ModelInfo,
    layers: Layers | None,
    budget_text: str,
    n_batch: int,
    *,
    over_budget: bool,
) -> Fitted:
    """The policy for a budget as it was typed, and the batch size that goes with it. Raises UsageError.

    layers: of the loaded model; None before that. over_budget: whether a batch may go over the budget; a
    budget in bytes then has to hold the batch, too.
    """
    from kvtool import policies
    from kvtool.models import budget

    n, batch = budget.parse(budget_text, info.n_ctx_train, layers, n_batch, wanted.type_k, wanted.type_v)
    slack = wanted.evict_every or policies.default_slack(n)
    if batch:
        n -= max(batch - slack, 0) if over_budget else 0
    policy = policies.fit(wanted.policy, n, wanted.evict_every, wanted.options)
    if batch:
        budget.check_bytes(budget_text, n, policy.budget)
    return Fitted(policy, batch or n_batch, batch is not None)


def say_n_batch(wanted: EngineOptions, budget_text: str, n_batch: int) -> None:
    """Say on stderr that batches of a size that was asked for do not fit into a budget in bytes."""
    if wanted.n_batch and wanted.n_batch > n_batch:
        sys.stderr.write(f"-b {wanted.n_batch:,} does not fit into {budget_text}; it runs with {n_batch:,}\n")


def settings_of(
    wanted: EngineOptions, n_ctx: int, n_batch: int, n_output: int, over_budget: bool
) -> Settings:
    """The engine's settings. Raises UsageError."""
    from kvtool.engine.settings import Settings

    return Settings(
        positions=wanted.positions,
        prefill=wanted.prefill,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_output=n_output,
        over_budget=over_budget,
        type_k=wanted.type_k,
        type_v=wanted.type_v,
        archive_file=wanted.archive_file,
        archive_type=wanted.archive_type,
        flash=wanted.flash,
        n_threads=wanted.threads,
        **(archive_of(wanted.archive, wanted.archive_file, wanted.rpc) if wanted.archive is not None else {}),
    )
