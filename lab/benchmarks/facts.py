"""Does a long stream still know the facts that were hidden in it?

    python -m lab.benchmarks.facts BOOK --tokens 131072 --policy recall --budget 512

Ten facts are put into one stream, at equal intervals. They are about different things, so that a small model
can tell them apart. At the end, a question asks for each fact, beginning with the oldest. Questions and
answers stay in the stream.
"""

from __future__ import annotations

import random
import time
from itertools import cycle

from rich.table import Table

from kvtool import policies
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import InputError
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.tasks.haystack import sentences_of
from lab.benchmarks.common import (
    add_common,
    console,
    describe,
    load_model,
    machine,
    make_parser,
    note,
    write_json,
)

FACTS = {
    "The pass key is": range(10_000, 100_000),
    "The name of the captain's ship is the": ("Aurora", "Halcyon", "Meridian"),
    "My favourite fruit is the": ("mango", "papaya", "quince"),
    "The train to the mountains leaves on": ("Tuesday", "Thursday", "Sunday"),
    "The colour of the secret door is": ("purple", "orange", "turquoise"),
    "The doctor's dog is called": ("Biscuit", "Pepper", "Rocket"),
    "The treasure is buried under the": ("windmill", "lighthouse", "fountain"),
    "The phone number of the hotel is": range(1_000_000, 10_000_000),
    "The inventor of the machine was born in": ("Lisbon", "Prague", "Dublin"),
    "The soup of the day is made of": ("pumpkin", "lentils", "beetroot"),
}
"""For each fact: its beginning, and the ends from which one is drawn at random."""

START = (
    "There is important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important info."
)
N_MIN = 1000
N_ANSWER = 8
N_PART = 2048
"""Number of characters that are read at once."""


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--policy", default="recall")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument(
        "-o", "--option", action="append", default=[], help="a parameter of the policy, name=value"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="length of the stream before the questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tokens < N_MIN:
        parser.error(f"--tokens must be at least {N_MIN}: ten facts have to fit")
    try:
        filler = sentences_of([args.file])
    except InputError as error:
        parser.error(str(error))
    model = load_model(args.model)
    draws = random.Random(args.seed)
    facts = [(fact, str(draws.choice(ends))) for fact, ends in draws.sample(list(FACTS.items()), len(FACTS))]
    engine = Engine(
        model,
        policies.fit(args.policy, args.budget, None, args.option),
        Settings(prefill="stream", archive_type="q8_0", n_threads=args.threads),
    )
    planted = _read(model, engine, filler, facts, args.tokens)
    items = []
    for (fact, answer), at in zip(facts, planted, strict=True):
        start = time.process_time()
        engine.read(model.tokenize(f"\nQuestion: what do you remember? {fact}"))
        sampler = Sampler(model)
        output = "".join(Writer(engine, sampler).write(N_ANSWER))
        sampler.close()
        items.append(
            {"fact": f"{fact} {answer}", "at": at, "output": output, "found": answer in output}
            | {"cpu_s": time.process_time() - start}
        )
    results = {
        "machine": machine(),
        "model": model.path.name,
        **{name: getattr(args, name) for name in ("policy", "budget", "option", "seed")},
        "tokens": args.tokens,
        "archive_bytes": engine.archive_bytes,
        "items": items,
    }
    table = Table(title=f"{args.policy}, {args.budget} cells, {args.tokens:,} tokens")
    for column in ("planted at", "fact", "answer"):
        table.add_column(column, justify="right" if column == "planted at" else "left")
    for item in items:
        table.add_row(f"{item['at']:,}", item["fact"], repr(item["output"]))
    console().print(table, markup=False)
    print(f"found: {sum(item['found'] for item in items)} of {len(items)}")
    print(describe(results["machine"]))
    write_json(args.json, results)


def _read(
    model: Model, engine: Engine, filler: list[str], facts: list[tuple[str, str]], n_token: int
) -> list[int]:
    """Read the stream. Return the position at which each fact begins."""
    planted: list[int] = []
    engine.read(model.tokenize(START, start=True))
    text, n_noted = "", 0
    for sentence in cycle(filler):
        text += f" {sentence}"
        # divide the stream into as many equal parts as facts, and put a fact into the middle of each
        is_due = len(planted) < len(facts) and (
            engine.n_past + len(model.tokenize(text)) >= (len(planted) + 0.5) * n_token / len(facts)
        )
        if is_due:
            fact = " ".join(facts[len(planted)])
            planted.append(engine.n_past + len(model.tokenize(text)))
            text += f" {fact}. Remember it. {fact}."
        if is_due or len(text) > N_PART:
            engine.read(model.tokenize(text))
            text = ""
        if engine.n_past - n_noted >= 8192:
            n_noted = engine.n_past
            note(f"{n_noted:,} tokens read")
        if engine.n_past >= n_token:
            return planted
    raise AssertionError("a book has sentences")


if __name__ == "__main__":
    main()
