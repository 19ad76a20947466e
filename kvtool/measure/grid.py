"""Grid of the runs of `kvtool compare`, which all use the same text.

Each run is one entry of the grid: a policy, a budget and a cache type. `KEY` names all fields on which the
result of a run depends. They identify the run, so that an interrupted comparison can be resumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from kvtool import policies
from kvtool.config import archive, budget
from kvtool.config.opening import check_read_once, settings_of
from kvtool.config.run import ScoreOptions
from kvtool.engine.checks import check
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.measure import divergence, records
from kvtool.models.layers import Layers
from kvtool.options import declared
from kvtool.policy import Policy

KEY = (
    *("model_sha256", "text_sha256", "tokens", "policy", "policy_sha256", "params", "budget"),
    *(name for name, its in declared(ScoreOptions).items() if its.in_record and name != "prefill"),
    *("lora", "archive", "kvtool", "llama_cpp_python", "patch"),
)
"""Fields of a record that identify a run."""


@dataclass(frozen=True, slots=True)
class Common:
    """Common data of all runs of a grid.

    what: fields that are the same in every record: model, text and versions.
    options: options of all runs; each run changes some of them. Context length and batch size are resolved to
    numbers.
    """

    what: Mapping[str, Any]
    options: ScoreOptions
    n_tokens: int

    @property
    def n_ctx(self) -> int:
        assert self.options.n_ctx is not None
        return self.options.n_ctx


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One entry of a grid.

    Attributes
    ----------
    label
        Policy with its parameters, as the user typed it.
    options
        Options of the run. They include the budget in cells and the number of tokens between evictions.
    params
        All parameters of the policy, with their values.
    typed_budget
        Budget as the user typed it. None for a run without a budget.
    budget
        Budget as a number of cells per row.
    policy_sha256
        SHA-256 of the policy's file. None for kvtool's own policies.
    recalls
        True if the policy has an archive.
    """

    label: str
    options: ScoreOptions
    policy: Policy
    settings: Settings
    params: Mapping[str, Any]
    typed_budget: str | None
    budget: int
    policy_sha256: str | None = None
    recalls: bool = False

    @property
    def title(self) -> str:
        return self.label if self.options.type_k == "f16" else f"{self.label} {self.options.type_k}"

    @property
    def name(self) -> str:
        return f"{self.title} {self.typed_budget}" if self.typed_budget else self.title

    @property
    def group(self) -> tuple[str | None, str, str]:
        """Budget and cache types. Runs are compared with each other if all of these are the same."""
        return self.typed_budget, self.options.type_k, self.options.type_v


def split_policy(text: str) -> tuple[str, tuple[str, ...]]:
    """Split "h2o:decay=0.999:window=64" into ("h2o", ("decay=0.999", "window=64")).

    The name may be a path with colons. Raises UsageError if a parameter stands alone or is not NAME=VALUE.
    """
    name, *options = re.split(r":(?=\w+=)", text.strip())
    example = "as in h2o:window=16:sinks=4"
    if re.fullmatch(r"\w+=.*", name) and not name.endswith(".py"):
        raise UsageError(f"{name!r} is not a policy; parameters follow colons, {example}")
    start, _, rest = name.partition(":")
    if rest and start in policies.names():
        raise UsageError(f"{start}: a parameter is NAME=VALUE, got {rest!r}; write it {example}")
    return name, tuple(options)


def runs(
    common: Common,
    n_ctx_train: int,
    layers: Layers,
    wanted: Sequence[str],
    budgets: Sequence[str],
    types: Sequence[str],
    *,
    combine: bool = False,
    say: Callable[[str], None] = lambda note: None,
) -> list[Run]:
    """Return the runs of a grid in order: first the runs without a budget, then budget by budget.

    `full` has a run for each cache type. Other policies have runs with the first type only, unless `combine`
    is True. A policy that chooses how much each row keeps (`capped`) also has a run without a budget.

    n_ctx_train: the model's trained context. wanted: policies with their parameters, as the user typed them.
    budgets: budgets as the user typed them. say: function that gets notes about runs with two names and about
    budgets that hold the whole text. Raises UsageError.
    """

    def evicts(text: str) -> bool:
        return policies.load(split_policy(text)[0]).evicts

    def kinds(text: str) -> Sequence[str]:
        return types if combine or not evicts(text) else types[:1]

    # use generators, so that entries are checked one by one: the error is then about the user's first mistake
    entries = chain(
        ((text, None, kind) for text in wanted if keeps_all_it_needs(text) for kind in kinds(text)),
        ((text, size, kind) for size in budgets for text in wanted if evicts(text) for kind in kinds(text)),
    )
    grid: dict[str, Run] = {}
    twins = dict[str, str]()
    for text, typed_budget, kind in entries:
        run = _run(common, n_ctx_train, layers, text.strip(), typed_budget, kind)
        first = grid.setdefault(records.key(identity(common, run), KEY), run)
        if run.name != first.name:
            twins[run.name] = first.name
    if twins:
        say("; ".join(f"{name} is the same run as {first}" for name, first in twins.items()))
    if note := _whole_note(grid.values(), common.n_tokens):
        say(note)
    return list(grid.values())


def _whole_note(grid: Iterable[Run], n_tokens: int) -> str | None:
    """Return a note about budgets that hold the whole text, because nothing is evicted there."""
    of_budget: dict[str, list[Run]] = {}
    for run in grid:
        # a `capped` policy may evict before the budget is full
        if run.typed_budget and not run.policy.capped:
            of_budget.setdefault(run.typed_budget, []).append(run)
    whole = []
    for typed, runs in of_budget.items():
        labels = [run.title for run in runs if run.budget >= n_tokens]
        if labels:
            share = f" of the trained context ({runs[0].budget:,} tokens)" if typed.endswith("%") else ""
            # a budget in bytes is another number of tokens for each policy and cache type
            whole.append(typed + share if len(labels) == len(runs) else f"{typed} ({', '.join(labels)})")
    if not whole:
        return None
    return f"nothing is evicted where the budget holds the text ({n_tokens:,} tokens): {', '.join(whole)}"


def keeps_all_it_needs(wanted: str) -> bool:
    """Return True for a policy that never evicts or is `capped`. Raises UsageError."""
    policy = policies.load(split_policy(wanted)[0])
    return policy.capped or not policy.evicts


def full_run(common: Common, n_ctx_train: int, layers: Layers) -> Run:
    """Return the run with the full f16 cache. All other runs are compared with its predictions."""
    return _run(common, n_ctx_train, layers, "full", None, "f16")


def identity(common: Common, run: Run) -> dict[str, Any]:
    """Return the fields of a record that describe its run. KEY names the fields that identify the run."""
    options = run.options
    limit = archive.limit(options.archive, options.archive_file)
    return {
        "policy": options.policy,
        "params": dict(run.params),
        "budget": run.budget,
        **common.what,
        "policy_sha256": run.policy_sha256,
        "tokens": common.n_tokens,
        **options.record_values(),
        "archive": (limit or None) if run.recalls else None,
        "archive_type": options.archive_type if run.recalls else None,
        "threads": options.threads,
        "rpc": list(options.workers),
    }


def reference(common: Common) -> Path:
    """Path of the file for the full cache's predictions of this text. The file may not exist yet."""
    names = ("model_sha256", "text_sha256", "kvtool", "llama_cpp_python", "patch")
    of_options = ("n_ctx", "n_batch", "flash", "gpu_layers")
    return divergence.path_of(
        {name: common.what[name] for name in names}
        | {"tokens": common.n_tokens}
        | {name: getattr(common.options, name) for name in of_options}
        | ({"lora": common.what["lora"]} if common.what.get("lora") else {})
        # runs with workers use another file, because --flash-attn auto may choose differently with workers
        | ({"rpc": True} if common.options.rpc else {})
    )


def _options(common: Common, name: str, options: tuple[str, ...], kind: str, **more: Any) -> ScoreOptions:
    """Return the options of a run. `typed` is empty, because users do not type options for single runs."""
    changes = {"policy": name, "options": options, "type_k": kind, "type_v": kind, **more}
    if not policies.load(name).evicts:
        # without evictions, these options change nothing; reset them, so that equal runs have equal options
        changes |= {"positions": "auto", "evict_every": None}
    return replace(common.options, **changes, typed=frozenset())


def _run(
    common: Common, n_ctx_train: int, layers: Layers, label: str, typed_budget: str | None, kind: str
) -> Run:
    from kvtool.llama.cache.decoder import choose_flash

    name, options = split_policy(label)
    check_read_once(common.options, name)
    chosen = _options(common, name, options, kind, budget=typed_budget)
    spec = policies.spec(name, chosen.evict_every, options, "--policies")
    # raise UsageError if the type does not fit the model's heads
    layers.cell_bytes(kind, kind)
    n_text = min(common.n_ctx, common.n_tokens)
    fitted = budget.fit_run(spec, chosen, layers, n_text, common.n_ctx, n_ctx_train)
    choose_flash(chosen.flash, kind, layers.has_alibi)
    if spec.kind.evicts:
        slack, n_batch = fitted.policy.slack, fitted.n_batch
        chosen = replace(chosen, budget=str(fitted.n), evict_every=slack or None, n_batch=n_batch)
    settings = settings_of(chosen, common.n_ctx, fitted.n_batch, fitted.n_batch)
    check(fitted.policy, settings, layers, common.n_ctx, n_ctx_train)
    # the parameters that the engine will use
    policy = fitted.policy.for_model(layers.n_group, layers.has_values)
    params, digest = policies.chosen(policy), policies.file_sha256(name)
    return Run(
        label,
        chosen,
        fitted.policy,
        settings,
        params,
        typed_budget,
        fitted.n,
        digest,
        spec.kind.has_recall(),
    )
