"""LoRA adapters: small files of weights that are added to a model's own weights.

The command line imports this file, so it must not import llama.cpp at its top level.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.errors import ModelError, OutOfMemory, UsageError


class Adapter(NamedTuple):
    """A LoRA adapter: its GGUF file, and the factor by which its weights are multiplied."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Parse "FILE" or "FILE:SCALE". The path becomes absolute. Raises UsageError."""
        name, _, number = text.rpartition(":")
        try:
            scale = float(number)
        except ValueError:
            # there is no scale, so a colon belongs to the name
            name, scale = text, 1.0
        if not name or not math.isfinite(scale):
            raise UsageError(f"--lora takes a file, or FILE:SCALE with a number, got {text!r}")
        return cls(Path(os.path.abspath(os.path.expanduser(name))), scale)

    def __str__(self) -> str:
        return f"{self.path}:{self.scale!r}"

    def check_exists(self) -> None:
        """Raise ModelError if there is no such file."""
        if not os.path.exists(self.path):
            raise ModelError(
                f"there is no adapter {self.path}; --lora takes FILE or FILE:SCALE, once for each"
            )

    def check(self, model: str, architecture: str) -> None:
        """Raise ModelError unless the file is a complete LoRA adapter for models of this architecture.

        model: the model's name, for messages.
        """
        # import these here and not at the top, because most commands run without adapters
        from kvtool.models.gguf import constants
        from kvtool.models.header import read_file

        self.check_exists()
        keys = constants.Keys
        header = read_file(self.path).metadata
        if (header.get(keys.General.TYPE), header.get(keys.Adapter.TYPE)) != ("adapter", "lora"):
            raise ModelError(
                f"{self.path} is not a LoRA adapter; llama.cpp's convert_lora_to_gguf.py makes one"
            )
        if keys.Adapter.ALORA_INVOCATION_TOKENS in header:
            raise ModelError(
                f"{self.path} acts only after certain tokens (aLoRA), which kvtool does not support"
            )
        if (its := header.get(keys.General.ARCHITECTURE)) != architecture:
            raise ModelError(f"{self.path} is for {its} models, and {model} is a {architecture} model")


def adapter_texts(raw: Iterable[str] | None, flag: str) -> tuple[str, ...]:
    """Return the values that the user gave for --lora, with absolute paths and scales. Raises UsageError."""
    return tuple(str(Adapter.parse(text)) for text in raw or ())


def identities(adapters: Iterable[Adapter]) -> list[dict[str, Any]] | None:
    """Return file name, SHA-256 and scale of each adapter; None without adapters."""
    from kvtool.models.download import sha256

    return [
        {"file": its.path.name, "sha256": sha256(its.path), "scale": its.scale} for its in adapters
    ] or None


class Adapters:
    """The adapters of a loaded model. llama.cpp frees them together with the model.

    Raises ModelError for an adapter that does not fit the model's tensors.
    """

    def __init__(self, model: Any, name: str, adapters: Sequence[Adapter]) -> None:
        from kvtool.llama.libllama.bindings import api
        from kvtool.llama.libllama.crash import crash_means, damaged
        from kvtool.llama.libllama.log import because, log_tail, no_memory

        self._handles = (api.llama_adapter_lora_p_ctypes * len(adapters))()
        self._scales = (ctypes.c_float * len(adapters))(*(its.scale for its in adapters))
        for i, (path, _) in enumerate(adapters):
            log_tail.clear()
            with crash_means(damaged(path)):
                handle = api.llama_adapter_lora_init(model, os.fsencode(path))
            if not handle:
                if no_memory():
                    raise OutOfMemory(f"no memory for {path}{because()}", for_weights=True)
                raise ModelError(f"{path} is no adapter for {name}{because()}")
            self._handles[i] = handle

    def apply(self, context: Any) -> None:
        """Let a context compute with all adapters."""
        from kvtool.llama.libllama.bindings import api

        if len(self._handles):
            api.llama_set_adapters_lora(context, self._handles, len(self._handles), self._scales)
