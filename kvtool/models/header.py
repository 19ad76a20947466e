"""What the header of a GGUF file says: the sizes that a cache needs, and what kvtool cannot run yet."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvtool.errors import ModelError, OutOfMemory, UsageError
from kvtool.models.supported import INTERLEAVED


def _alone(package: str, name: str) -> ModuleType:
    """A module without its package, which in gguf imports writers and YAML: a tenth of a chat's start."""
    found = importlib.util.find_spec(package)
    assert found is not None
    spec = importlib.util.spec_from_file_location(name, Path(str(found.origin)).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf import constants
else:
    constants = _alone("gguf", "constants")

PAD = 256
"""llama.cpp rounds a cache up to a multiple of this many cells."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

_FORMATS = {
    constants.GGUFValueType.UINT8: "B",
    constants.GGUFValueType.INT8: "b",
    constants.GGUFValueType.UINT16: "H",
    constants.GGUFValueType.INT16: "h",
    constants.GGUFValueType.UINT32: "I",
    constants.GGUFValueType.INT32: "i",
    constants.GGUFValueType.FLOAT32: "f",
    constants.GGUFValueType.BOOL: "?",
    constants.GGUFValueType.UINT64: "Q",
    constants.GGUFValueType.INT64: "q",
    constants.GGUFValueType.FLOAT64: "d",
}

# llama.cpp's LLAMA_MAX_LAYERS: an array that says something for every layer is no longer than this
_MAX_LAYERS = 512

# ggml's GGML_MAX_DIMS
_MAX_AXES = 4


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """n_head, n_head_kv: one number a layer, only of layers that have a cache. size: of the file, in bytes.

    window: how many tokens sliding layers see, 0 where there are none. slides: which layers those are.
    metadata: the header's values, without strings and numbers that come in lists longer than the layers.
    """

    path: Path
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
    window: int
    slides: tuple[bool, ...]
    tokenizer: bool
    chat_template: bool
    metadata: dict[str, Any] = field(repr=False)

    @property
    def n_sliding(self) -> int:
        return sum(self.slides)

    def cell_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of K and V that a token takes in all layers that do not slide.

        Raises UsageError for types that do not fit.
        """
        return self._token_bytes(False, type_k, type_v)

    def window_bytes(self, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of K and V that sliding layers take, however many cells the others have.

        n_batch: the most tokens of a step. Raises UsageError for types that do not fit.
        """
        n_cell = -(-(self.window + n_batch) // PAD) * PAD
        return n_cell * self._token_bytes(True, type_k, type_v)

    def _token_bytes(self, slides: bool, type_k: str, type_v: str) -> int:
        key = _row_bytes("K", type_k, self.head_size_k)
        value = _row_bytes("V", type_v, self.head_size_v)
        n_row = sum(n for n, sliding in zip(self.n_head_kv, self.slides, strict=True) if sliding == slides)
        return n_row * (key + value)

    def cells_that_fit(self, n_bytes: int, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """How many cells n_bytes hold beside the sliding layers' window; 0 for a model without attention."""
        cell_bytes = self.cell_bytes(type_k, type_v)
        rest = n_bytes - self.window_bytes(n_batch, type_k, type_v)
        return max(rest, 0) // cell_bytes if cell_bytes else 0


def _row_bytes(which: str, cache_type: str, head_size: int) -> int:
    if cache_type not in CACHE_TYPES:
        raise UsageError(f"no cache type {cache_type!r} for {which}; there are: {', '.join(CACHE_TYPES)}")
    block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[cache_type.upper()]]
    if head_size % block:
        raise UsageError(
            f"{which} cannot be {cache_type}: blocks of {block} do not divide the head size of {head_size}"
        )
    return head_size // block * block_bytes


def read(path: Path) -> ModelInfo:
    """Reads the header alone. Raises ModelError for what is not a whole GGUF language model."""
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ModelError(f"{path} is a folder; name the GGUF file in it")
        if size == 0:
            raise ModelError(f"{path} is empty; download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, end = _Reader(path, data).header()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OutOfMemory(f"no memory for {path}") from None
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if size < end:
        raise ModelError(f"{path} is truncated: {size} bytes of {end}; download it again")
    return _info(path, size, metadata)


class _Reader:
    """Walks over a header. gguf's GGUFReader builds objects for every token: 1.6 s for 49,000 of them."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> tuple[dict[str, Any], int]:
        """The metadata, and how long the file must be for its tensors."""
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self.at = 4
        try:
            version = self._number("I")
            if version not in (2, 3):
                raise ModelError(
                    f"{self.path} is of GGUF version {version} or big-endian; versions 2 and 3 can be read"
                )
            n_tensor, n_key = self._number("Q"), self._number("Q")
            metadata: dict[str, Any] = {}
            for _ in range(n_key):
                key = self._string()
                metadata[key] = self._value(self._number("I"))
            ends = [self._tensor_end() for _ in range(n_tensor)]
        except (struct.error, OverflowError):
            raise ModelError(f"{self.path} is truncated or damaged; download it again") from None
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path} is damaged ({error}); download it again") from None
        alignment = metadata.get("general.alignment", constants.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} is damaged (alignment {alignment!r}); download it again")
        start = -(-self.at // alignment) * alignment
        return metadata, start + max(ends) if ends else self.at

    def _number(self, code: str) -> Any:
        number = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return number

    def _string(self) -> str:
        length = self._number("Q")
        start = self.at
        self.at += length
        return self.data[start : self.at].decode("utf-8", "replace")

    def _value(self, kind: int) -> object:
        kind = constants.GGUFValueType(kind)
        if kind is constants.GGUFValueType.STRING:
            return self._string()
        if kind is constants.GGUFValueType.ARRAY:
            return self._array()
        return self._number(_FORMATS[kind])

    def _array(self) -> tuple[Any, ...] | None:
        """None for strings and for more numbers than there can be layers: nothing here needs those."""
        kind, length = constants.GGUFValueType(self._number("I")), self._number("Q")
        if kind is constants.GGUFValueType.STRING:
            unpack, at = struct.Struct("<Q").unpack_from, self.at
            for _ in range(length):
                at += 8 + unpack(self.data, at)[0]
            self.at = at
            return None
        code = _FORMATS[kind]
        start = self.at
        self.at += length * struct.calcsize("<" + code)
        if length > _MAX_LAYERS:
            return None
        return struct.unpack_from(f"<{length}{code}", self.data, start)

    def _tensor_end(self) -> int:
        self._string()
        n_axis = self._number("I")
        if n_axis > _MAX_AXES:
            raise ValueError(f"a tensor of {n_axis} axes")
        n_item = 1
        for _ in range(n_axis):
            n_item *= self._number("Q")
        kind = self._number("I")
        offset: int = self._number("Q")
        try:
            block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            # newer than the gguf package: whether llama.cpp knows it is llama.cpp's answer to give
            return offset
        return offset + n_item // block * block_bytes


def _info(path: Path, size: int, metadata: dict[str, Any]) -> ModelInfo:
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{path} names no architecture in its header: not a language model")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, int):
            raise ModelError(f"{path} has no {arch}.{key} in its header: not a language model")
        # llama.cpp's own numbers have 32 bits
        if not 0 <= value < 2**31:
            raise ModelError(f"{path} has {value} as {arch}.{key} in its header; download it again")
        return value

    n_block = number("block_count")
    # multi-token prediction has layers of its own at the end, outside the cache of the model proper
    n_layer = n_block - number("nextn_predict_layers", 0)
    n_loop = number("num_loops", 1)
    if not (0 < n_layer <= n_block and 0 < n_layer * n_loop <= _MAX_LAYERS):
        raise ModelError(f"{path} has {n_layer * n_loop} layers by its header; download it again")

    def per_layer(key: str, default: object) -> tuple[int, ...]:
        value = metadata.get(f"{arch}.{key}", default)
        values = value if isinstance(value, tuple) else (value,) * n_block
        if len(values) < n_layer or not all(isinstance(v, int) for v in values):
            raise ModelError(f"{path} has a damaged {arch}.{key} in its header; download it again")
        return values[:n_layer] * n_loop

    n_head = per_layer("attention.head_count", 0)
    head_size = number("embedding_length") // max(n_head) if max(n_head) > 0 else 0
    window, slides = _sliding(metadata, arch, n_layer * n_loop)
    file_type = metadata.get("general.file_type", -1)
    try:
        quantization = constants.LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        quantization = "unknown"
    return ModelInfo(
        path=path,
        size=size,
        architecture=arch,
        name=str(metadata.get("general.name", path.stem)),
        quantization=quantization,
        n_layer=n_layer * n_loop,
        n_head=n_head,
        n_head_kv=per_layer("attention.head_count_kv", metadata.get(f"{arch}.attention.head_count", 0)),
        head_size_k=number("attention.key_length", head_size),
        head_size_v=number("attention.value_length", head_size),
        n_ctx_train=number("context_length"),
        window=window,
        slides=slides,
        tokenizer="tokenizer.ggml.model" in metadata,
        chat_template="tokenizer.chat_template" in metadata,
        metadata=metadata,
    )


def _sliding(metadata: dict[str, Any], arch: str, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    """The window, 0 where no layer slides, and which layers slide."""
    window, pattern = INTERLEAVED.get(arch, (0, 0))
    if arch in INTERLEAVED:
        window = metadata.get(f"{arch}.attention.sliding_window", window)
        pattern = metadata.get(f"{arch}.attention.sliding_window_pattern", pattern)
    if not isinstance(window, int) or window < 1:
        return 0, (False,) * n_layer
    if isinstance(pattern, int):
        return window, tuple(pattern == 0 or i % pattern < pattern - 1 for i in range(n_layer))
    if not isinstance(pattern, tuple) or len(pattern) < n_layer:
        raise ModelError(
            f"a damaged {arch}.attention.sliding_window_pattern in the header; download it again"
        )
    return window, tuple(map(bool, pattern[:n_layer]))
