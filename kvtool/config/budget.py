"""A budget as people write it: tokens, a share, or bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvtool.errors import UsageError
from kvtool.models.layers import PAD, Layers, batch_within
from kvtool.units import format_bytes, parse_count

if TYPE_CHECKING:
    from decimal import Decimal

_FRACTION = re.compile(r"[0-9]*\.[0-9]+")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")


def parse(
    text: str, n_ctx_train: int, layers: Layers | None, n_batch: int, type_k: str = "f16", type_v: str = "f16"
) -> tuple[int, int | None]:
    """The cells that "512", "10%" or "64MiB" stand for; for bytes the largest batch beside them, else None.

    A share is of the trained context, see `share`. Bytes give the largest cache that fits into them, in steps
    of 256 cells, beside what the model keeps in sliding and recurrent layers. Only bytes bound the whole
    cache, padding and batches included.

    layers: None where they are not known yet; bytes then stand for the trained context. n_batch: the most
    tokens of a batch. Raises UsageError.
    """
    text = text.strip()
    if not text:
        raise UsageError("the budget is empty; give tokens (512), a share (10%) or bytes (64MiB)")
    if _FRACTION.fullmatch(text):
        raise UsageError(
            f"a budget in tokens is a whole number, got {text!r}; or a unit is missing: {text}MiB"
        )
    if text.endswith("%"):
        n = share(percent(text), n_ctx_train)
        if n == 0:
            raise UsageError(
                f"{text} of the trained context ({n_ctx_train} tokens) is less than 1 token; "
                "choose a larger share"
            )
        return n, None
    try:
        n, is_bytes = parse_count(text)
    except UsageError:
        raise UsageError(
            f"a budget is a number of tokens (512), a share of the trained context (10%) or bytes (64MiB), "
            f"got {text!r}"
        ) from None
    if not is_bytes:
        # the policy knows which number is too small
        return n, None
    if layers is None:
        return n_ctx_train, batch_within(n_ctx_train, n_batch)
    n, n_batch = layers.cache_that_fits(n, n_ctx_train, n_batch, type_k, type_v)
    if n == 0:
        smallest = format_bytes(layers.smallest_bytes(type_k, type_v))
        raise UsageError(
            f"{text} is too small for this model: its smallest cache ({PAD} tokens) takes {smallest}"
        )
    return n, n_batch


def percent(text: str) -> Decimal:
    """The number in "20%". Raises UsageError unless it is above 0 and at most 100."""
    # imported here: most commands never need it, and it takes memory
    from decimal import Decimal

    match = _SHARE.fullmatch(text.strip())
    if not match or not 0 < Decimal(match[1]) <= 100:
        raise UsageError(f"a share must be above 0% and at most 100%, got {text!r}")
    return Decimal(match[1])


def share(percent: Decimal, n: int) -> int:
    """That share of n tokens in cells, rounded down: a budget is a hard cap. 0 is possible."""
    return int(n * percent / 100)
