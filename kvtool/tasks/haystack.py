"""Base class of needle and passkey, which hide a fact at a given depth in a prompt of a given length."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.llama.loaded.model import Model
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, ScoredAnswer, Task, in_turn

_END = re.compile(r"(?<=[.!?])\s+")


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Filler from passkey's paper, used if no files are given."""


@dataclass(frozen=True, slots=True)
class Haystack(Task):
    """Parameters of both tasks.

    Attributes
    ----------
    lengths
        Lengths of the prompts in tokens.
    depths
        Positions of the fact in the filler: 0 is the start, 1 is the end.
    repeats
        Number of prompts for each length and depth. Each has different filler.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    repeats: int = 5

    n_max: ClassVar[int]
    by: ClassVar[tuple[str, ...]] = ("depth", "length")

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be numbers of tokens, such as 1024,2048, got {self.lengths}")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths must be in 0..1, got {self.depths}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of all random choices. It is the last parameter of each task."""

    @abstractmethod
    def parts(self, rng: random.Random) -> tuple[str, str, str, Sequence[str]]:
        """Return the start of a prompt, its fact, its end, and the words that the answer must contain."""

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """Return prompts of all lengths and depths in turn."""
        filler = sentences_of(files) if files or self.needs_files else sentences(FILLER)
        items = []
        for length, depth, number in in_turn(self.lengths, self.depths, self.repeats):
            name = f"{length}-{depth:g}-{number}"
            rng = random.Random(f"{self.seed} {name}")
            start, fact, end, words = self.parts(rng)
            prompt = hide(model, filler, fact, depth, length, rng, start, end)
            items.append(Item(name, prompt, words, about={"length": length, "depth": depth}))
        return items

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        # do not cut the prompt: the fact may be in its middle
        reader.read(item.prompt, self.n_max, uncut=True)
        output = reader.write(self.n_max)
        has_all = all(word.lower() in output.lower() for word in item.references)
        return ScoredAnswer(output, {"found": float(has_all)})


def sentences_of(files: Sequence[Path]) -> list[str]:
    """Return the sentences of `texts_of`. Raises InputError if there are none."""
    all_sentences = [sentence for text in texts_of(files) for sentence in sentences(text)]
    if not all_sentences:
        raise InputError(f"no text in {', '.join(map(str, files))}")
    return all_sentences


def texts_of(files: Sequence[Path]) -> list[str]:
    """Return the texts of files, and of the .txt files in folders, sorted by name. Raises InputError."""
    paths = [path for file in files for path in (sorted(file.rglob("*.txt")) if file.is_dir() else [file])]
    return [_text_of(path) for path in paths]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start})") from None


def sentences(text: str) -> list[str]:
    """Split a text into sentences, and replace line breaks by spaces. A sentence ends with . ? or !"""
    parts = (" ".join(part.split()) for part in _END.split(text))
    return [part for part in parts if part]


def hide(
    model: Model,
    filler: Sequence[str],
    fact: str,
    depth: float,
    length: int,
    rng: random.Random,
    start: str,
    end: str,
) -> str:
    """Build a prompt from `start`, the filler with the fact, and `end`. It has at most `length` tokens.

    The prompt has as much filler as fits. This filler begins at a random sentence. After the last sentence,
    it continues with the first. The fact is put between two sentences, as close as possible to the
    fraction `depth` of the filler's tokens. Raises InputError if the fact does not fit even without filler.
    """
    room = length - len(model.tokenize(f"{start}\n {fact}\n{end}", start=True))
    if room < 0:
        raise InputError(f"the fact does not fit into {length} tokens; choose greater lengths")
    first = rng.randrange(len(filler))
    chosen: list[str] = []
    ends = [0]
    while True:
        sentence = filler[(first + len(chosen)) % len(filler)]
        # the prompt has a space before each sentence
        end_of_this = ends[-1] + len(model.tokenize(f" {sentence}"))
        if end_of_this > room:
            break
        chosen.append(sentence)
        ends.append(end_of_this)
    n_before = min(range(len(ends)), key=lambda n: abs(ends[n] - depth * ends[-1]))
    return f"{start}\n{' '.join([*chosen[:n_before], fact, *chosen[n_before:]])}\n{end}"
