"""JSON pointers: places in a JSON value, such as /$defs/colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer, or None."""
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        # Python does not parse a number that has thousands of digits
        if isinstance(root, list) and name.isdecimal() and len(name) < 10 and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root
