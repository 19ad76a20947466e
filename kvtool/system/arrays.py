"""Convert named arrays to bytes and back.

Each array is stored as a line with its name, dtype and shape, followed by its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_ALIGN = 64

_LONGEST = 256
"""Maximum length of a line, in bytes."""


def parts_of(name: str, array: np.ndarray, at: int) -> Iterator[memoryview]:
    """Yield the bytes of a named array in parts: first its line, then its data.

    at: offset at which the line will be stored. Spaces at the end of the line align the data for every dtype.
    """
    array = np.ascontiguousarray(array)
    line = f"{name} {array.dtype.str} {','.join(map(str, array.shape))}".encode()
    yield memoryview(line + b" " * (-(at + len(line) + 1) % _ALIGN) + b"\n")
    yield array.reshape(-1).view(np.uint8).data


def arrays_in(data: Any, at: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays in `data`, starting at offset `at`. The arrays are views of `data`.

    data: an object with the buffer protocol. Raises ValueError if the bytes are not named arrays.
    """
    view = memoryview(data)
    arrays: dict[str, np.ndarray] = {}
    while at < len(view):
        line, is_whole, _ = bytes(view[at : at + _LONGEST]).partition(b"\n")
        key, dtype, shape = (line if is_whole else b"").decode().split()
        dims = [int(n) for n in shape.split(",")]
        arrays[key] = np.frombuffer(view, dtype, int(np.prod(dims)), at + len(line) + 1).reshape(dims)
        at += len(line) + 1 + arrays[key].nbytes
    return arrays
