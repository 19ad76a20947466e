"""stream: turns of many chats through one cache; the likelihood of right answers, and whether it stays.

As StreamingLLM streams MT-Bench (Xiao et al. 2023, arXiv:2309.17453, section 4.3): every user turn is read in
the chat template after all before it. A turn's right answer is scored, token by token, and stays in the cache
as the reply; where there is none, the model's own greedy answer does, which is not scored.

nll: a right answer's negative log-likelihood per token, in nats. Besides the mean: those of the quarters of
the scored turns, and the slope over 1,000 tokens of the stream with its standard error (least squares, turns
weighted alike). One engine serves all turns, so a share as budget is one of the trained context, and an
evaluation that was broken off starts over: a turn says nothing without those before it.

Layouts, in any order: MT-Bench's questions ({"question_id", "turns": [...]}) and answers
({"question_id", "choices": [{"turns": [...]}]}); chats ({"conversations": [{"from": "human", "value"},
{"from": "gpt", "value"}]} or {"messages": [{"role": "user", "content"}, {"role": "assistant", "content"}]}).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtool.errors import InputError
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.tasks import data
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task

Turns = list[tuple[str, str | None]]
"""What a user says, and the right answer if there is one."""


@dataclass(frozen=True, slots=True)
class Stream(Task):
    """n_max: the most tokens of an answer of the model's own. scored: only chats with right answers."""

    n_max: int = 128
    scored: bool = False

    source: ClassVar[str] = "arXiv:2309.17453"
    chat: ClassVar[bool] = True
    one_stream: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.n_max < 1:
            raise ValueError(f"n_max must be at least 1, got {self.n_max}")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        parsed = list(data.each(files, "stream", _parsed))
        answers = {name: turns for _, _, (name, turns, is_answer) in parsed if is_answer}
        found: list[Item] = []
        for path, number, (name, turns, is_answer) in parsed:
            if is_answer:
                continue
            right = answers.get(name, []) if name is not None else []
            for i, (said, answer) in enumerate(turns):
                answer = right[i] if i < len(right) else answer
                if self.scored and answer is None:
                    continue
                about = {"chat_id": number if name is None else name, "turn": i + 1, "number": len(found)}
                chat = f"{data.stem(path)}-{about['chat_id']}-{i + 1}"
                found.append(Item(chat, said, [] if answer is None else [answer], about=about))
        if not found:
            raise InputError(f"no turns in {', '.join(map(str, files))}")
        return found

    def answer(self, item: Item, reader: Reader) -> Answer:
        if item.about["number"] == 0:
            reader.start()
        past = reader.engine.n_past
        reader.read_turn(item.prompt)
        if not item.references:
            return Answer(reader.write(self.n_max), {}, {"past": past})
        scored = reader.log_likelihood(reader.following(item.references[0]))
        about = {"past": past, "answer_tokens": scored.n}
        return Answer(None, {"nll": -scored.logp / scored.n}, about)

    def summary(self, found: Sequence[records.Record]) -> dict[str, float]:
        scored = [record for record in found if "nll" in record["scores"]]
        nll = np.array([record["scores"]["nll"] for record in scored])
        past = np.array([record["past"] for record in scored]) / 1000
        said: dict[str, float] = {}
        if len(nll) >= 4:
            for number, part in enumerate(np.array_split(nll, 4), 1):
                said[f"nll, quarter {number}"] = float(part.mean())
        if len(nll) >= 3 and np.ptp(past) > 0:
            slope, error = _slope(past, nll)
            said |= {"nll, slope per 1,000 tokens": slope, "nll, slope's standard error": error}
        return said


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of the least squares' line through f64[n] points, and its standard error."""
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    residuals = y - slope * x
    return float(slope), float(np.sqrt((residuals @ residuals) / (len(x) - 2) / (x @ x)))


def _parsed(record: data.Record) -> tuple[Any, Any, bool]:
    """A chat's id, its turns, or the answers to those of the chat of that id, and which of both."""
    if "choices" in record:
        return record["question_id"], data.texts(record["choices"][0]["turns"]), True
    if "turns" in record:
        turns: Turns = [(said, None) for said in data.texts(record["turns"])]
        return record["question_id"], turns, False
    if "conversations" in record:
        said = [(turn["from"], data.text(turn["value"])) for turn in record["conversations"]]
    else:
        said = [(turn["role"], data.text(turn["content"])) for turn in record["messages"]]
    turns = []
    for (who, text), (follower, reply) in zip(said, [*said[1:], ("", "")], strict=True):
        if who in ("human", "user"):
            turns.append((text, reply if follower in ("gpt", "assistant") else None))
    return record.get("id"), turns, False


TASK = Stream
