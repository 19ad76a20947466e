"""Questions: the documents that answer a question are hidden among other documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.tasks._ruler.sources import Documents, Question, Sources
from kvtool.tasks._ruler.subtask import Sample, SampleSpec, Subtask

_ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)
_CONTEXT = f"{_ASK}\n\nThe following are given documents.\n\n{{text}}\n\n"
_QUESTION = f"{_ASK}\n\nQuestion: {{question}}"


@dataclass(frozen=True, slots=True)
class Questions(Subtask):
    """Parameters of a task with questions. A piece is a document.

    The question's own documents are chosen first, then other documents of the same article, then any other
    documents. The text has them in random order. file: "squad" or "hotpotqa".
    """

    file: str

    n_max: ClassVar[int] = 32
    is_any: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.file,)

    def most(self, sources: Sources) -> int:
        return len(self._documents(sources).texts)

    def least(self, spec: SampleSpec, sources: Sources) -> int:
        return len(self._question(spec, sources).about)

    def sample(self, n: int, spec: SampleSpec, sources: Sources) -> Sample:
        rng = spec.rng()
        question, texts = self._question(spec, sources), self._documents(sources).texts
        chosen = [*question.about, *rng.sample(question.near, len(question.near))][:n]
        others = set(chosen)
        # choose documents one by one, so that a larger sample has all documents of a smaller sample
        while len(chosen) < n:
            if (other := texts[rng.randrange(len(texts))]) not in others:
                chosen.append(other)
                others.add(other)
        rng.shuffle(chosen)
        shown = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
        question_text = _QUESTION.format(question=question.text)
        return Sample(_CONTEXT.format(text=shown), question_text, "Answer:", question.answers)

    def _documents(self, sources: Sources) -> Documents:
        documents: Documents = getattr(sources, self.file)
        return documents

    def _question(self, spec: SampleSpec, sources: Sources) -> Question:
        questions = self._documents(sources).questions
        if spec.number >= len(questions):
            raise InputError(f"the file for {spec.name} has {len(questions)} questions; choose fewer repeats")
        return questions[spec.number]
