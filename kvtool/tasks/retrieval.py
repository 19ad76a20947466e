"""retrieval: the question names one key of a JSON object; the answer must contain its value.

Prompts and scoring come from Lost in the Middle (Liu et al. 2023, arXiv:2307.03172, section 3). The task is
also part of RULER (arXiv:2404.06654). Keys and values are random, and all pairs look the same. Before the
question is read, nothing shows which tokens will be needed.

found: 1 if the output contains the value, otherwise 0.
logp: log-probability per token of the value, in nats.

Layout: {"ordered_kv_records": [[key, value], ...], "key", "value"}. One thing differs from Lost in the
Middle: a prompt may contain fewer pairs than the record has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.tasks import data
from kvtool.tasks.data import Record
from kvtool.tasks.reader import Reader, max_tokens_of
from kvtool.tasks.task import Item, RecordTask, ScoredAnswer

_PROMPT = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    'JSON data:\n{{{pairs}}}\n\nKey: "{key}"\nCorresponding value:'
)


@dataclass(frozen=True, slots=True)
class Retrieval(RecordTask):
    """Parameters of the task.

    Attributes
    ----------
    pairs
        Number of pairs in a prompt; 0 for all pairs of the record. A smaller prompt has the requested pair
        and the first of the other pairs. The requested pair keeps its relative place among the pairs.
    n_max
        Maximum tokens of an answer.
    """

    pairs: int = 0
    n_max: int = 64

    source: ClassVar[str] = "arXiv:2307.03172"

    def __post_init__(self) -> None:
        if self.pairs < 0:
            raise ValueError(f"pairs must be at least 0, got {self.pairs}")
        if self.n_max < 1:
            raise ValueError(f"n_max must be at least 1, got {self.n_max}")

    def items_of(self, record: Record) -> Sequence[Item]:
        pairs = [(data.text(key), data.text(value)) for key, value in record["ordered_kv_records"]]
        wanted = data.text(record["key"]), data.text(record["value"])
        place = pairs.index(wanted)
        n = self.pairs or len(pairs)
        if n > len(pairs):
            raise InputError(f"pairs must be at most {len(pairs)}, the number in a record, got {n}")
        others = pairs[:place] + pairs[place + 1 :]
        # scale the index from 0 .. len(pairs) - 1 to 0 .. n - 1
        at = round(place * (n - 1) / max(len(pairs) - 1, 1))
        shown = [*others[:at], wanted, *others[at : n - 1]]
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in shown)
        return [Item("", _PROMPT.format(pairs=lines, key=wanted[0]), [wanted[1]])]

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        (value,) = item.references
        quoted = f'"{value}"'
        # do not cut the prompt: the pair may be in its middle
        reader.read(item.prompt, max(self.n_max, max_tokens_of(quoted)), uncut=True)
        with reader.going_back() as back:
            output = reader.write(self.n_max)
            back()
            scored = reader.log_likelihood(reader.following(quoted))
        return ScoredAnswer(output, {"found": float(value in output), "logp": scored.logp / scored.n})


TASK = Retrieval
