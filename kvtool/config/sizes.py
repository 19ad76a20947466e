"""Parse the texts of --budget and --archive, and check the text of --archive-file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtool.errors import UsageError
from kvtool.models.layers import PAD, Layers
from kvtool.units import format_bytes, parse_count

if TYPE_CHECKING:
    from decimal import Decimal

_FRACTION = re.compile(r"[0-9]*\.[0-9]+")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")


class Budget(NamedTuple):
    """A budget from the command line.

    Attributes
    ----------
    text
        The text that the user typed: "512", "10%" or "64MiB".
    n
        Number of cells, or number of bytes if `in_bytes` is True.
    in_bytes
        True if the budget is in bytes.
    n_ctx_train
        Trained context length of the model, in tokens.
    """

    text: str
    n: int
    in_bytes: bool
    n_ctx_train: int

    def cells(
        self, layers: Layers, n_batch: int, type_k: str = "f16", type_v: str = "f16"
    ) -> tuple[int, int]:
        """Return the number of cells per row and the batch size, which is at most n_batch tokens.

        A budget in bytes limits the whole cache. The cache includes padding, the cells for a batch, and the
        memory of sliding and recurrent layers. As many cells are used as fit, in steps of 256 cells. Raises
        UsageError if the budget is too small for the smallest cache.
        """
        if not self.in_bytes:
            return self.n, n_batch
        n, n_batch = layers.cache_that_fits(self.n, self.n_ctx_train, n_batch, type_k, type_v)
        if n == 0:
            smallest = format_bytes(layers.smallest_bytes(type_k, type_v), round_up=True)
            raise UsageError(
                f"{self.text} is too small for this model: its smallest cache ({PAD} tokens) takes {smallest}"
            )
        return n, n_batch


def parse(text: str, n_ctx_train: int) -> Budget:
    """Parse "512" (cells), "10%" (share of the trained context) or "64MiB" (bytes). Raises UsageError."""
    text = text.strip()
    if not text:
        raise UsageError("the budget is empty; give tokens (512), a share (10%) or bytes (64MiB)")
    if _FRACTION.fullmatch(text):
        size = f"{text if text[0] != '.' else f'0{text}'}MiB"
        raise UsageError(f"a budget in tokens is a whole number, got {text!r}; or a unit is missing: {size}")
    if text.endswith("%"):
        n = share(percent(text), n_ctx_train)
        if n == 0:
            raise UsageError(
                f"{text} of the trained context ({n_ctx_train:,} tokens) is less than 1 token; "
                "choose a larger share"
            )
        return Budget(text, n, False, n_ctx_train)
    try:
        return Budget(text, *parse_count(text), n_ctx_train)
    except UsageError:
        raise UsageError(
            f"a budget is a number of tokens (512), a share of the trained context (10%) or bytes (64MiB), "
            f"got {text!r}"
        ) from None


def percent(text: str) -> Decimal:
    """Return the number in "20%". Raises UsageError unless it is above 0 and at most 100."""
    # imported here, because the import takes memory and most commands do not need it
    from decimal import Decimal

    match = _SHARE.fullmatch(text.strip())
    if not match or not 0 < Decimal(match[1]) <= 100:
        raise UsageError(f"a share must be above 0% and at most 100%, got {text!r}")
    return Decimal(match[1])


def share(percent: Decimal, n: int) -> int:
    """Return a percentage of n tokens as a number of cells, which may be 0.

    The number is rounded down, because a budget must not be exceeded.
    """
    return int(n * percent / 100)


def parse_archive(text: str) -> tuple[int, bool]:
    """Parse the text of --archive. Raises UsageError.

    Returns the number, and True if it is a number of bytes.
    """
    try:
        n, is_bytes = parse_count(text)
    except UsageError:
        raise UsageError(f"--archive is a number of tokens (20000) or bytes (2GiB), got {text!r}") from None
    if n < 1:
        raise UsageError(
            f"--archive {text} is too small; give at least 1 token, or choose the policy streamingllm, "
            "which archives nothing"
        )
    return n, is_bytes


def check_archive_file(file: str | Path) -> None:
    """Raise UsageError if the file of --archive-file cannot be created."""
    if sys.platform == "win32":
        raise UsageError("--archive-file does not work on Windows yet; leave it out")
    folder = os.path.dirname(os.path.abspath(file))
    problem = None
    if os.path.isdir(file):
        problem = "is a folder"
    elif os.path.lexists(file):
        problem = "exists already"
    elif not os.path.isdir(folder):
        problem = f"cannot be created: there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"cannot be created: no permission to write to {folder}"
    if problem:
        raise UsageError(f"--archive-file {str(file)!r} {problem}; name a new file")
