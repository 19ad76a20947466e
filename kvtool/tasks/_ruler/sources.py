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
    from kvtool.llama.loaded.model import Model


@dataclass(frozen=True, slots=True)
class Question:
    """A question about documents.

    about: texts of the question's own documents. Some of them have the answer.
    near: texts of other documents of the same article.
    """

    text: str
    answers: Sequence[str]
    about: Sequence[str]
    near: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions in random order, and the texts of their documents, sorted and without duplicates."""

    texts: Sequence[str]
    questions: Sequence[Question]


class Sources:
    """Sources of texts. A file is read when it is first used.

    The name of a file may be empty if no subtask needs the file.
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
        """Nouns, adjectives and verbs, sorted and without duplicates."""
        return sorted({*self.nouns, *self.adjectives, *_words("verb")})

    @cached_property
    def squad(self) -> Documents:
        """SQuAD's paragraphs, and the questions that have an answer (dev-v2.0.json)."""
        path = Path(self._squad)
        articles = [documents for _, _, documents in data.parse_each([path], "ruler's qa_1", _squad)]
        return self._documents(path, [question for article in articles for question in article])

    @cached_property
    def hotpotqa(self) -> Documents:
        """HotpotQA's questions, and its paragraphs with titles (hotpot_dev_distractor_v1.json)."""
        path = Path(self._hotpotqa)
        return self._documents(path, [q for _, _, q in data.parse_each([path], "ruler's qa_2", _hotpotqa)])

    def _documents(self, path: Path, questions: list[Question]) -> Documents:
        if not questions:
            raise InputError(f"{path} has no questions with an answer")
        texts = sorted({text for question in questions for text in (*question.about, *question.near)})
        random.Random(f"{self._seed} {path.name}").shuffle(questions)
        return Documents(texts, questions)


def _squad(record: data.Record) -> list[Question]:
    questions = []
    for article in record["data"]:
        # an article may have a paragraph twice
        contexts = dict.fromkeys(data.text(paragraph["context"]) for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = [context for context in contexts if context != own]
            for entry in paragraph["qas"]:
                if entry.get("is_impossible"):
                    continue
                answers = data.texts([answer["text"] for answer in entry["answers"]])
                questions.append(Question(data.text(entry["question"]), _some(answers), [own], near))
    return questions


def _hotpotqa(record: data.Record) -> Question:
    if "paragraphs" in record:
        pairs = [(data.text(part["title"]), data.text(part["text"])) for part in record["paragraphs"]]
        about = [f"{title}\n{text}" for title, text in pairs]
    else:
        about = [f"{data.text(title)}\n{''.join(sentences)}" for title, sentences in record["context"]]
    answers = _some([data.text(record["answer"])])
    return Question(data.text(record["question"]), answers, list(dict.fromkeys(about)))


def _some(answers: list[str]) -> list[str]:
    if not any(answer.strip() for answer in answers):
        raise data.Misfit("no answer")
    return answers


def _words(kind: str) -> list[str]:
    """Return wonderwords' list of this kind of words. RULER uses the same lists."""
    text = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]
