"""ruler: RULER's thirteen tasks: hidden facts, variables, frequent words, documents; scored by matching.

The tasks are from Hsieh et al. 2024 (arXiv:2404.06654). Their prompts, numbers and limits are those in
NVIDIA/RULER's scripts/synthetic.yaml and scripts/data/synthetic. Each text is as long as `lengths` allows. A
length includes the prompt, the answer's beginning and the longest possible answer, but not the chat template.

string_match: the share of the right answers that are in the output, ignoring case (RULER's string_match_all).
For qa_1 and qa_2, it is 1 if any of the right answers is in the output (RULER's string_match_part).

With question=known, the prompt is read at once. With question=after, the text is read first and then the
question, as in kvpress's benchmark. The answer's beginning (RULER's answer prefix) is read after that, as the
start of the reply.

Differences from RULER:

- The length of the text is fitted for each sample. RULER fits it once for all samples.
- Random numbers come from Python, so samples differ from RULER's.
- Sentences of essays end with . ? or !, while RULER splits essays with NLTK.
- Questions about documents are drawn from the whole file, while RULER takes the first questions.
- Word lists have at most wonderwords' 8,500 words. RULER has more words for lengths beyond 100,000 tokens.
- A solved example is plain text inside the turn.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.tasks._ruler.counts import CommonWords, FrequentWords
from kvtool.tasks._ruler.needles import Needles
from kvtool.tasks._ruler.questions import Questions
from kvtool.tasks._ruler.sources import Sources
from kvtool.tasks._ruler.subtask import SampleSpec
from kvtool.tasks._ruler.variables import Variables
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, ScoredAnswer, Task, in_turn

PARTS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", n_key=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", n_value=4),
    "niah_multiquery": Needles("essay", n_key=4, n_query=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Questions("squad"),
    "qa_2": Questions("hotpotqa"),
}
"""RULER's tasks, from its synthetic.yaml."""

_FILES = {
    "essays": "a folder of Paul Graham's essays: --set essays=FOLDER",
    "squad": "SQuAD's dev-v2.0.json: --set squad=FILE",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json: --set hotpotqa=FILE",
}

_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class Ruler(Task):
    """Parameters of the task.

    Attributes
    ----------
    tasks
        Names of RULER's tasks to run. If empty, all thirteen are run.
    lengths
        Maximum tokens of a prompt and its answer together.
    repeats
        Number of samples of each task and length. RULER has 500.
    question
        "known" to read the question together with the text, or "after" to read it after the text.
    essays
        Folder of texts. RULER uses Paul Graham's essays.
    squad
        File with SQuAD's questions, dev-v2.0.json.
    hotpotqa
        File with HotpotQA's questions, hotpot_dev_distractor_v1.json.
    seed
        Seed of all random choices.
    """

    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)
    repeats: int = 5
    question: str = "known"
    essays: str = ""
    squad: str = ""
    hotpotqa: str = ""
    seed: int = 0

    source: ClassVar[str] = "arXiv:2404.06654"
    needs_files: ClassVar[bool] = False
    chat: ClassVar[bool] = True
    by: ClassVar[tuple[str, ...]] = ("part", "length")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.tasks if name not in PARTS]:
            raise ValueError(f"unknown RULER task {', '.join(unknown)}; choose from {', '.join(PARTS)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be numbers of tokens, such as 4096,8192, got {self.lengths}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.question not in ("known", "after"):
            raise ValueError(f"question must be known or after, got {self.question!r}")
        for source, what in _FILES.items():
            if not getattr(self, source) and (names := [n for n in self._names if source in PARTS[n].needs]):
                raise ValueError(f"{names[0]} needs {what}; --set tasks=... leaves it out")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("wonderwords",) if any("words" in PARTS[name].needs for name in self._names) else ()

    @property
    def _names(self) -> Sequence[str]:
        """Names of RULER's tasks to run, in RULER's order."""
        return [name for name in PARTS if not self.tasks or name in self.tasks]

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """Return samples of all lengths and of RULER's tasks in turn."""
        if files:
            raise InputError(f"ruler takes its files as parameters: {'; '.join(_FILES.values())}")
        sources = Sources(model, self.essays, self.squad, self.hotpotqa, self.seed)
        items = []
        for length, name, number in in_turn(self.lengths, self._names, self.repeats):
            sample = PARTS[name].longest(SampleSpec(name, number, length, self.seed), sources)
            items.append(
                Item(
                    f"{name}-{length}-{number}",
                    sample.context + sample.question,
                    sample.answers,
                    about={"part": name, "length": length},
                    question=sample.question,
                    opening=sample.opening,
                )
            )
        return items

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        part = PARTS[item.about["part"]]
        question = item.question if self.question == "after" else ""
        n_first = reader.ask(item.prompt, part.n_max, question=question, opening=item.opening)
        output = reader.write(part.n_max)
        score = string_match(output, item.references, is_any=part.is_any)
        return ScoredAnswer(output, {"string_match": score}, {"first_tokens": n_first})

    def summary(self, finished: Sequence[records.Record]) -> dict[str, float]:
        """Return RULER's averages: for each length, the mean of its tasks' means.

        A length with only one of RULER's tasks has no average.
        """
        values: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for record in finished:
            if "string_match" in record["scores"]:
                values[record["length"]][record["part"]].append(record["scores"]["string_match"])
        return {
            f"average of {len(of)} tasks, {length} tokens": fmean(map(fmean, of.values()))
            for length, of in sorted(values.items())
            if len(of) > 1
        }


def string_match(output: str, references: Sequence[str], *, is_any: bool) -> float:
    """RULER's score: the share of the references that are in the output.

    is_any: True to return 1 if any reference is in the output, else 0.
    """
    text = _CONTROL.sub("\n", output).strip().lower()
    is_in_output = [reference.lower() in text for reference in references]
    return float(any(is_in_output)) if is_any else fmean(is_in_output)


TASK = Ruler
