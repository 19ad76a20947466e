"""Checks that a policy, settings and a model work together."""

from __future__ import annotations

from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.loaded.model import Model
from kvtool.models.layers import Layers
from kvtool.policy import Policy

_COARSE = ("q4_0", "q4_1")
"""Number formats of keys that lose too much precision each time the keys are re-rotated."""


def check(policy: Policy, settings: Settings, layers: Layers, n_ctx: int, n_ctx_train: int) -> None:
    """Raise UsageError if a policy, settings and a model do not work together."""
    if policy.budget > n_ctx:
        asked = f"{policy.n_asked}, which takes " if policy.n_asked < policy.budget else ""
        raise UsageError(
            f"the context is {n_ctx:,} tokens (trained: {n_ctx_train:,}); "
            f"choose a budget of at most that, not {asked}{policy.budget}"
        )
    if settings.positions == "in-cache" and settings.type_k in _COARSE:
        raise UsageError(
            f"{settings.type_k} keys lose too much precision when they are re-rotated at every eviction; "
            "choose --positions auto, or --cache-type-k q8_0"
        )
    if how_read(policy, settings) == "whole" and policy.capped:
        raise UsageError(f"{type(policy).__name__} cannot read a prompt whole; choose --prefill stream")
    if policy.reconstruction and how_read(policy, settings) != "whole":
        raise UsageError(f"{type(policy).__name__} reads a prompt twice; choose --prefill whole")
    if settings.prefill == "exact" and not (policy.recall and layers.can_stage):
        why = "this model cannot (MLA with an index)" if policy.recall else "only policies that recall can"
        raise UsageError(f"--prefill exact attends to evicted tokens, and {why}; choose --prefill stream")
    if layers.only_full and (policy.evicts or policy.reads or policy.ragged):
        raise UsageError(f"this model runs only with --policy full: {layers.only_full}")
    if settings.n_draft and not layers.can_drop:
        raise UsageError("this model cannot drop draft tokens; choose n_draft 0")
    if policy.merges and not layers.has_values:
        raise UsageError(
            f"{type(policy).__name__} merges values, which in this model are a part of its keys (MLA); "
            "choose another policy"
        )
    if policy.recall and layers.has_alibi:
        raise UsageError(
            f"{type(policy).__name__} searches by keys, but in this model distance counts as well (ALiBi); "
            "choose another policy"
        )
    if settings.positions == "in-cache" and policy.recall:
        raise UsageError(
            f"{type(policy).__name__} needs the distances of the text; choose --positions auto or original"
        )


def for_model(policy: Policy, model: Model) -> Policy:
    """Return the policy, adapted to the model. Raises UsageError if they do not work together."""
    try:
        return policy.for_model(model.layers.n_group, model.layers.has_values)
    except ValueError as error:
        raise UsageError(str(error)) from error


def how_read(policy: Policy, settings: Settings) -> str:
    """Return how prompts are read: "stream", "whole" or "exact". Raises UsageError for any other value."""
    how = settings.prefill or policy.prefill
    if how not in ("stream", "whole", "exact"):
        raise UsageError(f"{type(policy).__name__}: prefill must be stream, whole or exact, got {how!r}")
    return how
