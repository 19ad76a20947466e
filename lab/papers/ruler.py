"""Measure RULER under many policies and budgets.

    python -m lab.papers.ruler -m MODEL --essays DIR --squad FILE --hotpotqa FILE --json FILE

`kvtool eval ruler` does the same for one policy. A budget is a share of the prompt, plus room for question
and answer. As in kvpress's benchmark, tokens are evicted once, after the text (question after) or after the
whole prompt (question known). Records have the form of `kvtool eval`; lab/papers/ruler.md shows them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kvtool import policies, tasks
from kvtool.chats.prompt import template_of
from kvtool.engine.checks import check
from kvtool.engine.settings import Settings
from kvtool.engine.sizes import pad
from kvtool.errors import InputError, KvtoolError, UsageError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.measure.grid import split_policy
from kvtool.models.download import sha256
from kvtool.models.resolve import resolve
from kvtool.policy import Policy
from kvtool.system import interrupt
from kvtool.tasks.reader import N_OUTPUT, Reader
from kvtool.tasks.results import TaskResults
from kvtool.tasks.ruler import Ruler
from lab.benchmarks.common import make_parser

_ROOM = 256
"""Cells in addition to a share of the prompt, for the question and the answer."""

_BATCH = 512


def sharing(label: str, by: str = "heads") -> str:
    """Return the label of a policy with a shared budget.

    by: "heads" if the rows of a layer share a budget, "layers" if all layers share the budget.
    """
    return f"{label}:{by}=adaptive"


EQUAL = ("kvzip", "expected:epsilon=0.02", "snapkv", "keydiff", "tova", "h2o", "knorm", "streamingllm")

SHARING = {"heads": EQUAL[:3], "layers": EQUAL[1:3]}
"""Policies that also run with a shared budget.

"heads": the rows of a layer share a budget. "layers": all layers share a budget.
"""

SHARED = tuple(sharing(name, by) for by, names in SHARING.items() for name in names)

STREAMS = ("roco", "rkv", "bumblebee", "buzz", "weightedkv", "cam")
"""Policies that are made for streams, or for summaries."""

POLICIES = (*EQUAL, *SHARED, *STREAMS)
"""The default policies. `epsilon` has kvpress's value."""

REMOVED = ("0.25", "0.5", "0.75", "0.875", "0.97")

_QUESTIONS = ("after", "known")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy, and its share or budget.

    Attributes
    ----------
    policy
        Name and options, as in `kvtool compare`.
    removed
        Share of the prompt's cells that the policy evicts after the whole prompt has been read.
    budget
        Budget in cells, instead of `removed`. The prompt is then read in a stream.
    type_kv
        The number format of keys and values.
    """

    policy: str
    removed: float = 0.0
    budget: int = 0
    type_kv: str = "f16"

    @property
    def reads_whole(self) -> bool:
        """True if the row reads a prompt whole, and then evicts once."""
        return not self.budget and self.type_kv == "f16"

    def check(self, n: int) -> None:
        """Raise UsageError if the row cannot be measured. For n tokens, also raise the errors of `fit`."""
        name, _ = split_policy(self.policy)
        kind = policies.load(name)
        if kind.evicts and self.type_kv != "f16":
            raise UsageError(f"--others: only full takes a type; {name} takes a budget, as in {name}@128")
        if not kind.evicts and (self.budget or self.removed):
            raise UsageError(f"{name} evicts nothing; leave it out of --policies, and of POLICY@CELLS")
        if self.reads_whole and (kind.has_recall() or kind.capped):
            raise UsageError(
                f"--policies: {self.policy} cannot compress a prompt that was read whole; "
                f"choose --others {self.policy}@128, with a budget in cells"
            )
        self.settings(1)
        self.fit(n, 1, n + 1)

    def fit(self, n: int, n_answer: int, n_ctx: int) -> Policy:
        """The policy for a prompt of n tokens. n_ctx: the model's trained context.

        Raises InputError if nothing of the prompt would be evicted, or if the prompt does not fit in the
        context. Raises UsageError if the policy is unknown.
        """
        name, options = split_policy(self.policy)
        spec = policies.spec(name, _ROOM if self.removed else None, options)
        if self.budget:
            return spec.fit(self.budget)
        if n >= n_ctx:
            raise InputError(f"a prompt of {n:,} tokens and its answer do not fit in a context of {n_ctx:,}")
        if not spec.kind.evicts:
            return spec.fit(min(pad(n + n_answer), n_ctx))
        n_kept = round(n * (1 - self.removed))
        if n - n_kept <= _ROOM:
            raise InputError(
                f"{100 * self.removed:g} % of {n:,} tokens are within the {_ROOM} cells beyond the budget: "
                "nothing would be evicted; choose a longer --length or more --removed"
            )
        return spec.fit(n_kept + _ROOM)

    def settings(self, n_threads: int) -> Settings:
        return Settings(
            n_batch=_BATCH,
            n_output=N_OUTPUT,
            n_threads=n_threads,
            type_k=self.type_kv,
            type_v=self.type_kv,
            # kvtool's default with a GPU; the records have it
            archive_type="q8_0",
            prefill="whole" if self.reads_whole else None,
            # a row that starts from a full cache has room in its budget for the question and the answer
            over_budget=not self.reads_whole,
        )

    def knows(self, question: str) -> bool:
        """True if the row is run in this protocol.

        Rows that evict no token for good run only in "after", because a known question changes nothing.
        Policies that read the prompt twice also run only in "after", because they prepare for any question.
        """
        kind = policies.load(split_policy(self.policy)[0])
        forgets = kind.evicts and not kind.has_recall()
        return question == "after" or (forgets and not kind.has_reconstruction())


def rows(names: Sequence[str], removed: Sequence[float], others: Sequence[str]) -> Iterator[PolicyRow]:
    """Yield the row of the full cache, then a row for each policy and share, then the rows of `others`.

    others: POLICY@CELLS or full@TYPE, such as "recall@128" and "full@q4_0".
    """
    yield PolicyRow("full")
    for name in filter(None, names):
        for share in removed:
            yield PolicyRow(name, share)
    for other in others:
        name, _, how = other.rpartition("@")
        yield PolicyRow(name, budget=int(how)) if how.isdecimal() else PolicyRow(name, type_kv=how)


def measure(args: Namespace) -> None:
    """Run the items one by one, each under all rows."""
    first, end = args.items
    chosen = list(rows(args.policies.split(","), args.removed, args.others))
    for row in chosen:
        row.check(args.length)
    path = resolve(args.model)
    of_model = {"model": path.name, "model_sha256": sha256(path), **records.versions()}
    with closing(Model(path)) as model, ExitStack() as stack:
        if args.length > model.n_ctx_train:
            raise UsageError(f"--length must be at most the trained context, {model.n_ctx_train}")
        n_ctx = model.n_ctx_train
        for row in (row for row in chosen if row.removed or row.budget):
            check(row.fit(args.length, 1, args.length + 1), row.settings(1), model.layers, n_ctx, n_ctx)
        template = template_of(model)
        readings = []
        for question in args.question:
            names = {name: getattr(args, name) for name in ("essays", "squad", "hotpotqa", "tasks")}
            given = {**names, "lengths": args.length, "repeats": end, "question": question}
            task = tasks.make("ruler", [f"{name}={value}" for name, value in given.items() if value])
            assert isinstance(task, Ruler)
            items = [item for item in task.items([], model) if int(item.id.rpartition("-")[2]) >= first]
            for row in (row for row in chosen if row.knows(question)):
                fit = partial(row.fit, n_ctx=model.n_ctx_train)
                reader = Reader(model, fit, row.settings(args.threads), template)
                stack.callback(reader.close)
                about = {"task": "ruler", "question": question, **asdict(row), **of_model}
                readings.append((about, task, items, reader))
        for number in range(len(items)):
            for about, task, items, reader in readings:
                for record in TaskResults(about, items[number : number + 1], args.json).measure(task, reader):
                    sys.stderr.write(f"{number + 1}/{len(items)} {_line(record)}\n")
                # close the reader's engine: the caches of all rows at once would not fit in memory
                reader.close()


def _line(record: records.Record) -> str:
    """Return the line of text that reports a record on stderr."""
    how = f"@{record['budget']}" if record["budget"] else record["type_kv"].replace("f16", "")
    share = f" -{100 * record['removed']:g} %" if record["removed"] else ""
    score = record["scores"].get("string_match", record.get("error"))
    return f"{record['id']} {record['question']}: {record['policy']}{how}{share}: {score}"


def _removed(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text)) < 1:
            return share
    raise ArgumentTypeError(f"a share must be between 0 and 1, such as 0.75, got {text!r}")


def _shares(text: str) -> list[float]:
    return [_removed(each) for each in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if first.isdecimal() and end.isdecimal() and int(first) < int(end):
        return int(first), int(end)
    raise ArgumentTypeError(f"must be FROM:TO with FROM less than TO, such as 0:5, got {text!r}")


def _questions(text: str) -> list[str]:
    if unknown := [each for each in text.split(",") if each not in _QUESTIONS]:
        raise ArgumentTypeError(f"must be after, known or both, as in after,known, got {unknown[0]!r}")
    return text.split(",")


def _others(text: str) -> list[str]:
    others = [each for each in text.split(",") if each]
    for each in others:
        name, _, how = each.rpartition("@")
        if not (name and how):
            raise ArgumentTypeError(f"must be POLICY@CELLS or full@TYPE, such as recall@128, got {each!r}")
    return others


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-m", "--model", required=True, help="a name of models.txt or a path")
    parser.add_argument("-t", "--threads", type=int, default=1, help="CPU threads (1)")
    for name in ("essays", "squad", "hotpotqa", "tasks"):
        parser.add_argument(f"--{name}", default="", help="as in kvtool eval ruler --set")
    parser.add_argument(
        "--length", type=int, default=4096, help="tokens of a prompt and its longest answer (4096)"
    )
    parser.add_argument(
        "--items", type=_range, default=(0, 1), metavar="FROM:TO", help="samples of each task (0:1)"
    )
    parser.add_argument("--question", type=_questions, default=_QUESTIONS, help="after,known (both) or one")
    help_ = "policies that compress a prompt, with each share removed; '' for none"
    parser.add_argument("--policies", default=",".join(POLICIES), help=help_)
    parser.add_argument("--removed", type=_shares, default=",".join(REMOVED), help="shares of its cells")
    help_ = "POLICY@CELLS or full@TYPE, separated by commas (recall@128)"
    parser.add_argument("--others", type=_others, default="recall@128", help=help_)
    parser.add_argument(
        "--json", type=Path, required=True, help="file of records; items that it has are not run again"
    )
    args = parser.parse_args(words)
    with interrupt.ending(lambda: "stopped; what was measured is kept"):
        try:
            measure(args)
        except (KvtoolError, OSError) as error:
            # the message names options of kvtool eval, for example --set squad=FILE; here the option is
            # --squad
            parser.exit(2, f"{parser.prog}: {str(error).replace('--set ', '--')}\n")


if __name__ == "__main__":
    main()
