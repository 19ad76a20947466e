"""passkey: a number is hidden in a long text; the answer must contain it.

From Mohtashami and Jaggi 2023 (arXiv:2305.16300, appendix): an instruction, filler, the sentence with the
key, filler, and the question. Differs: if files are given, their text is the filler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtool.llama.model import Model
from kvtool.tasks.haystack import check, hide, places, sentences, sentences_of
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
START = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey(Task):
    """Parameters of the task.

    Attributes
    ----------
    lengths
        Lengths of the prompts in tokens.
    depths
        Where the key is: 0 is the start, 1 the end.
    repeats
        Prompts for each length and depth, each with another key and other filler.
    digits
        Digits of the key.
    seed
        Seed of everything that is drawn.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    repeats: int = 5
    digits: int = 5
    seed: int = 0

    source: ClassVar[str] = "arXiv:2305.16300"
    needs_files: ClassVar[bool] = False
    n_max: ClassVar[int] = 16
    by: ClassVar[tuple[str, ...]] = ("depth", "length")

    def __post_init__(self) -> None:
        check(self.lengths, self.depths, self.repeats)
        if not 1 <= self.digits <= 12:
            raise ValueError(f"digits must be in 1..12, got {self.digits}")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        filler = sentences_of(files) if files else sentences(FILLER)
        found = []
        for name, length, depth, draws in places(self.lengths, self.depths, self.repeats, self.seed):
            key = str(draws.randrange(10 ** (self.digits - 1), 10**self.digits))
            fact = f"The pass key is {key}. Remember it. {key} is the pass key."
            prompt = hide(model, filler, fact, depth, length, draws, START, QUESTION)
            found.append(Item(name, prompt, [key], about={"length": length, "depth": depth}))
        return found

    def answer(self, item: Item, reader: Reader) -> Answer:
        # uncut: the fact may be in the middle
        reader.read(item.prompt, self.n_max, uncut=True)
        output = reader.write(self.n_max)
        return Answer(output, {"found": float(item.references[0] in output)})


TASK = Passkey
