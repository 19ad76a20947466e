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
    return fit(spec, run, budget, info.plain_layers)


def fit_run(
    spec: policies.PolicySpec, run: RunOptions, layers: Layers, n_text: int, n_ctx: int, n_ctx_train: int
) -> Fitted:
    """Fit the policy of a run to the loaded model. Raises UsageError.

    n_text: number of cells for a policy that never evicts. Other policies do not use it.
    """
    if not spec.kind.evicts:
        return fit(spec, run, in_cells(n_text, n_ctx_train), layers)
    budget = of_run(run, spec.kind, n_ctx, n_ctx_train)
    fitted = fit(spec, run, budget, layers)
    return _without_recalled_cells(fitted, spec, layers) if budget.in_bytes and run.scores else fitted


def fit(spec: policies.PolicySpec, run: RunOptions, budget: Budget, layers: Layers) -> Fitted:
    """Fit the policy to the budget.

    While a batch is read, a row may have more cells than its budget. A budget in bytes includes these cells.
    If every token is scored, a batch may not exceed the budget.

    Raises UsageError if the budget is too small. The error names the smallest budget that works.
    """
    wanted = run.n_batch or run.default_n_batch
    n, n_batch = budget.cells(layers, wanted, run.type_k, run.type_v)
    is_whole = budget.in_bytes and n >= budget.n_ctx_train
    if budget.in_bytes and not run.scores:
        n -= max(n_batch - spec.slack(n), 0)
    # the model is not loaded yet, so the number of tokens that a chat template needs is unknown
    more = ", and a few more in a chat" if isinstance(run, ChatOptions) else ""
    try:
        policy = spec.fit(n, lambda policy: policy.for_model(layers.n_group, layers.has_values), more=more)
    except UsageError as error:
        if run.budget is None and n == run.n_ctx:
            raise UsageError(f"--ctx-size {n} limits the budget: {error}") from None
        raise
    if budget.in_bytes and policy.budget > n:
        raise UsageError(
            f"--budget {budget.text}: with these parameters a row of {spec.name} takes more than its budget "
            "at times, so bytes would not bound it; give it in tokens (512) or as a share (10%)"
        )
    notes = []
    if is_whole:
        whole = f"{n:,} of its {budget.n_ctx_train:,} tokens"
        notes.append(f"--budget {budget.text} holds the whole context: the budget is {whole}")
    if run.n_batch and n_batch < wanted:
        notes.append(f"--batch-size {wanted:,} does not fit into {budget.text}; {n_batch:,} is used")
    return Fitted(policy, n, n_batch, "; ".join(notes) or None)


def _without_recalled_cells(fitted: Fitted, spec: policies.PolicySpec, layers: Layers) -> Fitted:
    """Reduce the number of cells that `fit` computed from a budget in bytes.

    recall fills additional cells in each step. These cells also take bytes, which the budget has to include.
    """
    policy = fitted.policy.for_model(layers.n_group, layers.has_values)
    if not policy.recall:
        return fitted
    n = 2 * fitted.n - policy.n_live - policy.recall.n_filled(layers.has_values)
    return fitted._replace(policy=spec.fit(n), n=n) if n < fitted.n else fitted
