"""Description of a model, read from the header of its GGUF file."""

import errno
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.errors import ModelError, OutOfMemory
from kvtool.models.gguf import MAX_LAYERS, HeaderReader, constants
from kvtool.models.layers import ONLY_FULL, Kind, Layer, Layers
from kvtool.models.split import part_paths
from kvtool.models.weights import Weights

_END = 2**31
"""End of the values of a number in a header. llama.cpp stores it in a 32-bit integer."""


class File(NamedTuple):
    """One GGUF file: its size in bytes, the size in bytes of each tensor by name, and its metadata."""

    size: int
    tensors: dict[str, int]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model, read from its header.

    Attributes
    ----------
    path
        Path of the file, or of the first part of a split model.
    n_part
        Number of files; 1 unless the model was split.
    size
        Total size in bytes.
    architecture
        llama.cpp's name of the architecture, such as "llama".
    quantization
        Type of most weights, such as "Q4_K_M".
    n_layer
        Number of layers with a cache.
    n_head, n_head_kv
        Numbers of query heads and of KV heads of each layer.
    metadata
        Values of the header by key. Arrays of strings and arrays longer than MAX_LAYERS are None.
    has_mtp
        True if the file has layers for multi-token prediction.
    """

    path: Path
    n_part: int
    size: int
    architecture: str
    name: str
    quantization: str
    n_layer: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_size_k: int
    head_size_v: int
    n_ctx_train: int
    tokenizer: bool
    chat_template: bool
    metadata: dict[str, Any] = field(repr=False)
    weights: Weights = field(repr=False)
    has_mtp: bool

    @property
    def plain_layers(self) -> Layers:
        """Layers of a model that has one plain KV cache, or that runs only with the policy `full`.

        For other models, the result is wrong: use `Model.layers`.
        If the model uses MLA, `head_size_v` is 0 in all layers, because values are part of the keys.
        """
        is_latent = self.metadata.get(f"{self.architecture}.attention.key_length_mla")
        sizes = self.head_size_k, 0 if is_latent else self.head_size_v
        layers = tuple(Layer(i, Kind.ROWS, i, n, *sizes, 0) for i, n in enumerate(self.n_head_kv) if n)
        groups = (n // n_kv for n, n_kv in zip(self.n_head, self.n_head_kv, strict=True) if n_kv)
        reason = ONLY_FULL.get(self.architecture, "")
        return Layers(layers, n_group=max(groups, default=1), can_drop=not reason, only_full=reason)


def read(path: Path) -> ModelInfo:
    """Read a model's header, but not its weights.

    path: the model's file, or its first part. The headers of all parts are read. Raises ModelError unless
    this is a complete GGUF language model.
    """
    whole = read_file(path)
    n_part = whole.metadata.get("split.count", 0)
    # if a model was split into only one part, this file is the whole model
    rest = [] if n_part in (0, 1) else _rest_of(path, whole, n_part)
    size = whole.size + sum(part.size for part in rest)
    tensors = whole.tensors | {name: n for part in rest for name, n in part.tensors.items()}
    return _info(path, n_part or 1, size, whole.metadata, tensors)


def read_file(path: Path) -> File:
    """Read the header of any part of a model. Raises ModelError if the file is incomplete."""
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ModelError(f"{path} is a folder; name the GGUF file in it")
        if size == 0:
            again = "; download it again" if path.suffix.lower() == ".gguf" else ", so it is not a GGUF model"
            raise ModelError(f"{path} is empty{again}")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = HeaderReader(path, data)
            metadata, end = reader.header()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OutOfMemory(f"not enough memory for {path}", for_weights=True) from None
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if size < end:
        raise ModelError(f"{path} is truncated: {size} bytes of {end}; download it again")
    return File(size, reader.tensors, metadata)


def _rest_of(first: Path, whole: File, n_part: object) -> list[File]:
    """Return the parts after the first. Raises ModelError if a part is missing or wrong."""
    paths = part_paths(first)
    if whole.metadata.get("split.no", 0) != 0:
        raise ModelError(f"{first} is not the first part of its model; name the first, {paths[0].name}")
    if n_part != len(paths) or first != paths[0]:
        raise ModelError(
            f"{first} is the first of {n_part} parts, and its name does not say so; "
            "give each part the name that it was made with, NAME-00001-of-0000N.gguf"
        )
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{missing[0]}{others} of the {n_part} parts of the model is missing; "
            f"all have to be in {first.absolute().parent}"
        )
    parts = []
    for number, path in enumerate(paths[1:], 1):
        part = read_file(path)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, n_part):
            raise ModelError(f"{path} is not part {number + 1} of {n_part} of a model; download it again")
        parts.append(part)
    n_tensor = sum(len(part.tensors) for part in (whole, *parts))
    declared = whole.metadata.get("split.tensors.count", n_tensor)
    if n_tensor != declared:
        raise ModelError(
            f"the parts of {first} have {n_tensor} tensors instead of {declared}: they are not of one model; "
            "download them again"
        )
    return parts


def _info(path: Path, n_part: int, size: int, metadata: dict[str, Any], tensors: dict[str, int]) -> ModelInfo:
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{path} is not a language model: no architecture in its header")

    def number(key: str, default: int | None = None, least: int = 0) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, int):
            raise ModelError(f"{path} is not a language model: no {arch}.{key} in its header")
        if not least <= value < _END:
            raise ModelError(f"{path} is damaged: its header says {arch}.{key} = {value}; download it again")
        return value

    n_block = number("block_count")
    # the last layers may be for multi-token prediction: kvtool's cache has no cells for them
    n_layer = n_block - number("nextn_predict_layers", 0)
    n_loop = number("num_loops", 1)
    n = n_block if n_block > MAX_LAYERS else n_layer * n_loop
    if not 0 < n <= MAX_LAYERS:
        raise ModelError(f"{path} is damaged: its header says {n} layers; download it again")

    def per_layer(key: str, default: object) -> tuple[int, ...]:
        value = metadata.get(f"{arch}.{key}", default)
        values = value if isinstance(value, tuple) else (value,) * n_block
        if len(values) < n_layer or not all(isinstance(v, int) and 0 <= v < _END for v in values):
            raise ModelError(f"{path} is damaged: bad {arch}.{key} in its header; download it again")
        return values[:n_layer] * n_loop

    n_head = per_layer("attention.head_count", 0)
    head_size = number("embedding_length") // max(n_head) if max(n_head) > 0 else 0
    file_type = metadata.get("general.file_type", -1)
    try:
        quantization = constants.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        quantization = "unknown"
    return ModelInfo(
        path=path,
        n_part=n_part,
        size=size,
        architecture=arch,
        name=str(metadata.get("general.name", path.stem)),
        quantization=quantization,
        n_layer=n_layer * n_loop,
        n_head=n_head,
        n_head_kv=per_layer("attention.head_count_kv", metadata.get(f"{arch}.attention.head_count", 0)),
        head_size_k=number("attention.key_length", head_size),
        head_size_v=number("attention.value_length", head_size),
        n_ctx_train=number("context_length", least=1),
        tokenizer="tokenizer.ggml.model" in metadata,
        chat_template="tokenizer.chat_template" in metadata,
        metadata=metadata,
        # If a model runs its layers several times (num_loops), llama.cpp counts each layer once for each
        # loop. Only the layers of the first loop have weights
        weights=Weights.of(tensors, n_layer * n_loop + n_block - n_layer, n_block - n_layer),
        has_mtp=f"blk.{n_layer}.nextn.eh_proj.weight" in tensors,
    )
