"""JSON pointers: places in a JSON value, such as /$defs/colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def names_in(pointer: str) -> list[str]:
    """Return the names of a JSON pointer, without its escapes."""
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the value at the JSON pointer of a reference, or None. It may have escapes such as %20."""
    for name in names_in(unquote(pointer)):
        # Python does not parse a number that has thousands of digits
        if isinstance(root, list) and name.isdecimal() and len(name) < 10 and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root
