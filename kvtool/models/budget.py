"""A budget as people write it: cells, a share of the trained context, or bytes."""

from __future__ import annotations

from kvtool.errors import UsageError
from kvtool.models.header import PAD, ModelInfo
from kvtool.units import format_bytes, parse_bytes


def cells(
    text: str, info: ModelInfo, n_batch: int, type_k: str = "f16", type_v: str = "f16"
) -> tuple[int, bool]:
    """What "512", "10%" or "64MiB" is in cells, and whether it bounds the whole cache, padding included.

    A share is rounded down; bytes give the largest cache, in steps of 256 cells, that fits into them beside
    the window of sliding layers. n_batch: the most tokens of a step. Raises UsageError.
    """
    text = text.strip()
    if text.isdecimal():
        n = int(text)
        if n < 1:
            raise UsageError("the budget must be at least one cell")
        return n, False
    if text.endswith("%"):
        return _share(text, info.n_ctx_train), False
    try:
        n_bytes = parse_bytes(text)
    except UsageError:
        raise UsageError(
            f"a budget is cells (512), a share of the context (10%) or bytes (64MiB), got {text!r}"
        ) from None
    n = info.cells_that_fit(n_bytes, n_batch, type_k, type_v) // PAD * PAD
    if n == 0:
        smallest = format_bytes(
            PAD * info.cell_bytes(type_k, type_v) + info.window_bytes(n_batch, type_k, type_v)
        )
        raise UsageError(f"{text} is too little for {info.path.name}: {PAD} cells take {smallest}")
    return min(n, info.n_ctx_train), True


def batch_within(n: int, n_batch: int) -> int:
    """The most tokens of a step in a cache of n cells that bytes bound: the batch has to fit into it too."""
    return max(1, min(n_batch, n // 4))


def percent(text: str) -> float:
    """What "20%" says. Raises UsageError for what is not above 0 and at most 100."""
    try:
        share = float(text.strip().removesuffix("%"))
    except ValueError:
        share = -1.0
    if not 0 < share <= 100:
        raise UsageError(f"a share is 1% to 100%, got {text!r}")
    return share


def _share(text: str, n_ctx_train: int) -> int:
    n = int(n_ctx_train * percent(text) / 100)
    if n == 0:
        raise UsageError(
            f"{text} of the trained context of {n_ctx_train} tokens is not a cell; choose a greater share"
        )
    return n
