"""How many guesses --draft allows: whether the model and the policy can take them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool import policies
from kvtool.config.run import WriteOptions
from kvtool.drafts.drafter import MOST
from kvtool.errors import UsageError
from kvtool.models.layers import Kind, Layers

if TYPE_CHECKING:
    from kvtool.config.run import RunOptions
    from kvtool.policy import Policy

LOOKUP, OFF = "lookup", "off"


def n_ahead_of(run: RunOptions, layers: Layers, kind: type[Policy], n_batch: int) -> int:
    """Return the most guesses of a step. Raises UsageError if guesses were asked for and are impossible."""
    if not isinstance(run, WriteOptions) or run.draft == OFF:
        return 0
    why = ""
    if layers.of(Kind.RECURRENT):
        why = "a model with recurrent layers, which cannot take guesses back"
    elif policies.recalls(kind) and not layers.has_values:
        why = "recall of tokens (MLA), which the tokens of a step share"
    if why and "draft" in run.given:
        raise UsageError(f"--draft {run.draft} cannot be used with {why}; leave it out")
    return 0 if why else min(MOST, n_batch - 1)
