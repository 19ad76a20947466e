"""Sources of RULER's samples: a tokenizer, word lists, essays, and questions about documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import InputError
from kvtool.tasks import data
from kvtool.tasks.haystack import texts_of

if TYPE_CHECKING:
    from kvtool.llama.model import Model


@dataclass(frozen=True, slots=True)
class Question:
    """A question about documents.

    Attributes
    ----------
    text
        The question.
    answers
        Right answers.
    own
        Indices of the documents that it is about.
    near
        Other documents of the same article.
    """

    text: str
    answers: Sequence[str]
    own: Sequence[int]
    near: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions, and the documents that they are about.

    Attributes
    ----------
    texts
        Documents, sorted, each once.
    questions
        Questions, in random order.
    """

    texts: Sequence[str]
    questions: Sequence[Question]


class Sources:
    """Sources, each read at its first use. File names may be empty if no part needs them.

    Raises InputError for a file that cannot be read.
    """

    def __init__(self, model: Model, essays: str, squad: str, hotpotqa: str, seed: int) -> None:
        self._model, self._essays = model, essays
        self._squad, self._hotpotqa = squad, hotpotqa
        self._seed = seed

    def n_token(self, text: str) -> int:
        """Number of tokens of a prompt, including tokens that the tokenizer adds."""
        return len(self._model.tokenize(text, start=True))

    @cached_property
    def essays(self) -> list[str]:
        """Words of the essays, in the order of the files' names."""
        words = " ".join(texts_of([Path(self._essays)])).split()
        if not words:
            raise InputError(f"no text in {self._essays}")
        return words

    @cached_property
    def nouns(self) -> list[str]:
        return _words("noun")

    @cached_property
    def adjectives(self) -> list[str]:
        return _words("adjective")

    @cached_property
    def all_words(self) -> list[str]:
        """Nouns, adjectives and verbs, sorted, each once."""
        return sorted({*self.nouns, *self.adjectives, *_words("verb")})

    @cached_property
    def squad(self) -> Documents:
        """SQuAD's paragraphs, and the questions that have an answer (dev-v2.0.json)."""
        path = Path(self._squad)
        found = [documents for _, _, documents in data.each([path], "ruler's qa_1", _squad)]
        return self._drawn(path, [each for part in found for each in part])

    @cached_property
    def hotpotqa(self) -> Documents:
        """HotpotQA's paragraphs, each after its title (hotpot_dev_distractor_v1.json)."""
        path = Path(self._hotpotqa)
        return self._drawn(path, [each for _, _, each in data.each([path], "ruler's qa_2", _hotpotqa)])

    def _drawn(self, path: Path, asked: Sequence[_FileQuestion]) -> Documents:
        if not asked:
            raise InputError(f"{path} has no questions with an answer")
        texts = sorted({text for each in asked for text in (*each.own, *each.near)})
        at = {text: i for i, text in enumerate(texts)}
        questions = [
            Question(each.text, each.answers, _places(each.own, at), _places(each.near, at, each.own))
            for each in asked
        ]
        random.Random(f"{self._seed} {path.name}").shuffle(questions)
        return Documents(texts, questions)


@dataclass(frozen=True, slots=True)
class _FileQuestion:
    """Question from its file: `own` and `near` are texts."""

    text: str
    answers: Sequence[str]
    own: Sequence[str]
    near: Sequence[str] = ()


def _places(texts: Sequence[str], at: dict[str, int], but: Sequence[str] = ()) -> list[int]:
    """Return the indices of the texts, each once."""
    return [at[text] for text in dict.fromkeys(texts) if text not in but]


def _squad(record: data.Record) -> list[_FileQuestion]:
    found = []
    for article in record["data"]:
        near = [data.text(paragraph["context"]) for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                if asked.get("is_impossible"):
                    continue
                answers = data.texts([answer["text"] for answer in asked["answers"]])
                own = [paragraph["context"]]
                found.append(_FileQuestion(data.text(asked["question"]), _some(answers), own, near))
    return found


def _hotpotqa(record: data.Record) -> _FileQuestion:
    if "paragraphs" in record:
        own = [f"{data.text(each['title'])}\n{data.text(each['text'])}" for each in record["paragraphs"]]
    else:
        own = [f"{data.text(title)}\n{''.join(sentences)}" for title, sentences in record["context"]]
    return _FileQuestion(data.text(record["question"]), _some([data.text(record["answer"])]), own)


def _some(answers: list[str]) -> list[str]:
    if not any(answer.strip() for answer in answers):
        raise ValueError("no answer")
    return answers


def _words(kind: str) -> list[str]:
    """Return wonderwords' list of a kind of words, as RULER uses it."""
    text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]
