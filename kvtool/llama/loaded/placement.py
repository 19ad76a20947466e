"""Placement of a model's weights: the device of each layer, and the buffer of chosen tensors.

The command line imports this file, so it must not import llama.cpp at its top level.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

from kvtool.errors import UsageError
from kvtool.models.weights import EXPERTS

SPLIT_MODES = ("none", "layer", "row")
"""Values of --split-mode, in the order of llama.cpp's numbers.

llama.cpp's fourth mode, tensor, is not among them. It also splits the cache, and the patch cannot edit a
split cache.
"""

_OVERRIDE = re.compile("(.+?)=([^=,]+)(?:,|$)")

_PYTHON_ONLY = re.compile(r"(?<!\\)\(\?[^:=!]")
"""Start of a group that only Python supports. llama.cpp's regular expressions have ECMAScript's syntax."""


class _Override(ctypes.Structure):
    """A llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a model's weights. It does not include the number of layers on GPUs.

    Attributes
    ----------
    overrides
        Pairs (regular expression, buffer). A tensor goes into the buffer of the first expression that matches
        the tensor's name.
    shares
        Share of the layers that each GPU gets; () to divide the layers by free memory.
    main_gpu
        Index of the only GPU that is used in split mode "none".
    split_mode
        One of SPLIT_MODES.
    """

    overrides: tuple[tuple[str, str], ...] = ()
    shares: tuple[float, ...] = ()
    main_gpu: int = 0
    split_mode: str = "layer"

    def check(self) -> None:
        """Raise UsageError for missing buffers and GPUs, and for GPUs that cannot split rows.

        Call this after workers are added.
        """
        from kvtool.llama.libllama.devices import buffers, can_split_rows, gpus

        if self == Placement():
            return
        known = buffers()
        for _, buffer in self.overrides:
            if buffer not in known:
                raise UsageError(
                    f"--override-tensor: there is no buffer {buffer!r}; there are: {', '.join(known)}"
                )
        # without a GPU the other options do nothing
        if not (found := [device["name"] for device in gpus()]):
            return
        listed = f"{', '.join(found)} ({len(found)})"
        if len(self.shares) > len(found):
            raise UsageError(f"--tensor-split has {len(self.shares)} shares, for the devices {listed}")
        if self.main_gpu >= len(found):
            raise UsageError(f"--main-gpu must be below the number of devices, which are {listed}")
        if self.split_mode == "row" and (name := next((n for n in found if not can_split_rows(n)), None)):
            raise UsageError(f"{name} cannot split a tensor by rows; choose --split-mode layer")

    def apply(self, params: Any) -> list[object]:
        """Set this placement in llama.cpp's parameters of a model. Raises UsageError as `check` does.

        Returns the objects that the parameters point to. Keep these objects as long as the model.
        """
        from kvtool.llama.libllama.bindings import api
        from kvtool.llama.libllama.devices import buffers

        if self == Placement():
            return []
        self.check()
        known = buffers()
        # a null pattern ends the list
        overrides = (_Override * (len(self.overrides) + 1))()
        for entry, (pattern, buffer) in zip(overrides, self.overrides, strict=False):
            entry.pattern, entry.buffer = os.fsencode(pattern), known[buffer]
        shares = (ctypes.c_float * max(api.LLAMA_MAX_DEVICES, len(self.shares)))(*self.shares)
        if self.overrides:
            params.tensor_buft_overrides = ctypes.addressof(overrides)
        if self.shares:
            params.tensor_split = shares
        params.split_mode = SPLIT_MODES.index(self.split_mode)
        params.main_gpu = self.main_gpu
        return [overrides, shares]


def experts_pattern(n_layer: int | None = None) -> str:
    """Return a regular expression for the names of the experts' tensors in the first n_layer layers.

    n_layer: 1 or more, or None for all layers.
    """
    if n_layer is None:
        return EXPERTS
    # imported here: few commands need it
    from kvtool.models.gguf import MAX_LAYERS

    # llama.cpp compiles each pattern again for every tensor, so a single pattern for all layers is faster
    numbers = "|".join(map(str, range(min(n_layer, MAX_LAYERS))))
    return rf"blk\.({numbers}){EXPERTS}"


def parse_overrides(text: str) -> list[tuple[str, str]]:
    """Parse "PATTERN=BUFFER,PATTERN=BUFFER" to pairs. A pattern may contain commas. Raises UsageError."""
    pairs: list[tuple[str, str]] = _OVERRIDE.findall(text)
    if _OVERRIDE.sub("", text) or not pairs:
        raise UsageError(f"--override-tensor takes PATTERN=BUFFER, such as ffn_down=CPU, got {text!r}")
    for pattern, _ in pairs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern)
            if found := _PYTHON_ONLY.search(pattern):
                raise re.error(f"llama.cpp does not know {found[0]}")
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                f"--override-tensor: {pattern!r} is not a regular expression ({error})"
            ) from None
    return pairs


def parse_shares(text: str) -> tuple[float, ...]:
    """Parse "3,1" or "3/1", one share for each device. Raises UsageError."""
    try:
        shares = tuple(map(float, re.split("[,/]", text)))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < math.inf for share in shares):
        raise UsageError(f"--tensor-split takes a share for each device, such as 3,1, got {text!r}")
    if not sum(shares):
        raise UsageError(f"--tensor-split needs a share above 0, got {text!r}")
    return shares
