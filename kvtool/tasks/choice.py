"""choice: multiple choice; the likeliest answer must be the right one, after 0 to 5 solved examples.

Prompts come from lm-evaluation-harness (Gao et al. 2023) for OpenBookQA, PIQA, MathQA, COPA, RTE and
Winogrande. Examples are separated by an empty line. The prompt is read once, and then each choice is scored
as its continuation.

acc: 1 if the choice with the highest log-probability is right.

acc_norm: 1 if the choice with the highest log-probability per byte is right. The bytes are counted in
UTF-8, without the space before the choice. The harness counts characters instead, which is the same for
ASCII.

For Winogrande, the text after the blank is scored instead of the choice. This text is the same for all
choices, so both scores are equal.

Layouts:

- LLM-Adapters: {"instruction": "... Answer1: ... Answer2: ...", "answer": "answer2"}. The instruction may
  also have Solution1, Option1 or "The options: A ) ...".
- COPA: {"p", "a1", "a2", "asks-for", "most-plausible-alternative"}.
- RTE: {"sentence1", "sentence2", "label"}. The label 0 means entailment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvtool.llama.loaded.model import Model
from kvtool.tasks import data
from kvtool.tasks.data import Record
from kvtool.tasks.reader import Reader, max_tokens_of
from kvtool.tasks.task import Item, ScoredAnswer, Task

_INSTRUCTION = re.compile(
    r"Please choose the correct [^:]*?: (?P<question>.*?)\s+(?=(?:Answer|Solution|Option)1: )"
    r"(?P<choices>.*?)\s*(?:Answer|Solution|Option) format: .*",
    re.S,
)
_NUMBERED = re.compile(r"\s*(?:Answer|Solution|Option)\d: ")
_LETTERED = re.compile(r"(?:^|\s*,\s*|\s+)[A-E] \) ")


@dataclass(frozen=True, slots=True)
class ChoiceTask(Task):
    """Parameters of the task.

    Attributes
    ----------
    shots
        Number of solved examples before each question, 0 to 5. They are sampled again for each question.
    train
        File from which the examples are taken. If empty, they are taken from the file of the question.
    seed
        Seed of random choices.
    """

    shots: int = 0
    train: str = ""
    seed: int = 0

    source: ClassVar[str] = "lm-evaluation-harness"
    by: ClassVar[tuple[str, ...]] = ("file",)
    uses_sampling: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= 5:
            raise ValueError(f"shots must be in 0..5, got {self.shots}")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        train = _questions(Path(self.train)) if self.train else None
        items = []
        for path in files:
            questions = _questions(path)
            for number, question in enumerate(questions, 1):
                name = f"{data.stem(path)}-{number}"
                others = [other for other in train or questions if other != question]
                shots = data.few_shot(self.shots, others, f"{self.seed} {name}", "records")
                prompt = "\n\n".join([*map(_solved, shots), question.prompt])
                about = {"file": path.name, **question.about}
                items.append(replace(question, id=name, prompt=prompt, about=about))
        return items

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        ending = item.about.get("ending", "")
        reader.read(item.prompt, max(max_tokens_of(choice + ending) for choice in item.choices))
        logp = np.empty(len(item.choices))
        with reader.going_back() as back:
            for i, choice in enumerate(item.choices):
                back()
                logp[i] = reader.log_likelihood(reader.following(choice)).logp
                if ending:
                    logp[i] = reader.log_likelihood(ending).logp
        right = item.choices.index(item.references[0])
        n_byte = [len((ending.strip() or choice).encode()) for choice in item.choices]
        chosen, chosen_by_byte = int(logp.argmax()), int((logp / n_byte).argmax())
        scores = {"acc": float(chosen == right), "acc_norm": float(chosen_by_byte == right)}
        return ScoredAnswer(
            item.choices[chosen], scores, {"choices": list(item.choices), "logp": logp.tolist()}
        )


def _solved(question: Item) -> str:
    """Format a question with its right answer as an example."""
    return f"{question.prompt} {question.references[0]}{question.about.get('ending', '')}"


def _questions(path: Path) -> list[Item]:
    return [question for _, _, question in data.parse_each([path], "choice", _question)]


def _item(prompt: str, choices: Sequence[str], right: int, ending: str = "") -> Item:
    """Build a question. prompt, ending: text before and after the choice. right: index of the answer."""
    if not (0 <= right < len(choices) and all(choice.strip() for choice in choices)):
        raise data.Misfit(f"answer {right + 1} of {len(choices)} choices")
    return Item("", prompt, [choices[right]], choices, {"ending": ending} if ending else {})


def _question(record: Record) -> Item:
    if "sentence1" in record:
        prompt = f"{record['sentence1']}\nQuestion: {record['sentence2']} True or False?\nAnswer:"
        return _item(prompt, ["True", "False"], record["label"])
    if "asks-for" in record:
        word = {"cause": "because", "effect": "therefore"}[record["asks-for"]]
        choices = [text[0].lower() + text[1:] for text in (record["a1"], record["a2"])]
        prompt = f"{record['p'].strip().removesuffix('.')} {word}"
        return _item(prompt, choices, int(record["most-plausible-alternative"]) - 1)
    text, _, lettered = record["instruction"].partition("The options:")
    if lettered:
        lettered = lettered.strip()
        if lettered.startswith("["):
            # some records of MathQA have a Python list here
            lettered = " , ".join(ast.literal_eval(lettered))
        choices = _LETTERED.split(lettered)[1:]
        return _item(_as_question(text), choices, "ABCDE".index(record["answer"]))
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        raise data.Misfit("no numbered answers in the instruction")
    choices = _NUMBERED.split(match["choices"])[1:]
    right, question = int(record["answer"][-1]) - 1, match["question"]
    if match["choices"].startswith("Option"):
        before, blank, ending = question.partition("_")
        if not blank:
            raise data.Misfit("no blank in the sentence")
        return _item(before.strip(), choices, right, ending.rstrip())
    # OpenBookQA's questions are beginnings of sentences, so the harness does not mark them as questions
    prompt = question.strip() if match["choices"].startswith("Answer") else _as_question(question)
    return _item(prompt, choices, right)


def _as_question(text: str) -> str:
    return f"Question: {text.strip()}\nAnswer:"


TASK = ChoiceTask
