"""summarize: an article or a meeting; scored by ROUGE-1, ROUGE-2 and ROUGE-L.

f-measures (0 to 1) by the rouge-score package with its stemmer, ROUGE-L without splitting into sentences.
logp, if asked for: the right summary's log-probability per token in nats, which tells policies apart with
fewer items than what a small model writes.

Layouts: HELM's requests, XSUM and CNN/DailyMail ({"article": "###\\nArticle: ...", "summary_gt"}), which H2O,
BumbleBee and BUZZ read as well; the data sets' own ({"document", "summary"}, {"article", "highlights"});
QMSum ({"meeting_transcripts": [{"speaker", "content"}], "specific_query_list": [{"query", "answer",
"relevant_text_span": [["0", "5"]]}], "general_query_list": [{"query", "answer"}]}).

Articles are asked for as HELM does, as plain text even of a chat model: "###", the article, an instruction,
the summary, `shots` others before it; where the file has no instruction one is added. The summary ends at
"###". Queries about meetings are a user's turn, in LongBench's words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtool.errors import InputError
from kvtool.llama.model import Model
from kvtool.tasks import data, metrics
from kvtool.tasks.data import Record
from kvtool.tasks.longbench import PARTS
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Answer, Item, Task

_HEAD = "###\nArticle: "
_ASKED = re.compile(r"\n\s*(Summarize the above article in [^\n]*)\s*$")


@dataclass(frozen=True, slots=True)
class Summarize(Task):
    """n_max: the most tokens of a summary. shots: of the file's other articles, with their summaries, before
    each. sentences: how many an article without an instruction is to be summarized in. spans: of a meeting
    only what its annotators found relevant, without the queries about all of it; else the whole meeting.
    plain: articles are asked as plain text, else as a user's turn like meetings. seed: of the shots.
    likelihood: whether the right summary is scored as well.
    """

    n_max: int = 64
    shots: int = 0
    sentences: int = 3
    spans: bool = True
    plain: bool = True
    seed: int = 0
    likelihood: bool = False

    source: ClassVar[str] = "HELM (arXiv:2211.09110), QMSum (arXiv:2104.05938)"
    chat: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("rouge_score",)
    by: ClassVar[tuple[str, ...]] = ("file",)

    def __post_init__(self) -> None:
        if self.n_max < 1 or self.shots < 0 or self.sentences < 1:
            raise ValueError("n_max and sentences must be at least 1, shots at least 0")

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        return [item for path in files for item in self._of_file(path)]

    def answer(self, item: Item, reader: Reader) -> Answer:
        as_it_is = self.plain and item.prompt.startswith(_HEAD)
        (right,) = item.references
        # no text has more tokens than bytes, and the space before it
        n_right = len(right.encode()) + 1 if self.likelihood else 0
        reader.read(item.prompt, max(self.n_max, n_right), as_it_is=as_it_is)
        with reader.going_back() as back:
            # the summary is written before the right one is in the cache
            output = reader.write(self.n_max, stop=["###"]).strip()
            scores = metrics.rouge(output, right)
            if self.likelihood:
                back()
                scored = reader.log_likelihood(right if as_it_is else reader.following(right))
                scores["logp"] = scored.logp / scored.n
        return Answer(output, scores)

    def _of_file(self, path: Path) -> Iterator[Item]:
        parsed = list(data.each([path], "summarize", self._parsed))
        articles = [article for _, _, article in parsed if isinstance(article, _Article)]
        for _, number, found in parsed:
            name = f"{data.stem(path)}-{number}"
            if isinstance(found, _Article):
                prompt = "".join(
                    shot.asked + shot.summary + "\n\n" for shot in self._shots(name, found, articles)
                )
                yield Item(name, prompt + found.asked, [found.summary], about={"file": path.name})
            else:
                for i, (prompt, answer) in enumerate(found, 1):
                    yield Item(f"{name}-{i}", prompt, [answer], about={"file": path.name})

    def _shots(self, name: str, asked: _Article, articles: Sequence[_Article]) -> Sequence[_Article]:
        others = [article for article in articles if article is not asked]
        if len(others) < self.shots:
            raise InputError(f"{self.shots} shots need as many other articles; there are {len(others)}")
        return random.Random(f"{self.seed} {name}").sample(others, self.shots)

    def _parsed(self, record: Record) -> _Article | list[tuple[str, str]]:
        if "meeting_transcripts" in record:
            return list(self._queries(record))
        text = data.text(record["document"] if "document" in record else record["article"])
        for name in ("summary_gt", "summary", "highlights"):
            if name in record:
                break
        text = text.removeprefix(_HEAD)
        plural = "s" if self.sentences > 1 else ""
        instruction = f"Summarize the above article in {self.sentences} sentence{plural}."
        if found := _ASKED.search(text):
            text, instruction = text[: found.start()], found[1]
        return _Article(f"{_HEAD}{text.strip()}\n\n{instruction}\n", data.text(record[name]).strip())

    def _queries(self, record: Record) -> Iterator[tuple[str, str]]:
        lines = [f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"]]
        for query in [] if self.spans else record["general_query_list"]:
            yield _about_meeting(lines, query)
        for query in record["specific_query_list"]:
            chosen = lines
            if self.spans:
                spans = [(int(first), int(last)) for first, last in query["relevant_text_span"]]
                chosen = [line for first, last in spans for line in lines[first : last + 1]]
            yield _about_meeting(chosen, query)


@dataclass(frozen=True, slots=True)
class _Article:
    """asked: the article and the instruction."""

    asked: str
    summary: str


def _about_meeting(lines: Sequence[str], query: Record) -> tuple[str, str]:
    prompt = PARTS["qmsum"].prompt.format(context="\n".join(lines), input=data.text(query["query"]))
    return prompt, data.text(query["answer"])


TASK = Summarize
