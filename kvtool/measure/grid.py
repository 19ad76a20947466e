"""A grid: the runs that `kvtool compare` makes of policies, budgets and cache types on one text.

A run is one entry of the grid: a policy, a budget and a cache type. It is known by what its record depends on
(`KEY`), so an interrupted comparison can be resumed, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.measure import divergence, records
from kvtool.models import budget
from kvtool.models.layers import Layers

KEY = (
    "model_sha256",
    "text_sha256",
    "tokens",
    "policy",
    "policy_sha256",
    "params",
    "budget",
    "type_k",
    "type_v",
    "positions",
    "evict_every",
    "n_ctx",
    "n_batch",
    "flash",
    "gpu_layers",
    "archive",
    "archive_type",
    "kvtool",
    "llama_cpp_python",
    "patch",
)
"""The fields of a record that tell one run from another."""

_COARSE = ("q4_0", "q4_1")


@dataclass(frozen=True, slots=True)
class Common:
    """What all runs of a grid share.

    Attributes
    ----------
    what
        Fields that go into every record: model, text and versions.
    model
        The model file.
    n_tokens
        Tokens of the text.
    n_ctx
        Context length in tokens.
    n_batch
        The most tokens of a batch.
    positions
        "original", "in-cache" or "auto".
    flash
        Flash attention: "on", "off" or "auto".
    threads
        CPU threads of one run; None for as many as are fastest.
    gpu_layers
        Layers on the GPU; None for all.
    rpc
        Workers, "HOST:PORT" each.
    archive
        The setting `archive` or `archive_bytes` of policies that recall; neither for the default.
    archive_file
        Where they keep their archives; None for host memory. A record of either is the same.
    archive_type
        Type of what these policies archive.
    verbose
        Whether llama.cpp's log goes to stderr.
    """

    what: Mapping[str, Any]
    model: Path
    n_tokens: int
    n_ctx: int
    n_batch: int
    positions: str
    flash: str
    threads: int | None
    gpu_layers: int | None = None
    rpc: tuple[str, ...] = ()
    archive: Mapping[str, int] = field(default_factory=dict)
    archive_file: str | None = None
    archive_type: str = "q8_0"
    verbose: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One entry of a grid.

    Attributes
    ----------
    label
        The policy as it was typed, with its parameters.
    policy
        Its name, or the path of a policy file.
    options
        Its parameters as they were typed, "window=64" for example.
    params
        All its parameters, with their values.
    asked
        The budget as it was typed; None for a run that keeps all it needs.
    budget
        The budget in cells of a row.
    evict_every
        Tokens from one eviction to the next; None for a policy that never evicts.
    n_batch
        The most tokens of a batch.
    positions
        "original", "in-cache" or "auto".
    type_k
        Type of the cached keys.
    type_v
        Type of the cached values.
    policy_sha256
        Hash of the policy's file, if it is a user's.
    recalls
        Whether the policy has an archive.
    """

    label: str
    policy: str
    options: tuple[str, ...]
    params: Mapping[str, Any]
    asked: str | None
    budget: int
    evict_every: int | None
    n_batch: int
    positions: str
    type_k: str
    type_v: str
    policy_sha256: str | None = None
    recalls: bool = False

    @property
    def title(self) -> str:
        """The policy as it was typed, and the cache type unless it is f16."""
        return self.label if self.type_k == "f16" else f"{self.label} {self.type_k}"

    @property
    def name(self) -> str:
        """The title and the budget."""
        return f"{self.title} {self.asked}" if self.asked else self.title

    @property
    def group(self) -> tuple[str | None, str, str]:
        """Runs with the same group are compared with each other: same budget, same cache types."""
        return self.asked, self.type_k, self.type_v


def split_policy(text: str) -> tuple[str, tuple[str, ...]]:
    """ "h2o:decay=0.999:window=64" gives ("h2o", ("decay=0.999", "window=64")). A path may have colons."""
    name, *options = re.split(r":(?=\w+=)", text.strip())
    return name, tuple(options)


def runs(
    common: Common,
    n_ctx_train: int,
    layers: Layers,
    wanted: Sequence[str],
    budgets: Sequence[str],
    types: Sequence[str],
    *,
    evict_every: int | None = None,
    combine: bool = False,
) -> list[Run]:
    """The runs of a grid in their order: those without a budget first, then budget by budget.

    `full` has a run for each cache type. Other policies have runs with the first type, or with `combine` with
    each. A policy whose rows may keep different numbers of cells has a run without a budget, too.

    n_ctx_train: the model's trained context. wanted: policies as typed, with their parameters. budgets: as
    typed. Raises UsageError.
    """
    split = [(text.strip(), *split_policy(text)) for text in wanted]
    found: dict[str, Run] = {}

    def add(label: str, name: str, options: tuple[str, ...], asked: str | None, kind: str) -> None:
        run = _run(common, n_ctx_train, layers, label, name, options, asked, kind, evict_every)
        found.setdefault(records.key(identity(common, run), KEY), run)

    for label, name, options in split:
        if keeps_all_it_needs(name):
            for kind in types if combine or not policies.load(name).evicts else types[:1]:
                add(label, name, options, None, kind)
    for asked in budgets:
        for label, name, options in split:
            if policies.load(name).evicts:
                for kind in types if combine else types[:1]:
                    add(label, name, options, asked, kind)
    return list(found.values())


def keeps_all_it_needs(wanted: str) -> bool:
    """Whether a policy, as typed, has a run without a budget. Raises UsageError."""
    policy = policies.load(split_policy(wanted)[0])
    return policy.ragged or not policy.evicts


def full_run(common: Common) -> Run:
    """The run of the full f16 cache, which writes the reference."""
    n = min(common.n_ctx, common.n_tokens)
    return Run("full", "full", (), {}, None, n, None, common.n_batch, "auto", "f16", "f16")


def identity(common: Common, run: Run) -> dict[str, Any]:
    """The fields of a record that say what it is a record of; KEY names those that matter."""
    return {
        "policy": run.policy,
        "params": dict(run.params),
        "budget": run.budget,
        "type_k": run.type_k,
        "type_v": run.type_v,
        **common.what,
        "policy_sha256": run.policy_sha256,
        "tokens": common.n_tokens,
        "positions": run.positions,
        "evict_every": run.evict_every,
        "n_ctx": common.n_ctx,
        "n_batch": run.n_batch,
        "flash": common.flash,
        "gpu_layers": common.gpu_layers,
        "archive": (dict(common.archive) or None) if run.recalls else None,
        "archive_type": common.archive_type if run.recalls else None,
        "threads": common.threads,
        "rpc": list(common.rpc),
    }


def reference(common: Common) -> Path:
    """The file for the full cache's predictions of this text, which may not exist yet."""
    names = ("model_sha256", "text_sha256", "kvtool", "llama_cpp_python", "patch")
    what = {name: common.what[name] for name in names}
    return divergence.path_of(
        what
        | {
            "tokens": common.n_tokens,
            "n_ctx": common.n_ctx,
            "n_batch": common.n_batch,
            "flash": common.flash,
            "gpu_layers": common.gpu_layers,
        }
        # with workers, -fa auto chooses otherwise
        | ({"rpc": True} if common.rpc else {})
    )


def shard(grid: Sequence[Run], text: str) -> list[Run]:
    """Every n-th run: "2/3" gives the second, the fifth, ... Raises UsageError."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text.strip())
    i, n = map(int, match.groups()) if match else (0, 0)
    if not 1 <= i <= n:
        raise UsageError(f"a shard is I/N with I from 1 to N, for example 1/4, got {text!r}")
    return list(grid[i - 1 :: n])


def _run(
    common: Common,
    n_ctx_train: int,
    layers: Layers,
    label: str,
    name: str,
    options: tuple[str, ...],
    asked: str | None,
    kind: str,
    evict_every: int | None,
) -> Run:
    from kvtool.llama.context import choose_flash

    policy_type = policies.load(name)
    policies.parse_options(policy_type, list(options))
    # raises for a type that does not fit the model's heads
    layers.cell_bytes(kind, kind)
    choose_flash(common.flash, kind, policy_type.ragged or layers.has_alibi)
    n, n_batch, positions = common.n_ctx, common.n_batch, common.positions
    batch = None
    if not policy_type.evicts:
        n, positions = min(n, common.n_tokens), "auto"
    elif positions == "in-cache" and kind in _COARSE:
        raise UsageError(
            f"{kind} keys lose too much precision when they are re-rotated at every eviction; "
            "choose --positions auto, or --types q8_0"
        )
    elif asked is not None:
        n, batch = budget.parse(asked, n_ctx_train, layers, n_batch, kind, kind)
        n_batch = batch or n_batch
    if n > common.n_ctx:
        raise UsageError(f"a budget of {n} tokens is more than the context of {common.n_ctx}; choose less")
    policy = policies.fit(name, n, evict_every, list(options))
    if asked and batch:
        budget.check_bytes(asked, n, policy.budget)
    if policy.budget > common.n_ctx:
        raise UsageError(
            f"a budget of {n} tokens after an eviction takes {policy.budget} before, more than the context "
            f"of {common.n_ctx}; choose less"
        )
    return Run(
        label,
        name,
        options,
        policies.chosen(policy),
        asked,
        n,
        policy.slack or None,
        n_batch,
        positions,
        kind,
        kind,
        policies.file_sha256(name),
        policies.recalls(policy_type),
    )
