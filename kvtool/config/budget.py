"""Budgets: turn the text of --budget into cells, and make a policy that keeps within this number of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtool import policies
from kvtool.config.run import ChatOptions, RunOptions
from kvtool.config.sizes import Budget, parse
from kvtool.errors import UsageError
from kvtool.models.layers import Layers

if TYPE_CHECKING:
    from kvtool.models.header import ModelInfo
    from kvtool.policy import Policy


def of_run(run: RunOptions, kind: type[Policy], n_ctx: int, n_ctx_train: int) -> Budget:
    """Return the budget in the options. If the options have no budget, return the policy's default.

    kind: a policy that evicts. Raises UsageError.
    """
    if run.budget is not None:
        return parse(run.budget, n_ctx_train)
    # if `capped` is set, the policy chooses how many cells each row keeps, and the budget is only a limit
    n = n_ctx if kind.capped else run.default_recall if kind.has_recall() else run.default_budget
    return in_cells(min(n, n_ctx), n_ctx_train)


def in_cells(n: int, n_ctx_train: int) -> Budget:
    return Budget(str(n), n, False, n_ctx_train)


class Fitted(NamedTuple):
    """A policy with the parameters that fit a budget.

    n: budget in cells.
    note: note for the user if the budget holds the whole context, or if batches of the requested size do not
    fit into the budget. Otherwise None.
    """

    policy: Policy
    n: int
    n_batch: int
    note: str | None


def fit_cells(spec: policies.PolicySpec, run: RunOptions, info: ModelInfo, n_ctx: int) -> Fitted | None:
    """Fit the policy of a run before its model is loaded. info: the model's header. Raises UsageError.

    Only a budget in cells can be fitted without the loaded model. The result is None if the policy never
    evicts, or if the budget is in bytes. For a budget in bytes, only the policy's parameters are checked.
    """
    if not spec.kind.evicts:
        return None
    budget = of_run(run, spec.kind, n_ctx, info.n_ctx_train)
    if budget.in_bytes:
        spec.fit(info.n_ctx_train)
        return None
    return _fit(spec, run, budget, info.plain_layers)


def fit_run(
    spec: policies.PolicySpec, run: RunOptions, layers: Layers, n_text: int, n_ctx: int, n_ctx_train: int
) -> Fitted:
    """Fit the policy of a run to the loaded model. Raises UsageError.

    n_text: number of cells for a policy that never evicts. Other policies do not use it.
    """
    if not spec.kind.evicts:
        return _fit(spec, run, in_cells(n_text, n_ctx_train), layers)
    return _fit(spec, run, of_run(run, spec.kind, n_ctx, n_ctx_train), layers)


def _fit(spec: policies.PolicySpec, run: RunOptions, budget: Budget, layers: Layers) -> Fitted:
    """Fit the policy to the budget.

    A row may have more cells than its budget: while a batch is read, and cells that recall fills in each
    step. A budget in bytes includes these cells. If every token is scored, a batch may not exceed the budget.

    Raises UsageError if the budget is too small. The error names the smallest budget that works.
    """
    wanted = run.n_batch or run.default_n_batch
    n_most, n_batch = budget.cells(layers, wanted, run.type_k, run.type_v)
    n, is_whole = n_most, budget.in_bytes and n_most >= budget.n_ctx_train
    if budget.in_bytes and not run.scores:
        n -= max(n_batch - spec.slack(n), 0)
    # the model is not loaded yet, so the number of tokens that a chat template needs is unknown
    more = ", and a few more in a chat" if isinstance(run, ChatOptions) else ""

    def adapt(policy: Policy) -> Policy:
        return policy.for_model(layers.n_group, layers.has_values)

    try:
        policy = spec.fit(n, adapt, more=more)
    except UsageError as error:
        if run.budget is None and n == run.n_ctx:
            raise UsageError(f"--ctx-size {n} limits the budget: {error}") from None
        raise
    if budget.in_bytes and policy.budget > n:
        raise UsageError(
            f"--budget {budget.text}: with these parameters a row of {spec.name} takes more than its budget "
            "at times, so bytes would not bound it; give it in tokens (512) or as a share (10%)"
        )
    if budget.in_bytes and policy.recall and (n_over := _n_recalling(adapt(policy), layers) - n_most) > 0:
        n -= n_over
        try:
            policy = spec.fit(n, adapt)
        except UsageError:
            raise UsageError(
                f"--budget {budget.text} is too small: {spec.name} also fills cells in each step; "
                "give more bytes, or a smaller -o chunk"
            ) from None
    notes = []
    if is_whole:
        whole = f"{n:,} of its {budget.n_ctx_train:,} tokens"
        notes.append(f"--budget {budget.text} holds the whole context: the budget is {whole}")
    if run.n_batch and n_batch < wanted:
        notes.append(f"--batch-size {wanted:,} does not fit into {budget.text}; {n_batch:,} is used")
    return Fitted(policy, n, n_batch, "; ".join(notes) or None)


def _n_recalling(policy: Policy, layers: Layers) -> int:
    """Return the number of cells of a row in a step that recalls: the live cells and those that it fills."""
    assert policy.recall
    return policy.n_live + policy.recall.n_filled(layers.has_values)
