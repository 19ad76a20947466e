"""summarize: summaries of articles or meetings; scored by ROUGE-1, ROUGE-2 and ROUGE-L.

Scores are f-measures (0 to 1) of the rouge-score package with its stemmer; ROUGE-L does not split sentences.
logp, if asked for: log-probability of the right summary per token, in nats. It tells policies apart with
fewer items than the texts of a small model do.

Layouts: HELM's requests, XSUM and CNN/DailyMail ({"article": "###\\nArticle: ...", "summary_gt"}), which H2O,
BumbleBee and BUZZ also use; the data sets' own ({"document", "summary"}, {"article", "highlights"});
QMSum ({"meeting_transcripts": [{"speaker", "content"}], "specific_query_list": [{"query", "answer",
"relevant_text_span": [["0", "5"]]}], "general_query_list": [{"query", "answer"}]}).

Articles are asked for as in HELM, as plain text even with a chat model: `shots` solved examples, then "###",
the article and an instruction; if the file has no instruction, one is added. The summary ends at "###".
Queries about meetings are a user's turn, in LongBench's words.
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
    """Parameters of the task.

    Attributes
    ----------
    n_max
        The most tokens of a summary.
    shots
        Other articles of the file, with their summaries, before each article.
    sentences
        Length of the summary that the added instruction asks for.
    spans
        Whether a meeting's prompt has only the parts that its annotators marked as relevant, and queries
        about the whole meeting are left out.
    plain
        Whether articles are asked as plain text, and not as a user's turn.
    seed
        Seed of the shots.
    likelihood
        Whether the likelihood of the right summary is scored.
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
        # a text has at most as many tokens as bytes; one more for the space before it
        n_right = len(right.encode()) + 1 if self.likelihood else 0
        reader.read(item.prompt, max(self.n_max, n_right), as_it_is=as_it_is)
        with reader.going_back() as back:
            # the model writes first, before the right summary is in the cache
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
            raise InputError(f"{self.shots} shots need {self.shots} other articles, there are {len(others)}")
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
    """An article with its summary.

    Attributes
    ----------
    asked
        The article and the instruction.
    summary
        The right summary.
    """

    asked: str
    summary: str


def _about_meeting(lines: Sequence[str], query: Record) -> tuple[str, str]:
    prompt = PARTS["qmsum"].prompt.format(context="\n".join(lines), input=data.text(query["query"]))
    return prompt, data.text(query["answer"])


TASK = Summarize
