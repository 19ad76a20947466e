"""Measure the speed-up from draft tokens: edits of a file, summaries, code and prose.

    python -m lab.benchmarks.drafts edits -m qwen2.5-coder-1.5b
    python -m lab.benchmarks.drafts documents -m qwen2.5-coder-1.5b --documents multi_news.jsonl
    python -m lab.benchmarks.drafts code -m qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b

Each of ten prompts is answered twice at temperature 0: without draft tokens, and then with draft tokens. The
ratio is tokens per second with draft tokens, divided by tokens per second without. The two texts may differ
where two tokens are almost equally likely, because steps of several tokens round differently. `same` is the
share of tokens before the first difference. The file to edit is data/edited.txt, 202 lines of Python.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.chats.prompt import template_of
from kvtool.chats.writer import Writer
from kvtool.drafts.drafter import Drafter
from kvtool.drafts.lookup import Lookup
from kvtool.drafts.model import ModelDraft, check_draft
from kvtool.engine.loop import Engine
from kvtool.engine.settings import MAX_DRAFT, Settings
from kvtool.llama.sampler import Sampler
from lab.benchmarks.common import add_common, load_model, machine, make_parser, note, write_json

EDITED = Path(__file__).parent / "data" / "edited.txt"

EDITS = (
    "Rename the class Rows to RowTable everywhere.",
    "Rename the attribute n_past to n_token everywhere.",
    "Remove all docstrings.",
    "Add a method `is_empty` to the class Rows that returns whether n_kv is 0.",
    "Rename the method append to extend, and its parameter n to count.",
    "Replace `from __future__ import annotations` by nothing, and quote the annotations that need it.",
    "Add a module-level constant `_EMPTY = 0` and use it in the method clear instead of 0.",
    "Make every method of Rows print its name first.",
    "Turn the dataclass Cells into a NamedTuple.",
    "Sort the methods of Rows by their names.",
)

TASKS = (
    "Write a Python class for a binary search tree with insert, find, delete and in-order iteration.",
    "Write a Python function that parses a CSV line with quoted fields, without the csv module.",
    "Write a C function that reverses a singly linked list, and a main that tests it.",
    "Write a JavaScript debounce function with tests.",
    "Write a Python script that counts the words of all text files in a folder.",
    "Write a SQL schema for a library with books, members and loans, and five queries.",
    "Write a Python decorator that retries a function with exponential backoff.",
    "Write a Rust function that computes the Levenshtein distance of two strings.",
    "Write a Python implementation of an LRU cache without functools.",
    "Write a bash script that rotates log files and keeps the newest ten.",
)

TOPICS = (
    "a lighthouse keeper who finds a letter", "the history of bread", "why the sea is salty",
    "a train that never stops", "how bees choose a new home", "a painter who loses her sight",
    "the invention of the bicycle", "a village below a glacier", "what sleep is for", "two brothers",
)  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("task", choices=["edits", "documents", "code", "prose"])
    add_common(parser, needs_file=False)
    parser.add_argument("--documents", type=Path, help="JSON lines with a prompt, or a context and an input")
    parser.add_argument("--draft", help="a model that guesses where looking up finds nothing")
    parser.add_argument("--policy", default="recall")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("-n", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=int, default=10, help="so many of the prompts")
    args = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        model = stack.enter_context(closing(load_model(args.model)))
        source = None
        if args.draft:
            draft = stack.enter_context(closing(load_model(args.draft)))
            check_draft(model, draft)
            source = stack.enter_context(closing(ModelDraft(draft, args.threads, model.n_vocab)))
        policy = policies.fit(args.policy, args.budget)
        settings = Settings(n_draft=MAX_DRAFT, archive_type="q8_0", n_threads=args.threads)
        engine = stack.enter_context(closing(Engine(model, policy, settings)))
        drafter = Drafter(Lookup(), source)
        template = template_of(model)
        for text in _prompts(args)[: args.only]:
            whole = template.render([{"role": "user", "content": text}])
            prompt = model.tokenize(whole, special=True)[: model.n_ctx_train - args.n - 1]
            for _ in range(args.rounds):
                rows.append(_pair(engine, drafter, prompt, args.n))
                note(" ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()))
    result = {"machine": machine(), "task": args.task, "draft": args.draft or "lookup", "rows": rows}
    write_json(args.json, result)
    Console(width=110).print(_table(rows, args))


def _prompts(args: object) -> list[str]:
    if args.task == "edits":
        code = EDITED.read_text(encoding="utf-8")
        return [f"```python\n{code}```\n\n{edit} Print the whole file." for edit in EDITS]
    if args.task == "code":
        return list(TASKS)
    if args.task == "prose":
        return [f"Write a long text about {topic}." for topic in TOPICS]
    prompts = []
    for line in args.documents.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        document = record.get("prompt") or f"{record['context']}\n\n{record['input']}"
        prompts.append(f"{document}\n\nSummarize what this says, and quote its most important sentences.")
    # use the shortest documents, because long documents take minutes to read
    return sorted(prompts, key=len)[:10]


def _pair(engine: Engine, drafter: Drafter, prompt: np.ndarray, n: int) -> dict[str, float]:
    """Write an answer without draft tokens, and again with draft tokens. Compare the two."""
    runs = []
    for used in (None, drafter):
        with closing(Sampler(engine.model)) as sampler:
            writer = Writer(engine, sampler, used)
            writer.reset()
            if used:
                used.cut(0)
            before = drafter.n_drafted, drafter.n_accepted
            writer.read(prompt)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in writer.write(n):
                pass
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            runs.append((writer.n_written, wall, cpu, writer.tokens[len(prompt) :]))
    (n_own, wall_own, cpu_own, tokens_own), (n_with, wall_with, cpu_with, tokens_with) = runs
    differ = np.flatnonzero(tokens_own[: len(tokens_with)] != tokens_with[: len(tokens_own)])
    same = int(differ[0]) if len(differ) else min(len(tokens_own), len(tokens_with))
    return {
        "prompt": len(prompt),
        "written": n_with,
        "drafted": drafter.n_drafted - before[0],
        "accepted": drafter.n_accepted - before[1],
        "wall": wall_own / n_own * n_with / wall_with,
        "cpu": cpu_own / n_own * n_with / cpu_with,
        "same": same / max(len(tokens_own), len(tokens_with), 1),
    }


def _table(rows: list[dict[str, float]], args: object) -> Table:
    table = Table(title=f"{args.task}, {args.draft or 'lookup'}: over no guesses, of {len(rows)} answers")
    for column in ("", "median", "least", "most", "of all"):
        table.add_column(column, justify="left" if not column else "right")
    for clock in ("wall", "cpu"):
        values = [row[clock] for row in rows]
        # the ratio for all answers together is the harmonic mean, weighted by tokens
        whole = sum(row["written"] for row in rows) / sum(row["written"] / row[clock] for row in rows)
        shown = (statistics.median(values), min(values), max(values), whole)
        table.add_row(f"speed, {clock}", *(f"{value:.2f}" for value in shown))
    accepted = sum(row["accepted"] for row in rows) / max(sum(row["drafted"] for row in rows), 1)
    table.add_row("guesses that came true", f"{accepted:.2f}", "", "", "")
    table.add_row("same", f"{statistics.median(row['same'] for row in rows):.2f}", "", "", "")
    return table


if __name__ == "__main__":
    main()
