"""Names of models that were split into several GGUF files, NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

# llama.cpp's llama_split_path makes these names
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """Return the names of all parts in order, given the name of any part; [name] for an unsplit model."""
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts in order, given the path of any part."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_part(path: Path) -> Path:
    """Return the path of the first part, given the path of any part.

    llama.cpp needs only the first part: it finds the rest by name.
    """
    return path.with_name(part_names(path.name)[0])
