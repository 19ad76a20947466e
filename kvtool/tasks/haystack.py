"""A fact hidden in filler text, at a given depth of a prompt of a given length."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtool.errors import InputError
from kvtool.llama.model import Model

_END = re.compile(r"(?<=[.!?])\s+")


def check(lengths: Sequence[int], depths: Sequence[float], repeats: int) -> None:
    """Raise ValueError for wrong lengths (tokens), depths (0 to 1) or repeats."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be numbers of tokens, such as 1024,2048, got {lengths}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must be in 0..1, got {depths}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")


def sentences_of(files: Sequence[Path]) -> list[str]:
    """The sentences of text files, and of the .txt files in folders. Raises InputError if there are none."""
    paths = [path for file in files for path in (sorted(file.rglob("*.txt")) if file.is_dir() else [file])]
    try:
        texts = [path.read_text(encoding="utf-8-sig") for path in paths]
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"a file of the filler text is not UTF-8 (byte {error.start})") from None
    found = [sentence for text in texts for sentence in sentences(text)]
    if not found:
        raise InputError(f"no text in {', '.join(map(str, files))}")
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line. A sentence ends with . ? or !"""
    parts = (" ".join(part.split()) for part in _END.split(text))
    return [part for part in parts if part]


def places(
    lengths: Sequence[int], depths: Sequence[float], repeats: int, seed: int
) -> Iterator[tuple[str, int, float, random.Random]]:
    """Each length and depth, `repeats` times: its id, length, depth and its own random numbers."""
    for length in lengths:
        for depth in depths:
            for number in range(repeats):
                name = f"{length}-{depth:g}-{number}"
                yield name, length, depth, random.Random(f"{seed} {name}")


def hide(
    model: Model,
    filler: Sequence[str],
    fact: str,
    depth: float,
    length: int,
    draws: random.Random,
    start: str,
    end: str,
) -> str:
    """A prompt of start, filler with the fact in it, and end: at most `length` tokens, as many as fit.

    The filler begins at a randomly drawn sentence and starts over at its end. The fact stands between two
    sentences, as near as possible after the share `depth` of the filler's tokens. Raises InputError if not
    even the fact fits.
    """
    room = length - len(model.tokenize(f"{start}\n {fact}\n{end}", start=True))
    if room < 0:
        raise InputError(f"the fact does not fit into {length} tokens; choose greater lengths")
    first = draws.randrange(len(filler))
    chosen: list[str] = []
    ends = [0]
    while True:
        sentence = filler[(first + len(chosen)) % len(filler)]
        # with the space before it, as in the prompt
        end_of_this = ends[-1] + len(model.tokenize(f" {sentence}"))
        if end_of_this > room:
            break
        chosen.append(sentence)
        ends.append(end_of_this)
    n_before = min(range(len(ends)), key=lambda n: abs(ends[n] - depth * ends[-1]))
    return f"{start}\n{' '.join([*chosen[:n_before], fact, *chosen[n_before:]])}\n{end}"
