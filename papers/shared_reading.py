"""RULER under many policies and budgets, each prompt read once: what `kvtool eval ruler` has for one of them.

    python -m papers.shared_reading -m MODEL --essays DIR --squad FILE --hotpotqa FILE --json FILE

A policy's budget is a share of the text plus room for question and answer, as in kvpress's benchmark: what is
evicted is evicted once, after the text (question=after) or after all of the prompt (question=known). The
records are those of `kvtool eval`; a second call goes on where the first one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import make_parser
from kvtool import policies, tasks
from kvtool.chats.prompt import template_of
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.measure.grid import split_policy
from kvtool.models.download import sha256
from kvtool.models.resolve import resolve
from kvtool.policy import Policy
from kvtool.tasks.reader import N_OUTPUT, Reader
from kvtool.tasks.results import Results
from kvtool.tasks.shared import Shared

_AFTER = 256
"""Cells beyond a share of the text: for question and answer, which are not evicted then."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes
    ----------
    policy
        Its name, with options as `kvtool compare` has them.
    removed
        The share of the text's cells that it evicts.
    cells
        In place of that, its budget in cells.
    type_kv
        The number format of keys and values.
    """

    policy: str
    removed: float = 0.0
    cells: int = 0
    type_kv: str = "f16"

    @property
    def is_shared(self) -> bool:
        """Whether it goes on from what another reader has read."""
        return not self.cells and self.type_kv == "f16"

    def fit(self, n: int, n_answer: int) -> Policy:
        """The policy for a prompt of n tokens."""
        name, options = split_policy(self.policy)
        if not policies.wanted(name).kind.evicts:
            return policies.wanted(name, None, options).fit(-(-(n + n_answer) // 256) * 256)
        if self.cells:
            return policies.wanted(name, None, options).fit(self.cells)
        kept = round(n * (1 - self.removed))
        return policies.wanted(name, _AFTER, options).fit(kept + _AFTER)


def rows(names: Sequence[str], removed: Sequence[float], others: Sequence[str]) -> Iterator[Row]:
    """The rows: policies with each share, and others as "recall@128" or "full@q4_0"."""
    yield Row("full")
    for name in names:
        for share in removed:
            yield Row(name, share)
    for other in others:
        name, _, how = other.rpartition("@")
        yield Row(name, cells=int(how)) if how.isdecimal() else Row(name, type_kv=how)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=1)
    for name in ("essays", "squad", "hotpotqa"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--tasks", default="", help="all thirteen by default")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--items", default="0:1", metavar="FROM:TO", help="which samples of each task")
    parser.add_argument("--question", default="after,known")
    parser.add_argument("--policies", default="streamingllm,knorm,keydiff,bumblebee,h2o,snapkv,expected,kvzip")
    parser.add_argument("--removed", default="0.5,0.75,0.875,0.97")
    parser.add_argument("--others", default="recall@128,full@q4_0", help="asked with question=after alone")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    first, end = map(int, args.items.split(":"))
    path = resolve(args.model)
    of_model = {"model": path.name, "model_sha256": sha256(path), **records.versions()}
    given = {name: getattr(args, name) for name in ("essays", "squad", "hotpotqa", "tasks")}
    wanted = list(rows(args.policies.split(","), list(map(float, args.removed.split(","))), args.others.split(",")))
    with closing(Model(path)) as model, ExitStack() as stack:
        template = template_of(model)
        settings = Settings(n_batch=512, n_output=N_OUTPUT, prefill="whole", n_threads=args.threads)
        shared = Shared(model, settings)
        waves = []
        for question in args.question.split(","):
            given_now = {**given, "lengths": args.length, "repeats": end, "question": question}
            task = tasks.make("ruler", [f"{name}={value}" for name, value in given_now.items() if value])
            items = task.items([], model)[first * (len(task.tasks) or 13) :]
            for row in wanted:
                # what keeps everything on the host does not know the question either; a rehearsal takes long
                if question == "known" and not (row.is_shared and row.fit(args.length, 1).rehearsal is None):
                    continue
                how = Settings(
                    n_batch=512, n_output=N_OUTPUT, n_threads=args.threads, type_k=row.type_kv, type_v=row.type_kv,
                    prefill="whole" if row.is_shared else None,
                )
                reader = stack.enter_context(closing(Reader(model, row.fit, how, template)))
                reader.shared = shared if row.is_shared else None
                about = {"task": "ruler", "question": question, **asdict(row), **of_model}
                results = Results(about, items, args.json)
                waves.append((results.measure(task, reader), reader, row, question))
        for number in range(len(items)):
            for wave, reader, row, question in waves:
                record = next(wave, None)
                reader.close()
                if record:
                    scored = record["scores"].get("string_match", record.get("error"))
                    print(number, record["id"], question, row.policy, row.removed, row.cells or "", row.type_kv,
                          scored, round(record.get("seconds", 0), 1), flush=True)


if __name__ == "__main__":
    main()
