"""Settings of the engine that do not depend on the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

from kvtool.errors import UsageError
from kvtool.options import check_choice
from kvtool.units import ARCHIVE_TYPES, CACHE_TYPES, FEW_BITS, MAX_RESIDENT, MAX_THREADS, PLAIN

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model
    from kvtool.models.header import ModelInfo

POSITIONS = ("original", "in-cache", "auto")
PREFILLS = ("stream", "whole", "exact")
FLASH = ("on", "off", "auto")
"""Allowed values of `Settings.positions`, `Settings.prefill` and `Settings.flash`."""

MAX_DRAFT = 15
"""Maximum number of draft tokens of a step.

Each draft token needs a copy of all recurrent states. About 80 copies are too many for llama.cpp's graphs.
"""

_CHOICES = {
    "positions": POSITIONS,
    "prefill": PREFILLS,
    "flash": FLASH,
    **dict.fromkeys(("type_k", "type_v"), tuple(CACHE_TYPES)),
    "archive_type": ("auto", *ARCHIVE_TYPES, *(PLAIN + name for name in FEW_BITS)),
}

_BLOCK = 32
"""Number of values that share a scale, in types of 8 bits or fewer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine. Raises UsageError for a value that a setting does not allow.

    Attributes
    ----------
    positions
        Positions that keys are rotated to. "original": the positions in the stream. "in-cache": positions
        without gaps. "auto": the original positions until the context is full; then all gaps are closed at
        once.
    prefill
        How a prompt is read. "stream": in batches, with a plan after each batch. "whole": decoded without
        evictions, then compressed once. "exact", for policies that recall: in batches, and each batch attends
        to all archived tokens. Default: "exact" if a policy recalls and all layers are on this machine's
        GPUs, as far as their memory allows; otherwise the policy's choice.
    n_ctx
        Context length. Default and maximum: the trained length.
    n_batch
        Maximum tokens decoded at once.
    n_output
        Maximum tokens of a step that give logits.
    n_draft
        Maximum draft tokens of a step, which `Engine.drop_drafts` can remove.
    over_budget
        True if the cache may exceed the budget during a step, until the eviction at the end of the step. A
        prompt's steps may then have more tokens than the policy's `slack`.
    type_k, type_v
        Number formats of keys and values, such as "f16" or "q8_0".
    archive, archive_bytes
        Maximum tokens or bytes of the archive, for a policy that recalls. Default: a quarter of the free
        memory, or half of the disk's free space if the archive is in a file. A full archive drops its oldest
        tokens.
    archive_file
        Path at which to create a file for the archive. Default: the archive is in host memory. The file is
        unlinked at once, so its space becomes free when the process ends.
    archive_type
        Number format of the archive, such as "f16". "q5_0/q4_0" is q5_0 for keys and q4_0 for values. "plain
        q4_1" is q4_1 without Hadamard matrices, the format of earlier versions of kvtool. "auto": see
        `auto_archive_type`.
    resident
        Number of archived tokens of each row to keep on the device, for a policy that recalls. Steps that
        decode a reply attend to these tokens, and need no search on the host. 0: each step searches the
        archive.
    checkpoints
        Maximum bytes of all checkpoints; 0 for no checkpoints. If the policy forgets tokens, or the model has
        sliding or recurrent layers, a stream without checkpoints can only be rewound to its start. Default:
        see `Checkpoints`.
    flash
        Flash attention: "on", "off" or "auto".
    n_threads
        Number of CPU threads. Default: one per core.
    """

    positions: str = "auto"
    prefill: str | None = None
    n_ctx: int | None = None
    n_batch: int = 256
    n_output: int = 1
    n_draft: int = 0
    over_budget: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    archive: int | None = None
    archive_bytes: int | None = None
    archive_file: str | None = None
    archive_type: str = "auto"
    resident: int = 0
    checkpoints: int | None = None
    flash: str = "auto"
    n_threads: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(getattr(self, name), choices, name)
        for name in ("n_ctx", "n_batch", "n_output", "n_threads", "archive", "archive_bytes"):
            n = getattr(self, name)
            if n is not None and (not isinstance(n, Integral) or int(n) < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, got {n!r}")
        if self.n_threads is not None and self.n_threads > MAX_THREADS:
            raise UsageError(f"n_threads must be in 1..{MAX_THREADS}, got {self.n_threads}")
        if not 0 <= self.resident <= MAX_RESIDENT:
            raise UsageError(f"resident must be in 0..{MAX_RESIDENT}, got {self.resident}")
        if self.checkpoints is not None and self.checkpoints < 0:
            raise UsageError(f"checkpoints must be at least 0, got {self.checkpoints}")
        max_draft = min(MAX_DRAFT, self.n_batch - 1)
        if not 0 <= self.n_draft <= max_draft:
            raise UsageError(f"n_draft must be in 0..{max_draft}, got {self.n_draft}")

    def for_model(self, model: Model) -> Settings:
        """Return these settings with the archive type that "auto" means for a model."""
        if self.archive_type != "auto":
            return self
        return replace(self, archive_type=auto_archive_type(model.info, self.prefill, on_gpu=model.uses_gpu))


def auto_archive_type(info: ModelInfo, prefill: str | None, *, on_gpu: bool) -> str:
    """Return the archive type that "auto" means for a model.

    prefill: see `Settings`. on_gpu: True if GPUs of this machine have layers.
    """
    if info.head_size_k % _BLOCK or info.head_size_v % _BLOCK:
        return "f16"
    # exact reading needs keys that are not centered, and GPUs can attend to q8_0 without converting it
    return "q8_0" if on_gpu or prefill == "exact" else "iq4_nl"
