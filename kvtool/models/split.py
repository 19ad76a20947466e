"""Models that were split into several GGUF files, NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

# llama.cpp's llama_split_path
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """The names of all parts, in their order, given any of them; the name alone if it is not a part's."""
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """The files of a model, given any of them: all parts in their order, or the one file that it is."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_part(path: Path) -> Path:
    """The part that llama.cpp is given, given any of them: it finds the others by their names."""
    return path.with_name(part_names(path.name)[0])
