"""Which early facts does a long chat still know, and how well does it predict its next turn?

    python -m lab.benchmarks.chat BOOK --at 4096 --facts 100 --policies recall,full,h2o,h2o@1024
    python -m lab.benchmarks.chat BOOK --at 8192,32768 --policies recall,h2o,streamingllm

In its first turns, the user states facts. Then the model tells a book, one part in each turn. When the chat
has --at tokens, the next part is scored. It is decoded token by token, as when a model writes.

At the end, the user asks for each fact. Every question starts from the same state. The beginning of the reply
is given, up to the code of the fact. The fact is found if greedy decoding continues with the whole code.

All policies are compared with the first policy: fact by fact (McNemar's exact test), and by 95 % intervals of
the mean difference. h2o@1024 is a policy with another budget. The policy `full` needs a chat that fits into
the trained context. Results that the --json file already has are not measured again.
"""

from __future__ import annotations

import json
import math
import random
import time

import numpy as np

from kvtool import policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.sampler import Sampler
from kvtool.measure.grid import split_policy
from kvtool.measure.perplexity import nll_of
from kvtool.measure.statistics import block_counts, block_sums
from lab.benchmarks.blocks import joined
from lab.benchmarks.common import (
    add_common,
    describe,
    load_model,
    machine,
    make_parser,
    mcnemar,
    note,
    write_json,
)

NAMES = (
    "Aaron Abigail Ada Agnes Albert Alice Amy Andrew Angela Anna Arthur Barbara Benjamin Bernard Betty "
    "Boris Bruno Carl Carmen Cecil Charles Chloe Claire Clara Daniel David Deborah Diana Donald Dora "
    "Edgar Edith Edward Elena Emil Emma Eric Esther Eva Felix Fiona Frances Frank Fred George Grace "
    "Gustav Hannah Harold Helen Henry Hugo Ida Igor Irene Isaac Ivan Jack Jacob James Jane Jasper Joan "
    "John Joseph Julia Karen Kevin Laura Leo Linda Louis Lucy Luke Mabel Marcus Maria Martin Max Mira "
    "Nancy Nathan Nina Nora Oliver Olga Oscar Otto Paul Peter Philip Rachel Ralph Robert Rosa Ruth Samuel "
    "Sarah Simon Victor "
)
FACT = "The locker of {} has the code"
N_STATED = 5
"""Number of facts that the user states in one turn."""
N_WORDS = 190
"""Number of words of the book in one turn."""


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--policies", default="recall,h2o,streamingllm", help="names, separated by commas")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--at", default="8192", help="tokens of the chat before the scored turns, ascending")
    parser.add_argument("--score", type=int, default=1024, help="tokens of a scored turn")
    parser.add_argument("--facts", type=int, default=0, choices=range(101), metavar="0..100")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.at = [int(n) for n in args.at.split(",")]
    model = load_model(args.model)
    done = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else {}
    results = {"machine": machine(), "model": model.path.name}
    results |= {name: getattr(args, name) for name in ("budget", "at", "score", "facts", "seed")}
    names = args.policies.split(",")
    for name in names:
        note(name)
        done[name] = done.get(name) or _measure(model, name, args)
        write_json(args.json, results | {"runs": done})
    _print(results | {"runs": {name: done[name] for name in names}})


def _measure(model, name: str, args) -> dict[str, list[dict[str, object]]]:
    """Measure one policy. Return the scores of the turns, and of the answers about the facts."""
    text, _, budget = name.partition("@")
    kind, options = split_policy(text)
    # 8 * N_WORDS tokens are enough for the turn that passes the last --at, and for a question
    n_all = args.at[-1] + args.score + 8 * N_WORDS
    n_cell = int(budget or args.budget) if policies.load(kind).evicts else min(n_all, model.n_ctx_train)
    engine = Engine(model, policies.fit(kind, n_cell, None, options), Settings(n_threads=args.threads))
    chat = Conversation(Writer(engine, Sampler(model)), template_of(model))
    draws = random.Random(args.seed)
    names = draws.sample(NAMES.split(), args.facts)
    facts = list(zip(names, draws.sample(range(1000, 10000), len(names)), strict=True))
    for i in range(0, len(facts), N_STATED):
        stated = (f"{FACT.format(who)} {code}." for who, code in facts[i : i + N_STATED])
        chat.read_turn(" ".join(["Please remember this.", *stated]))
        _say(chat, model.tokenize("I will remember that."))
    chat.read_turn("Please tell me a long story.")
    words, at, turns = args.file.read_text(encoding="utf-8-sig").split(), 0, []
    for n in args.at:
        while engine.n_past < n:
            _say(chat, model.tokenize(" ".join(words[at : at + N_WORDS])))
            at += N_WORDS
            chat.read_turn("Please go on.")
        n_past, n_bytes, start = engine.n_past, engine.archive_bytes, time.process_time()
        tokens = model.tokenize(" ".join(words[at : at + args.score]))[: args.score]
        at += args.score
        nll, _ = _score(engine, tokens)
        turns.append({"tokens": n_past, "nll": nll.tolist(), "cpu_s": time.process_time() - start})
        turns[-1]["archive_bytes"] = n_bytes
        note(f"{n_past:,} tokens, perplexity {math.exp(nll.mean()):.2f}")
        _say(chat, tokens[-1:])
        chat.read_turn("Please go on.")
    return {"turns": turns, "facts": _ask(chat, facts)}


def _say(chat: Conversation, tokens: np.ndarray) -> None:
    """Read the tokens as the model's reply, and end its turn."""
    chat.writer.read(tokens)
    chat.messages.append({"role": "assistant", "content": "..."})


def _score(engine: Engine, tokens: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the nll f64[n] of the tokens, and True if every token is the most likely one.

    The last token is scored, but the engine does not read it.
    """
    nll, is_top = np.empty(len(tokens)), True
    for i in range(len(tokens)):
        if i:
            engine.step(tokens[i - 1 : i])
        logits = engine.context.logits()[-1:]
        nll[i] = nll_of(logits, tokens[i : i + 1])[0]
        is_top &= bool(logits.argmax() == tokens[i])
    return nll, is_top


def _ask(chat: Conversation, facts: list[tuple[str, int]]) -> list[dict[str, object]]:
    engine, model = chat.writer.engine, chat.writer.engine.model
    _say(chat, model.tokenize("The end."))
    saved, items = {name: np.array(data) for name, data in engine.save()} if facts else {}, []
    for who, code in facts:
        engine.restore(saved)
        turn = chat.template.turn(chat.messages[:-1], f"What is the code of {who}'s locker?")
        beginning = model.tokenize(FACT.format(who))
        engine.read(np.concatenate([model.tokenize(turn, special=True), beginning]))
        nll, is_found = _score(engine, model.tokenize(f"{FACT.format(who)} {code}")[len(beginning) :])
        items.append({"fact": who, "code": code, "found": is_found, "log_p": -float(nll.sum())})
    return items


def _print(results: dict) -> None:
    runs = results["runs"]
    first, *_ = runs.values()
    for i, turn in enumerate(first["turns"]):
        print(
            f"after {turn['tokens']:,} tokens: perplexity, nats above the first, ms a token, archive in MiB"
        )
        for name, run in runs.items():
            row, nll = run["turns"][i], np.array(run["turns"][i]["nll"])
            ms, mib = 1e3 * row["cpu_s"] / len(nll), row["archive_bytes"] / 2**20
            more = nll - turn["nll"]
            given = _given(*joined(block_sums(more), block_counts(len(more))))
            print(f"  {name:20}{math.exp(nll.mean()):8.2f}   {given}{ms:8.1f}{mib:8.1f}")
    if first["facts"]:
        print(f"of {results['facts']} facts: found, lost and won, p; nats of a code, and above the first")
    for name, run in runs.items() if first["facts"] else ():
        now, before = (np.array([each["found"] for each in of["facts"]]) for of in (run, first))
        log_p, others = (np.array([each["log_p"] for each in of["facts"]]) for of in (run, first))
        lost, won = int((before & ~now).sum()), int((now & ~before).sum())
        given = _given(log_p - others, np.ones(len(log_p)))
        print(
            f"  {name:20}{now.sum():4}{lost:6}{won:4}{mcnemar(lost, won):9.2g}{log_p.mean():9.3f}   {given}"
        )
    print(describe({"model": results["model"], **results["machine"]}))


def _given(sums: np.ndarray, counts: np.ndarray) -> str:
    """Format a mean and its 95 % interval, from the bootstrap over blocks (Efron 1979)."""
    drawn = np.random.default_rng(0).integers(len(sums), size=(10_000, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{sums.sum() / counts.sum():+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main()
