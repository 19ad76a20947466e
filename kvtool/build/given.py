"""Find a wheel that was built elsewhere and fits this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from kvtool.build import pack
from kvtool.system.paths import checkout, expanded


def folders() -> list[Path]:
    """Return the folders that are searched for wheels: $KVTOOL_WHEELS, then dist/ of the checkout."""
    named = filter(None, os.environ.get("KVTOOL_WHEELS", "").split(os.pathsep))
    root = checkout()
    return [*map(expanded, named), *([root / "dist"] if root else [])]


def find(places: Iterable[Path], key: str) -> Path | None:
    """Return the first wheel that runs on this machine and contains the build with `key`, or None."""
    for folder in places:
        for wheel in sorted(folder.glob(f"{pack.PACKAGE}-*.whl")):
            if runs_here(wheel.name) and pack.key_of(wheel) == key:
                return wheel.absolute()
    return None


def runs_here(name: str) -> bool:
    """True if a wheel with this name runs on this machine.

    The name must end with py3-none-PLATFORM.whl. PLATFORM may be a list of platforms with dots between them.
    """
    words = name.removesuffix(".whl").split("-")
    return words[-3:-1] == ["py3", "none"] and any(map(_is_platform, words[-1].split(".")))


def _is_platform(tag: str) -> bool:
    """True if a platform tag names this machine, and this system in this version or an older one."""
    machine = platform.machine().lower()
    if sys.platform == "win32":
        return tag == f"win_{machine}"
    if sys.platform == "darwin":
        system, version, machines = "macosx", platform.mac_ver()[0], (machine, "universal2")
    elif tag == f"linux_{machine}":
        return True
    else:
        libc, version = platform.libc_ver()
        system, machines = "manylinux" if libc == "glibc" else "no glibc", (machine,)
    match = re.fullmatch(rf"{system}_(\d+)_(\d+)_(\w+)", tag)
    return bool(match and match[3] in machines and (int(match[1]), int(match[2])) <= _version(version))


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [*map(int, re.findall(r"\d+", text)), 0, 0]
    return major, minor


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
