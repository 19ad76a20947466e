"""What a chat says of its model: that it is not for chats, and the first chat which better one would run."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path

from kvtool.units import format_bytes


def base_model(path: Path) -> str | None:
    """The line about a model that models.txt says is not for chats; None for any other. path: of its file."""
    from kvtool.models.catalogue import registry

    for entry in registry().values():
        if entry.file == path.name and (of_base := entry.of_base):
            return f"{entry.name} is {of_base}; `kvtool generate --raw` continues a text"
    return None


def better_model() -> str | None:
    """The line about it; None where it was said before, or where that cannot be written down."""
    try:
        path = user_state_path("kvtool", appauthor=False) / "first-chat"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except (OSError, RuntimeError):
        return None
    from kvtool.models.catalogue import registry
    from kvtool.runs import fits

    if not (found := fits.best(registry().values(), fits.room())):
        return None
    size = "" if found.here else f" (downloads {format_bytes(found.about_bytes or 0)})"
    return f"a better model fits here: kvtool chat -m {found.name}{size}"
