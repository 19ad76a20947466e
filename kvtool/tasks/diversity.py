"""diversity: several samples of each prompt; they should be as diverse as with the full cache.

self_bleu: the mean BLEU of a prompt's samples, each compared with the other samples (Zhu et al. 2018,
arXiv:1802.01886). It is between 0 and 100. The higher it is, the more similar are the samples.

full_self_bleu: self_bleu of samples from the full cache, with the same seeds.

distance: the absolute difference between self_bleu and full_self_bleu. BUZZ (arXiv:2410.23079, section 4.2.3,
Figure 7) calls a policy better if its distance is smaller.

Layouts:

- {"prompt"}.
- MT-Bench: {"turns": [...]}. Only the first turn is used.
- HELM: {"article"}, a text that ends with an instruction to summarize it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.measure import records
from kvtool.tasks import data, metrics
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, RecordTask, ScoredAnswer


@dataclass(frozen=True, slots=True)
class Diversity(RecordTask):
    """Parameters of the task.

    Attributes
    ----------
    samples
        Number of samples of each prompt.
    n_max
        Maximum tokens of a sample.
    temp
        Temperature of the sampler.
    top_p
        top-p of the sampler.
    seed
        Seed of the first sample. Each later sample has the next higher seed.
    """

    samples: int = 5
    n_max: int = 64
    temp: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    source: ClassVar[str] = "arXiv:1802.01886, arXiv:2410.23079"
    chat: ClassVar[bool] = True
    uses_sampling: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("sacrebleu",)

    def __post_init__(self) -> None:
        if self.samples < 2 or self.n_max < 1:
            raise ValueError("samples must be at least 2, n_max at least 1")
        if self.temp <= 0 or not 0 < self.top_p <= 1:
            raise ValueError("temp must be above 0, top_p above 0 and at most 1")

    def items_of(self, record: data.Record) -> Sequence[Item]:
        text = (
            record["turns"][0] if "turns" in record else record["prompt" if "prompt" in record else "article"]
        )
        return [Item("", data.text(text))]

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        full = None if reader.full is reader else self._samples(item.prompt, reader.full)
        samples = self._samples(item.prompt, reader)
        full = full or samples
        likeness, full_likeness = metrics.self_bleu(samples), metrics.self_bleu(full)
        scores = {
            "self_bleu": likeness,
            "full_self_bleu": full_likeness,
            "distance": abs(likeness - full_likeness),
        }
        return ScoredAnswer(samples, scores, {"full_output": full})

    def summary(self, finished: Sequence[records.Record]) -> dict[str, float]:
        scores = [record["scores"] for record in finished if record["scores"]]
        if not scores:
            return {}
        apart = np.mean([score["self_bleu"] - score["full_self_bleu"] for score in scores])
        return {"self_bleu less full_self_bleu, of the means": float(apart)}

    def _samples(self, prompt: str, reader: Reader) -> list[str]:
        reader.read(prompt, self.n_max)
        texts = []
        with reader.going_back() as back:
            for number in range(self.samples):
                back()
                texts.append(
                    reader.sample(self.n_max, temp=self.temp, top_p=self.top_p, seed=self.seed + number)
                )
        return [text.strip() for text in texts]


TASK = Diversity
