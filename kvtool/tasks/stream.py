"""stream: the turns of many chats go through one cache; right answers must stay likely.

This is StreamingLLM's experiment with MT-Bench (Xiao et al. 2023, arXiv:2309.17453, section 4.3). Each turn
of a user is read in the chat template, after all earlier turns. If the turn has a right answer, this answer
is scored token by token and stays in the cache as the reply. Otherwise the model writes an answer, which is
not scored.

nll: negative log-likelihood per token of a right answer, in nats. The summary has the mean nll of all scored
turns and of each quarter of them. It also has the slope of nll per 1,000 tokens of the stream, and the
slope's standard error. They come from least squares, with the same weight for all turns.

If the budget is a share, it is a share of the trained context, because one engine serves all turns. An
interrupted evaluation starts over, because a turn depends on all earlier turns.

Layouts, which may be mixed in any order:

- MT-Bench's questions: {"question_id", "turns": [...]}.
- MT-Bench's answers: {"question_id", "choices": [{"turns": [...]}]}.
- Chats: {"conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}]} or
  {"messages": [{"role": "user", "content"}, {"role": "assistant", "content"}]}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtool.errors import InputError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.tasks import data
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, ScoredAnswer, Task


@dataclass(frozen=True, slots=True)
class StreamTask(Task):
    """Parameters of the task.

    Attributes
    ----------
    n_max
        Maximum tokens of the model's answers.
    scored
        True to leave out turns without a right answer.
    """

    n_max: int = 128
    scored: bool = False

    source: ClassVar[str] = "arXiv:2309.17453"
    chat: ClassVar[bool] = True
    one_stream: ClassVar[bool] = True

    @property
    def uses_sampling(self) -> bool:
        return not self.scored

    def __post_init__(self) -> None:
        if self.n_max < 1:
            raise ValueError(f"n_max must be at least 1, got {self.n_max}")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        parsed = list(data.parse_each(files, "stream", _parsed))
        answers = {name: turns for _, _, (name, turns, is_answer) in parsed if is_answer}
        items: list[Item] = []
        for path, number, (name, turns, is_answer) in parsed:
            if is_answer:
                continue
            right = answers.get(name, []) if name is not None else []
            for i, (question, answer) in enumerate(turns):
                answer = right[i] if i < len(right) else answer
                if self.scored and answer is None:
                    continue
                about = {"chat_id": number if name is None else name, "turn": i + 1, "number": len(items)}
                chat = f"{data.stem(path)}-{about['chat_id']}-{i + 1}"
                items.append(Item(chat, question, [] if answer is None else [answer], about=about))
        names = ", ".join(map(str, files))
        if all(is_answer for _, _, (_, _, is_answer) in parsed):
            raise InputError(f"there are no turns in {names}")
        if not any(item.references for item in items):
            raise InputError(
                f"no turn in {names} has a right answer, so nothing would be scored; add the file of answers"
            )
        return items

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        if item.about["number"] == 0:
            reader.start()
        past = reader.engine.n_past
        reader.read_turn(item.prompt)
        if not item.references:
            return ScoredAnswer(reader.write(self.n_max), {}, {"past": past})
        scored = reader.log_likelihood(reader.following(item.references[0]))
        return ScoredAnswer(None, {"nll": -scored.logp / scored.n}, {"past": past, "answer_tokens": scored.n})

    def summary(self, finished: Sequence[records.Record]) -> dict[str, float]:
        scored = [record for record in finished if "nll" in record["scores"]]
        nll = np.array([record["scores"]["nll"] for record in scored])
        past = np.array([record["past"] for record in scored]) / 1000
        numbers: dict[str, float] = {}
        if len(nll) >= 4:
            parts = enumerate(np.array_split(nll, 4), 1)
            numbers = {f"nll, quarter {number}": float(part.mean()) for number, part in parts}
        if len(nll) >= 3 and np.ptp(past) > 0:
            slope, error = _slope(past, nll)
            numbers |= {"nll, slope per 1,000 tokens": slope, "nll, slope's standard error": error}
        return numbers


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope of the least-squares line through points f64[n], and its standard error."""
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    residuals = y - slope * x
    return float(slope), float(np.sqrt((residuals @ residuals) / (len(x) - 2) / (x @ x)))


def _parsed(record: data.Record) -> tuple[Any, Any, bool]:
    """Return a chat's id, its turns, and whether the record has only answers.

    A turn is a pair: the user's text, and the right answer or None. If the record has only answers, return
    the texts of the answers instead of turns.
    """
    if "choices" in record:
        return record["question_id"], data.texts(record["choices"][0]["turns"]), True
    if "turns" in record:
        return record["question_id"], [(text, None) for text in data.texts(record["turns"])], False
    if "conversations" in record:
        messages = [(turn["from"], data.text(turn["value"])) for turn in record["conversations"]]
    else:
        messages = [(turn["role"], data.text(turn["content"])) for turn in record["messages"]]
    turns = [
        (text, reply if follower in ("gpt", "assistant") else None)
        for (who, text), (follower, reply) in zip(messages, [*messages[1:], ("", "")], strict=True)
        if who in ("human", "user")
    ]
    return record.get("id"), turns, False


TASK = StreamTask
