"""How the engine runs, apart from the policy."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.errors import UsageError
from kvtool.models.header import CACHE_TYPES


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs, apart from the policy.

    positions: "original", "in-cache" or "auto". n_ctx: the positions there are, the trained context unless
    given (never more). n_batch: the most tokens of a step. prefill: how a prompt is read, "stream" or
    "whole", as the policy wants it unless given. n_output: the most tokens of a step whose logits are wanted.
    over_budget: whether a step may go over the budget until its eviction, so that a prompt is read in steps
    longer than the slack.
    """

    positions: str = "auto"
    prefill: str | None = None
    n_ctx: int | None = None
    n_batch: int = 256
    n_output: int = 1
    over_budget: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    flash: str = "auto"
    n_threads: int | None = None

    def __post_init__(self) -> None:
        if self.positions not in ("original", "in-cache", "auto"):
            raise UsageError(f"positions must be original, in-cache or auto, got {self.positions!r}")
        if self.prefill not in (None, "stream", "whole"):
            raise UsageError(f"prefill must be stream or whole, got {self.prefill!r}")
        if self.flash not in ("on", "off", "auto"):
            raise UsageError(f"flash must be on, off or auto, got {self.flash!r}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise UsageError(
                    f"{name} must be one of {', '.join(CACHE_TYPES)}, got {getattr(self, name)!r}"
                )
