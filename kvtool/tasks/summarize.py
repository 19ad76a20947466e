"""summarize: summaries of articles or meetings; scored by ROUGE-1, ROUGE-2 and ROUGE-L.

The scores are f-measures (0 to 1) of the rouge-score package, with its stemmer. Texts are not split into
sentences for ROUGE-L. With `likelihood`, there is another score, logp: the log-probability per token of
the right summary, in nats. With a small model, logp needs fewer items than ROUGE to show differences between
policies.

Layouts:

- HELM's requests for XSUM and CNN/DailyMail, which H2O, BumbleBee and BUZZ also use:
  {"article": "###\\nArticle: ...", "summary_gt"}.
- The original XSUM and CNN/DailyMail: {"document", "summary"} and {"article", "highlights"}.
- QMSum: {"meeting_transcripts": [{"speaker", "content"}], "specific_query_list": [{"query", "answer",
  "relevant_text_span": [["0", "5"]]}], "general_query_list": [{"query", "answer"}]}.

Prompts for articles are like HELM's: `shots` solved examples, then "###", the article and an instruction. If
the file has no instruction, one is added. By default, the prompt is plain text, even with a chat model. The
summary ends at "###". Queries about meetings are a user's turn with LongBench's prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtool.llama.loaded.model import Model
from kvtool.tasks import data, metrics
from kvtool.tasks.data import Record
from kvtool.tasks.longbench import PARTS
from kvtool.tasks.reader import Reader, max_tokens_of
from kvtool.tasks.task import Item, ScoredAnswer, Task

_HEAD = "###\nArticle: "
_ASKED = re.compile(r"\n\s*(Summarize the above article in [^\n]*)\s*$")


@dataclass(frozen=True, slots=True)
class Summarize(Task):
    """Parameters of the task.

    Attributes
    ----------
    n_max
        Maximum tokens of a summary.
    shots
        Number of solved examples before each article: other articles of the file, with their summaries.
    sentences
        Number of sentences that the added instruction asks for.
    spans
        True if a prompt has only the parts of a meeting that are marked as relevant to the query. Queries
        about the whole meeting are then left out.
    plain
        True if articles are plain text, False if they are a user's turn.
    seed
        Seed of the shots.
    likelihood
        True to score the likelihood of the right summary.
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

    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        as_it_is = self.plain and item.prompt.startswith(_HEAD)
        (right,) = item.references
        n_right = max_tokens_of(right) if self.likelihood else 0
        reader.read(item.prompt, max(self.n_max, n_right), as_it_is=as_it_is)
        with reader.going_back() as back:
            # let the model write first, because the right summary is not yet in the cache
            output = reader.write(self.n_max, stop=["###"]).strip()
            scores = metrics.rouge(output, right)
            if self.likelihood:
                back()
                scored = reader.log_likelihood(right if as_it_is else reader.following(right))
                scores["logp"] = scored.logp / scored.n
        return ScoredAnswer(output, scores)

    def _of_file(self, path: Path) -> Iterator[Item]:
        parsed = list(data.parse_each([path], "summarize", self._parsed))
        articles = [pair for _, _, pairs in parsed for pair in pairs if pair[0].startswith(_HEAD)]
        for _, number, pairs in parsed:
            for i, pair in enumerate(pairs, 1):
                (prompt, answer), name = pair, f"{data.stem(path)}-{number}"
                if prompt.startswith(_HEAD):
                    others = [article for article in articles if article is not pair]
                    shots = data.few_shot(self.shots, others, f"{self.seed} {name}", "articles")
                    prompt = "".join(f"{shot}{summary}\n\n" for shot, summary in shots) + prompt
                else:
                    name += f"-{i}"
                yield Item(name, prompt, [answer], about={"file": path.name})

    def _parsed(self, record: Record) -> list[tuple[str, str]]:
        """Return (prompt, right answer) for each prompt of a record.

        An article has one prompt. Solved examples are added later.
        """
        if "meeting_transcripts" in record:
            return list(self._queries(record))
        text = data.text(record["document"] if "document" in record else record["article"])
        name = next((name for name in ("summary_gt", "summary") if name in record), "highlights")
        text = text.removeprefix(_HEAD)
        plural = "s" if self.sentences > 1 else ""
        instruction = f"Summarize the above article in {self.sentences} sentence{plural}."
        if match := _ASKED.search(text):
            text, instruction = text[: match.start()], match[1]
        return [(f"{_HEAD}{text.strip()}\n\n{instruction}\n", data.text(record[name]).strip())]

    def _queries(self, record: Record) -> Iterator[tuple[str, str]]:
        lines = [f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"]]
        for query in [*([] if self.spans else record["general_query_list"]), *record["specific_query_list"]]:
            spans = query["relevant_text_span"] if self.spans else [(0, len(lines))]
            chosen = [line for first, last in spans for line in lines[int(first) : int(last) + 1]]
            prompt = PARTS["qmsum"].prompt.format(context="\n".join(chosen), input=data.text(query["query"]))
            yield prompt, data.text(query["answer"])


TASK = Summarize
