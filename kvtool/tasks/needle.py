"""needle: a sentence hidden in a long text; found where the answer has all the words that matter.

As Kamradt asks it (2023, "Needle In A Haystack - Pressure Testing LLMs"), needle, question and instruction
his. Differs: no other model judges the answer, every keyword must be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtool.llama.model import Model
from kvtool.tasks.haystack import check, hide, places, sentences_of
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task

START = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct."
END = "{question} Don't give information outside the document or repeat your findings."


@dataclass(frozen=True, slots=True)
class Needle(Task):
    """lengths: of the prompts, in tokens. depths: where the needle is, 0 the start, 1 the end.

    repeats: prompts of each length and depth, with other filler. needle, question: the sentence, and what
    asks for it. keywords: all of these must be in the answer, whatever their case. seed: of all draws.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    repeats: int = 5
    needle: str = (
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    )
    question: str = "What is the best thing to do in San Francisco?"
    keywords: tuple[str, ...] = ("sandwich", "Dolores Park")
    seed: int = 0

    source: ClassVar[str] = "Kamradt 2023"
    n_max: ClassVar[int] = 48
    chat: ClassVar[bool] = True
    by: ClassVar[tuple[str, ...]] = ("depth", "length")

    def __post_init__(self) -> None:
        check(self.lengths, self.depths, self.repeats)

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        filler, end = sentences_of(files), END.format(question=self.question)
        found = []
        for name, length, depth, draws in places(self.lengths, self.depths, self.repeats, self.seed):
            prompt = hide(model, filler, self.needle, depth, length, draws, START, end)
            found.append(Item(name, prompt, self.keywords, about={"length": length, "depth": depth}))
        return found

    def answer(self, item: Item, reader: Reader) -> Answer:
        # its middle is where the fact may be
        reader.read(item.prompt, self.n_max, uncut=True)
        output = reader.write(self.n_max)
        return Answer(
            output, {"found": float(all(word.lower() in output.lower() for word in item.references))}
        )


TASK = Needle
