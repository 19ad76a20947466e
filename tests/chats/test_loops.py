"""A reply that loops is stopped, and one line reports it. Ordinary text is not taken for a loop."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from kvtool.chats import loops
from kvtool.chats.loops import MAX_BLOCK, MIN_SIGNS, MIN_TIMES, MIN_TOKENS, Loop
from kvtool.llama.loaded.model import Model
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import terminals
from tests.serve.http_requests import message
from tests.serve.in_process_server import serve_in_process

ROOT = Path(__file__).parents[2]
TEXTS = ("docs/*.md", "lab/papers/*.md", "*.md", "*.txt", "kvtool/**/*.py", "kvtool/**/*.js")
TEXTS += ("kvtool/**/*.css", "patches/**/*.cpp", "patches/*.patch", "tests/data/*")
LIBRARY = ("csv.py", "html/entities.py", "encodings/cp437.py", "token.py", "opcode.py", "calendar.py")


def looped(tokens, letters=range(1_000_000)):
    """Feed the tokens to a `Loop`, one by one. Return None if it finds no loop.

    Otherwise return (number of tokens fed, number of tokens of the repeated block, number of repetitions).

    letters: tokens whose text has a letter. The text of all other tokens has none.
    """
    loop = Loop()
    for n, token in enumerate(tokens, 1):
        if loop.add(token, b"a1" if token in letters else b" 1\n"):
            return n, loop.n_block, loop.n_times
    return None


def by_definition(tokens, letters):
    """Compute the result of `looped` from the definition of a loop."""
    for n in range(1, len(tokens) + 1):
        for block in range(1, min(MAX_BLOCK, n) + 1):
            has_letters = any(token in letters for token in tokens[n - block : n])
            least = max(block * MIN_TIMES, MIN_TOKENS if has_letters else MIN_SIGNS)
            if n >= least and (tokens[n - least : n - block] == tokens[n - least + block : n]).all():
                return n, block, least // block
    return None


@pytest.mark.parametrize(
    ("block", "n"),
    [([7], 512), ([1, 2], 512), ([1, 1, 2], 512), (list(range(40)), 512), (list(range(128)), 1024)],
)
def test_loop_is_found_as_soon_as_it_repeats_often_enough(block, n):
    before = [5, 6, 8, 9]
    tokens = before + block * 1200
    assert looped(tokens) == (len(before) + n, len(block), n // len(block))
    # blocks without letters must repeat for 1,024 tokens
    assert looped(tokens, letters=()) == (len(before) + 1024, len(block), 1024 // len(block))
    # blocks that are too long, and blocks that change, are not loops
    assert looped(list(range(MAX_BLOCK + 1)) * 20) is None
    assert looped([token + 1000 * (i % 7 == 0) * i for i, token in enumerate(block * 20)]) is None


def test_loop_equals_the_definition(monkeypatch):
    for name, n in (("MIN_TOKENS", 64), ("MIN_SIGNS", 128), ("MAX_BLOCK", 128)):
        monkeypatch.setattr(loops, name, n)
        monkeypatch.setitem(globals(), name, n)
    rng = np.random.default_rng(3)
    has_loop = []
    for case in range(15):
        block = rng.integers(0, 3, rng.integers(1, 40))
        noise = rng.integers(0, 3, rng.integers(0, 50))
        tokens = np.concatenate([noise, np.tile(block, 250 // len(block))])
        if case % 3 == 0:
            tokens[rng.integers(0, len(tokens), 3)] = 9
        letters = [(0, 1, 2), (1,), ()][case % 4 % 3]
        expected = by_definition(tokens, letters)
        assert looped(tokens, letters) == expected
        has_loop.append(expected is not None)
    assert 3 < sum(has_loop) < 13


def test_ordinary_texts_are_not_loops(smollm2):
    paths = [path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file()]
    paths += [Path(sysconfig.get_path("stdlib")) / name for name in LIBRARY]
    # use at most 60,000 characters of each file, which is the length of a long reply
    texts = [path.read_text(encoding="utf-8", errors="replace")[:60_000] for path in paths]
    texts += [
        "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 13) for b in range(1, 13)),
        "\n".join(f"| {n} | {'yes' if n % 2 else 'no'} | 0 | 0 | 0 |" for n in range(300)),
        "\n".join(f"{n}. The same task on another day." for n in range(1, 200)),
        json.dumps([[0] * 10 for _ in range(20)]) + json.dumps([[None] * 8 for _ in range(8)]),
        "".join(f"        self.field_{n} = None\n" for n in range(300)),
        "-" * 400 + "\n" + "=" * 400 + "\n" + " " * 400,
    ]
    model = Model(smollm2, no_weights=True)
    n_token = 0
    for text in texts:
        tokens = np.array(model.tokenize(text), np.int64)
        n_token += len(tokens)
        # `Loop` is slow, so run it only if some part of the text repeats a block of `block` tokens often
        # enough
        for block in range(1, MAX_BLOCK + 1):
            differ = np.flatnonzero(np.concatenate([[True], tokens[block:] != tokens[:-block], [True]]))
            if int(np.diff(differ).max()) - 1 + block >= max(block * MIN_TIMES, MIN_TOKENS):
                loop = Loop()
                assert not any(loop.add(token, model.piece(token)) for token in tokens.tolist()), text[:200]
                break
    model.close()
    assert n_token > 500_000


LOOPING = ("-t", 1, "--temp", 0, "--logit-bias", "70+100")
"""Options with which the model writes only token 70."""

LINE = "stopped: the model wrote the same token {} times; --stop-loops off lets it go on\n"


@pytest.fixture
def soon(monkeypatch):
    """Let fewer repetitions be a loop. Return their number."""
    monkeypatch.setattr(loops, "MIN_TOKENS", 64)
    return 64


def test_generate_stops_a_loop_and_reports_it_in_one_line(talker, soon):
    def generate(*options):
        return run_kvtool("generate", "-m", talker, "-p", "hi", "-n", 100, *LOOPING, *options)

    done = generate()
    assert (done.returncode, done.stderr) == (0, LINE.format(soon))
    letter = done.stdout[0]
    assert done.stdout == soon * letter + "\n"
    record = json.loads(generate("--json").stdout)
    assert (record["finish_reason"], record["tokens"]) == ("loop", soon)
    on = generate("--stop-loops", "off")
    assert (on.stdout, on.stderr) == (100 * letter + "\n", "stopped after 100 tokens (-n)\n")


def test_chat_continues_after_a_stopped_loop(talker, soon):
    done = run_kvtool("chat", "-m", talker, "--policy", "h2o", "-n", 100, *LOOPING, stdin="one\ntwo\n")
    assert (done.returncode, done.stderr) == (0, 2 * LINE.format(soon))
    assert [len(line) for line in done.stdout.splitlines()] == [soon, soon]


def test_chat_terminal_names_the_setting_that_allows_loops(talker):
    with terminals(talker, "-n", 600, "--policy", "h2o", *map(str, LOOPING)) as start:
        chat = start()
        assert LINE.format(512).replace("--stop-loops", "/set stop_loops").strip() in chat.say("hello")
        assert chat.say("/set stop_loops off") == "stop_loops  off"
        assert "600 tokens" in chat.say("hello")
        assert chat.say("/set stop_loops maybe") == "stop_loops must be on or off, got 'maybe'"


@pytest.mark.usefixtures("soon")
def test_server_does_not_stop_loops_before_max_tokens(talker):
    with serve_in_process(talker, policy="h2o") as server:
        more = {"max_tokens": 100, "logit_bias": {"70": 100}}
        answer = server.ask("/v1/chat/completions", {"messages": [message("user", "hi")], **more}).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 100)
