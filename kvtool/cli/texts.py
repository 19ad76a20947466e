"""Texts that are refused: too short, or too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.errors import InputError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine


def too_short(file: str, n: int, n_needed: int) -> InputError:
    """The error for a text of n tokens."""
    name = "stdin" if file == "-" else file
    return InputError(f"{name} is too short: {n} token{'s' * (n != 1)}, at least {n_needed} needed")


def check_length(engine: Engine, n_tokens: int, what: str = "text") -> None:
    """Raise InputError for a text, or a "prompt", that the engine cannot read to its end."""
    shorter = "or --max-tokens" if what == "text" else "or a shorter prompt"
    if engine.policy.slack == 0 and n_tokens > engine.policy.budget:
        raise InputError(
            f"the {what} ({n_tokens:,} tokens) does not fit in the cache ({engine.policy.budget:,}) and "
            f"`full` never evicts; use --policy recall {shorter}"
        )
    check_positions(engine.settings.positions, n_tokens, engine.n_ctx, what, shorter)


def check_positions(
    positions: str, n_tokens: int, n_ctx: int, what: str = "text", shorter: str = "or --max-tokens"
) -> None:
    """Raise InputError for a text that is longer than its positions. shorter: how to shorten it."""
    if positions == "original" and n_tokens > n_ctx:
        raise InputError(
            f"the {what} has {n_tokens:,} tokens, and original positions end at {n_ctx:,}; "
            f"choose --positions auto or in-cache, {shorter}"
        )
