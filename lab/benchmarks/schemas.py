"""Count the JSON schemas that kvtool enforces, validate random texts, and time tokens under a schema.

    python -m lab.benchmarks.schemas schemas.jsonl --samples 3
    python -m lab.benchmarks.schemas --rounds 6 -m MODEL

The first command reads one {"name", "schema"} per line, which is the format of JSONSchemaBench. It counts the
schemas that are enforced, accepted with remarks, and refused. For each enforced schema it writes random
texts, token by token, from the tokens that the schema allows. It prefers tokens that close something. The
jsonschema package validates the texts.

The second command writes texts with a schema and without a schema in turns, with the same number of tokens.
It uses kvtool chat's sampler and no draft tokens, and compares CPU times. Only this command needs the model's
weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

import jsonschema
import numpy as np
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.chats.writer import Writer
from kvtool.config.generation import GenerationOptions
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import Matcher, Vocabulary
from kvtool.llama.grammar.schema import Enforced, enforced
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.models.resolve import resolve
from lab.benchmarks.common import (
    add_common,
    describe,
    load_model,
    machine,
    make_parser,
    note,
    show,
    spread,
    write_json,
)

MAX_TOKENS = 3000
"""Maximum number of tokens of a sample."""

PEOPLE = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "note": {"type": "string", "minLength": 60, "maxLength": 200},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "note", "tags"],
        "additionalProperties": False,
    },
}
PROMPT = "List fifty people as JSON, each with a name, an age, a note of two sentences, and tags.\n"


class Wanderer:
    """Write random texts, token by token, from the tokens that a schema allows."""

    def __init__(self, model: Model, seed: int) -> None:
        self._vocabulary = Vocabulary.of(model)
        self._rng = np.random.default_rng(seed)
        pieces = self._vocabulary.pieces
        self._closes = np.array([bool(piece) and not piece.strip(b'"}]') for piece in pieces])
        self._is_short = np.array(
            [0 < len(piece) < 4 and piece.isascii() and piece.decode().isprintable() for piece in pieces]
        )
        self._ends = np.zeros(len(pieces), np.bool_)
        self._ends[[*self._vocabulary.ends]] = True

    def text(self, schema: Enforced) -> bytes | None:
        """Return a random text that fits a schema, or None if `MAX_TOKENS` tokens do not complete it."""
        matcher, tokens = Matcher(self._vocabulary, schema.rules), list[int]()
        while len(tokens) < MAX_TOKENS:
            bits = np.unpackbits(matcher.mask().view(np.uint8), count=self._vocabulary.n, bitorder="little")
            token = self._drawn(bits.view(np.bool_), len(tokens))
            if self._ends[token]:
                return self._vocabulary.bytes_of(tokens)
            matcher.accept(token)
            tokens.append(token)
        return None

    def _drawn(self, fits: np.ndarray, n: int) -> int:
        """Draw a token that fits. n: number of tokens so far. A large n makes closing tokens more likely."""
        share, preferred = self._rng.random(), (self._ends, self._closes, self._is_short)
        for bound, is_preferred in zip(
            (0.3, 0.9 if n > MAX_TOKENS // 4 else 0.5, 0.95), preferred, strict=True
        ):
            if share < bound and (fits & is_preferred).any():
                return int(self._rng.choice(np.flatnonzero(fits & is_preferred)))
        return int(self._rng.choice(np.flatnonzero(fits)))


def tried(schema: dict[str, object], wanderer: Wanderer, n: int) -> Counter[str]:
    """Count a schema as enforced, accepted with remarks or refused. Count its n samples by outcome."""
    try:
        constraint = enforced(schema)
    except UsageError:
        return Counter({"refused": 1})
    if constraint.not_held:
        return Counter({"with remarks": 1})
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    counts = Counter({"enforced": 1})
    for _ in range(n):
        try:
            text = wanderer.text(constraint)
        except UsageError as error:
            note(str(error))
            counts["too complex"] += 1
            continue
        if text is None:
            counts["unfinished"] += 1
        else:
            is_valid = kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))
            counts["valid" if is_valid else "invalid"] += 1
    return counts


def token_s(engine: Engine, drawing: GenerationOptions, n: int, seed: int) -> float:
    """Write n tokens. Return the mean CPU seconds per token."""
    sampler = Sampler(engine.model, drawing.sampling(), seed=seed)
    writer = Writer(engine, sampler)
    writer.reset()
    writer.read(engine.model.tokenize(PROMPT, start=True))
    start = time.process_time()
    n_written = sum(1 for _ in writer.write(n)) and writer.n_written
    took = (time.process_time() - start) / n_written
    sampler.close()
    return took


def ratios(model: Model, rounds: int, n: int) -> list[float]:
    """For each pair of texts, return the time of a token with a schema divided by the time without one."""
    # neither text may end before n tokens: end tokens are banned from the free text, and PEOPLE requires
    # fifty items, which take more than n tokens
    bans = tuple((token, -np.inf) for token in model.ends)
    free, held = GenerationOptions(logit_bias=bans), GenerationOptions(json_schema=json.dumps(PEOPLE))
    values = []
    engine = Engine(model, policies.fit("full", 4096), Settings(n_threads=1))
    token_s(engine, held, 16, 0)
    for seed in range(rounds):
        times = {
            kind: token_s(engine, kind, n, seed) for kind in ((free, held) if seed % 2 else (held, free))
        }
        values.append(times[held] / times[free])
        note(f"{times[free] * 1000:.2f} ms free, {times[held] * 1000:.2f} ms under a schema")
    engine.close()
    return values


def main(args: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__ or "")
    add_common(parser, needs_file=False)
    parser.add_argument("--samples", type=int, default=1, help="texts of each schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="pairs of texts with and without a schema")
    parser.add_argument("-n", type=int, default=150, help="tokens of each of them")
    options = parser.parse_args(args)
    results: dict[str, object] = {"machine": machine()}
    if options.file:
        model = Model(resolve(options.model), vocab_only=True)
        wanderer, counts = Wanderer(model, options.seed), Counter[str]()
        for line in options.file.read_text(encoding="utf-8").splitlines():
            counts += tried(json.loads(line)["schema"], wanderer, options.samples)
        model.close()
        table = Table(*counts)
        table.add_row(*map(str, counts.values()))
        Console().print(table)
        results["schemas"] = dict(counts)
    if options.rounds:
        model = load_model(options.model)
        ratio = spread(ratios(model, options.rounds, options.n))
        model.close()
        print(f"time of a token under a schema over one without: {show(ratio)}")
        results["ratio"] = ratio
    note(describe(results["machine"]))
    write_json(options.json, results)


if __name__ == "__main__":
    sys.exit(main())
