"""needle: a sentence is hidden in a long text; the answer must contain its keywords.

From Kamradt 2023, "Needle In A Haystack - Pressure Testing LLMs", with his needle, question and instruction.
Differs: no second model judges the answer; it must contain every keyword.
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
    """Parameters of the task.

    Attributes
    ----------
    lengths
        Lengths of the prompts in tokens.
    depths
        Where the needle is: 0 is the start, 1 the end.
    repeats
        Prompts for each length and depth, each with other filler.
    needle
        The hidden sentence.
    question
        The question that it answers.
    keywords
        Words that the answer must contain, in upper or lower case.
    seed
        Seed of everything that is drawn.
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
        # uncut: the fact may be in the middle
        reader.read(item.prompt, self.n_max, uncut=True)
        output = reader.write(self.n_max)
        return Answer(
            output, {"found": float(all(word.lower() in output.lower() for word in item.references))}
        )


TASK = Needle
