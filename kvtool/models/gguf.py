"""Read the metadata in a GGUF file's header. Long arrays are skipped: kvtool does not need them."""

import importlib.util
import mmap
import struct
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvtool.errors import ModelError


def _import_alone(package: str, name: str) -> ModuleType:
    """Import a module without its package.

    Importing all of gguf would take a tenth of the time that a chat needs to start.
    """
    package_spec = importlib.util.find_spec(package)
    assert package_spec is not None
    path = Path(str(package_spec.origin)).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf import constants as constants
else:
    constants = _import_alone("gguf", "constants")

MAX_LAYERS = 512
"""Maximum length of an array that has one value for each layer: llama.cpp's LLAMA_MAX_LAYERS."""

# ggml's GGML_MAX_DIMS
_MAX_AXES = 4

_LETTERS = "UINT8=B INT8=b UINT16=H INT16=h UINT32=I INT32=i FLOAT32=f BOOL=? UINT64=Q INT64=q FLOAT64=d"
_FORMATS = {constants.GGUFValueType[pair[:-2]]: pair[-1] for pair in _LETTERS.split()}
"""Format character of `struct` for each numeric type."""


class HeaderReader:
    """Read the header of a memory-mapped file.

    This is faster than gguf's GGUFReader, which creates an object for every token of the vocabulary. For
    49,000 tokens that takes 1.6 s.

    tensors: size in bytes of each tensor in the file, by name. `header` fills it. The size is 0 if the gguf
    package does not know the tensor's type.
    """

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 0
        self.tensors: dict[str, int] = {}

    def header(self) -> tuple[dict[str, Any], int]:
        """Return the metadata, and the size in bytes that the file needs to hold all tensors.

        The value of an array of strings, or of an array longer than MAX_LAYERS, is None. Raises ModelError.
        """
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self.at = 4
        try:
            version = self._number("I")
            if version not in (2, 3):
                raise ModelError(
                    f"{self.path} has GGUF version {version} or is big-endian; kvtool reads versions 2 and 3"
                )
            n_tensor, n_key = self._number("Q"), self._number("Q")
            metadata: dict[str, Any] = {}
            for _ in range(n_key):
                key = self._string()
                metadata[key] = self._value(self._number("I"))
            ends = [self._tensor_end() for _ in range(n_tensor)]
            if len(self.tensors) < n_tensor:
                raise ValueError("two tensors of one name")
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
        if length > MAX_LAYERS:
            return None
        return struct.unpack_from(f"<{length}{code}", self.data, start)

    def _tensor_end(self) -> int:
        """Read a tensor's entry. Return the end of the tensor, relative to the start of all tensors' data."""
        name = self._string()
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
            # the gguf package does not know this type yet; llama.cpp will accept or reject the file
            block, block_bytes = 1, 0
        self.tensors[name] = n_item // block * block_bytes
        return offset + self.tensors[name]
