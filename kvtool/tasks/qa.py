"""qa: a question about documents; scored by F1, exact match and the right answer's likelihood.

Prompts have the form of Lost in the Middle (Liu et al. 2023, arXiv:2307.03172): an instruction, numbered
documents, the question, and "Answer:". As in Lost in the Middle, only the first line of an answer is scored.

f1, em: SQuAD's F1 and exact match (Rajpurkar et al. 2016, evaluation script 1.1). If there are several right
answers, the highest score is used.

subspan_em: Lost in the Middle's accuracy: 1 if the output contains a right answer, after both texts were
normalized.

logp: log-probability per token of the most likely right answer, in nats.

Layouts:

- Lost in the Middle: {"question", "answers", "ctxs": [{"title", "text"}]}.
- HotpotQA: {"question", "answer", "paragraphs": [{"title", "text"}]}. The published file has
  "context": [[title, [sentence, ...]], ...] instead of paragraphs.
- LongBench: {"input", "context", "answers"}.
- LoCoMo: {"conversation": {"session_1_date_time", "session_1": [{"speaker", "text"}], ...},
  "qa": [{"question", "answer", "category"}]}. Questions without an answer (category 5) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvtool.tasks import data, metrics
from kvtool.tasks.data import Record
from kvtool.tasks.reader import Reader, max_tokens_of
from kvtool.tasks.task import Item, RecordTask, ScoredAnswer

_DOCUMENTS = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant).\n\n{context}\n\nQuestion: {question}\nAnswer:"
)
_TEXT = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\n{context}\n\nQuestion: {question}\nAnswer:"
)
_DIALOGUE = (
    "Below is a conversation of two people over several days. Answer the question about it with a short "
    "phrase.\n\n{context}\n\nQuestion: {question}\nAnswer:"
)

_METRICS = {"f1": metrics.f1, "em": metrics.exact_match, "subspan_em": metrics.subspan}


@dataclass(frozen=True, slots=True)
class QA(RecordTask):
    """Parameters of the task.

    Attributes
    ----------
    n_max
        Maximum tokens of an answer.
    likelihood
        True to score the likelihood of right answers.
    """

    n_max: int = 48
    likelihood: bool = True

    source: ClassVar[str] = "arXiv:2307.03172"
    chat: ClassVar[bool] = True
    by: ClassVar[tuple[str, ...]] = ("file",)

    def __post_init__(self) -> None:
        if self.n_max < 1:
            raise ValueError(f"n_max must be at least 1, got {self.n_max}")

    def items_of(self, record: Record) -> Sequence[Item]:
        if "conversation" not in record:
            return [_of_documents(record)]
        items = list(_of_dialogue(record))
        return [replace(item, id=f"-{i}") for i, item in enumerate(items, 1)] if len(items) > 1 else items

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        n_right = max(map(max_tokens_of, item.references)) if self.likelihood else 0
        reader.read(item.prompt, max(self.n_max, n_right))
        logp = {}
        # let the model write first, because the right answers are not yet in the cache
        with reader.going_back() as back:
            output = reader.write(self.n_max, stop=["\n"]).strip()
            for reference in item.references if self.likelihood else ():
                back()
                scored = reader.log_likelihood(reader.following(reference))
                logp[reference] = scored.logp / scored.n
        scores = {name: metrics.best(metric, output, item.references) for name, metric in _METRICS.items()}
        if logp:
            scores["logp"] = max(logp.values())
        return ScoredAnswer(output, scores, {"logp": logp} if logp else {})


def _of_documents(record: Record) -> Item:
    if (texts := record.get("ctxs", record.get("paragraphs"))) is not None:
        documents = [(text["title"], text["text"]) for text in texts]
    elif isinstance(record["context"], str):
        prompt = _TEXT.format(context=record["context"].strip(), question=data.text(record["input"]))
        return Item("", prompt, _answers(record["answers"]))
    else:
        documents = [(title, "".join(sentences)) for title, sentences in record["context"]]
    context = "\n".join(
        f"Document [{number}](Title: {title}) {text.strip()}"
        for number, (title, text) in enumerate(documents, 1)
    )
    prompt = _DOCUMENTS.format(context=context, question=data.text(record["question"]))
    return Item("", prompt, _answers(record["answers"] if "answers" in record else record["answer"]))


def _of_dialogue(record: Record) -> Iterator[Item]:
    dialogue = record["conversation"]
    sessions = []
    # sessions are named session_1, session_2, ...
    for number in range(1, 1 + sum(name.startswith("session_") for name in dialogue)):
        if turns := dialogue.get(f"session_{number}"):
            lines = [f"{turn['speaker']}: {turn['text']}" for turn in turns]
            date = dialogue.get(f"session_{number}_date_time", "?")
            sessions.append("\n".join([f"Date: {date}", *lines]))
    if not sessions:
        raise data.Misfit("no session_1")
    for question in record["qa"]:
        if "answer" in question:
            prompt = _DIALOGUE.format(context="\n\n".join(sessions), question=data.text(question["question"]))
            # in the file, an answer may be a number instead of a string, such as a year
            answers = _answers(str(question["answer"]))
            yield Item("", prompt, answers, about={"category": question.get("category")})


def _answers(value: object) -> list[str]:
    answers = [answer for answer in data.texts(value) if answer.strip()]
    if not answers:
        raise data.Misfit("no answer")
    return answers


TASK = QA
