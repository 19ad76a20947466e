"""diversity: several samples of each prompt; how alike they are, and how far that is from the full cache's.

self_bleu: of a prompt's samples (Zhu et al. 2018, arXiv:1802.01886), the mean of each one's BLEU against
all others, 0 to 100; the higher the more alike. BUZZ (arXiv:2410.23079, section 4.2.3, Figure 7) takes a
policy to be the better the closer it is to the full cache's: full_self_bleu, of as many samples of the same
prompt with the same seeds, and distance, what lies between the two. The record holds both.

Layouts: {"prompt"}; MT-Bench's {"turns": [...]}, the first one; a text that asks for a summary of itself, as
HELM's ({"article"}).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.tasks import data, metrics
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task


@dataclass(frozen=True, slots=True)
class Diversity(Task):
    """samples: of each prompt. n_max: the most tokens of one. temp, top_p: how they are drawn. seed: of the
    first, the others' follow.
    """

    samples: int = 5
    n_max: int = 64
    temp: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    source: ClassVar[str] = "arXiv:1802.01886, arXiv:2410.23079"
    chat: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("sacrebleu",)

    def __post_init__(self) -> None:
        if self.samples < 2 or self.n_max < 1:
            raise ValueError("samples must be at least 2, n_max at least 1")
        if self.temp <= 0 or not 0 < self.top_p <= 1:
            raise ValueError("temp must be above 0, top_p above 0 and at most 1")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        return [
            Item(f"{data.stem(path)}-{number}", prompt)
            for path, number, prompt in data.each(files, "diversity", _prompt)
        ]

    def answer(self, item: Item, reader: Reader) -> Answer:
        # the policy's second, so that the record's figures are those of its engine
        full = None if reader.full is reader else self._samples(item.prompt, reader.full)
        samples = self._samples(item.prompt, reader)
        full = full or samples
        likeness, full_likeness = metrics.self_bleu(samples), metrics.self_bleu(full)
        scores = {
            "self_bleu": likeness,
            "full_self_bleu": full_likeness,
            "distance": abs(likeness - full_likeness),
        }
        return Answer(samples, scores, {"full_output": full})

    def summary(self, found: Sequence[records.Record]) -> dict[str, float]:
        scores = [record["scores"] for record in found if record["scores"]]
        if not scores:
            return {}
        apart = np.mean([score["self_bleu"] - score["full_self_bleu"] for score in scores])
        return {"self_bleu less full_self_bleu, of the means": float(apart)}

    def _samples(self, prompt: str, reader: Reader) -> list[str]:
        reader.read(prompt, self.n_max)
        found = []
        with reader.going_back() as back:
            for number in range(self.samples):
                back()
                found.append(
                    reader.sample(self.n_max, temp=self.temp, top_p=self.top_p, seed=self.seed + number)
                )
        return [text.strip() for text in found]


def _prompt(record: data.Record) -> str:
    if "turns" in record:
        return data.text(record["turns"][0])
    return data.text(record["prompt"] if "prompt" in record else record["article"])


TASK = Diversity
