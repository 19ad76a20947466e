"""kvtool as a library: the documents' examples run, and the reported cells and shares are right."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import kvtool
from kvtool import KvtoolError, Settings, load_model, load_policy, policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of
from kvtool.chats.writer import Writer
from kvtool.errors import ModelError, UsageError
from kvtool.llama.sampler import Sampler
from kvtool.policies.h2o import H2O
from tests.engine.exact_engines import open_engine, random_tokens

ROOT = Path(__file__).parents[2]


def blocks(name):
    document = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", document, re.M | re.S)


@pytest.fixture
def run(smollm2, monkeypatch):
    """run(code): execute code on one thread. Return the variables that all code so far has defined."""
    monkeypatch.setattr("kvtool.llama.cache.decoder.default_threads", lambda: 1)
    names = {}

    def run(code):
        exec(code, names)
        return names

    yield run
    names["engine"].close()
    names["model"].close()


def test_first_example_of_python_docs_streams_a_reply(run, capsys):
    code = blocks("docs/python.md")[0]
    assert len(code.strip().splitlines()) <= 11
    names = run(code)
    reply, _, end = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    engine = names["engine"]
    assert names["talk"].messages[-1] == {"role": "assistant", "content": reply}
    assert end == f"{engine.n_past} tokens, {engine.n_kv} of them in each row"
    assert engine.n_kv <= 96 < engine.n_past
    engine.reset()
    writer = Writer(engine, Sampler(engine.model))
    repeated = Conversation(writer, template_of(engine.model), "You are a patient teacher.")
    pieces = list(repeated.reply("What is a tide?", 24))
    assert len(pieces) > 20
    assert reply.startswith("".join(pieces))


def test_examples_of_python_docs_run_and_print_true_numbers(run, capsys):
    code = blocks("docs/python.md")[1:]
    names = run(code[0])
    engine = names["engine"]
    output = capsys.readouterr().out
    # the last tokens depend on the CPU, so only the length of the text is checked
    assert engine.n_past > engine.policy.budget
    assert len(engine.model.tokenize(output)) > engine.policy.budget - 16
    run(code[1])
    lines = capsys.readouterr().out.splitlines()
    share = names["share"]
    assert lines[0].startswith(f"{engine.n_past} tokens, {share.tolist().count(0)} of them held by no row")
    assert share.min() < 1
    assert share.tolist().count(0) < engine.n_past - 64 + 16
    assert len(lines) == 1 + (names["cells"].layer == 5).sum() == 4
    run(code[2])
    mass, tokens = names["mass"], names["tokens"]
    positions = engine.rows.pos[0, : engine.rows.live[0]].tolist()
    raw = {pos: engine.state[0][0, i] for i, pos in enumerate(positions)}
    assert sorted(mass[0].tolist(), reverse=True)[:3] == [raw[pos] for pos in tokens.tolist()]
    run(code[3])
    opened = names["opened"]
    assert (opened.run.budget, opened.engine.policy.budget, opened.notes) == ("10%", 819, [])
    assert opened.engine.settings.type_k == "q8_0"
    assert len(capsys.readouterr().out.split()) > 3
    assert len(code) == 4


def test_generate_continues_the_stream_of_the_last_call(smollm2, monkeypatch):
    with closing(load_model(smollm2)) as model:
        starts, tokenize = [], model.tokenize
        monkeypatch.setattr(
            model,
            "tokenize",
            lambda text, **options: starts.append(options.get("start")) or tokenize(text, **options),
        )
        with_one = Settings(n_threads=1, n_batch=64)
        engine = kvtool.Engine(model, load_policy("local", 64), with_one)
        first = "".join(kvtool.generate(engine, "One, two, three,", n_max=6))
        n = engine.n_past
        assert n == len(tokenize("One, two, three,")) + 6
        assert list(kvtool.generate(engine, " and", n_max=0)) == []
        after = engine.context.logits()[-1].copy()
        engine.reset()
        assert list(kvtool.generate(engine, f"One, two, three,{first} and", n_max=0)) == []
        assert engine.n_past == n + 1
        # both runs decode the same tokens, but in batches of different lengths, so their rounding errors
        # differ
        assert np.abs(engine.context.logits()[-1] - after).mean() < 0.25
        # only a text that starts a stream gets a BOS
        assert starts == [True, False, True]
        engine.close()


POLICIES = {
    "h2o": policies.fit("h2o", 48, 8),
    "streamingllm": policies.fit("streamingllm", 48, 8),
    "corm": policies.fit("corm", 80, 8, ["history=4"]),
}


@pytest.mark.parametrize("positions", ["original", "in-cache"])
@pytest.mark.parametrize("name", POLICIES)
def test_cells_equal_a_plain_count_over_the_rows(tiny_model, name, positions):
    with open_engine(tiny_model(), POLICIES[name], positions=positions) as engine:
        empty = engine.cells()
        assert (empty.n_past, empty.pos.shape, empty.share().tolist()) == (0, (4, 0), [])
        for part in np.array_split(random_tokens(210), 3):
            engine.read(part)
            cells = engine.cells()
            assert cells.n_past == engine.n_past
            assert cells.layer.tolist() == [0, 0, 1, 1]
            assert cells.head.tolist() == [0, 1, 0, 1]
            assert cells.live.tolist() == engine.rows.live.tolist()
            for row, n in enumerate(engine.rows.live.tolist()):
                # (position in the stream, position for RoPE, index of the cell) of each token, oldest first
                pos, rot = engine.rows.pos[row].tolist(), engine.rows.rot[row].tolist()
                expected = sorted((pos[cell], rot[cell], cell) for cell in range(n))
                arrays = (cells.pos, cells.rot, cells.cell)
                assert [tuple(int(array[row, i]) for array in arrays) for i in range(n)] == expected
                assert (cells.pos[row, n:] == -1).all()
                assert (cells.rot[row, n:] == -1).all()
                assert np.flatnonzero(cells.held()[row]).tolist() == [pos for pos, _, _ in expected]
            assert cells.share().tolist() == cells.held().mean(axis=0).tolist()
        assert len(set(cells.live.tolist())) > 1 or not engine.policy.ragged
        assert (cells.rot != cells.pos).any() == (positions == "in-cache")
        arrays = [cells.layer, cells.head, cells.live, cells.pos, cells.rot, cells.cell]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        before = [array.tolist() for array in arrays]
        engine.read(random_tokens(32, seed=2))
        # the arrays are copies: later tokens do not change them
        assert [array.tolist() for array in arrays] == before


def test_load_policy_takes_the_parameters_of_the_command_line():
    assert load_policy("h2o", 64, evict_every=4, window=9, decay=0.1, score="mean") == policies.fit(
        "h2o", 64, 4, ["window=9", "decay=0.1", "score=mean"]
    )
    assert load_policy("buzz", 64, local_max=False).local_max is False
    assert load_policy("knorm", 64) == policies.fit("knorm", 64)


@dataclass(frozen=True, slots=True)
class Mine(H2O):
    """Policy with parameters of all types."""

    whole: int = 1
    share: float = 0.5
    some: tuple[float, ...] = ()
    either: Literal["a", 2] = "a"
    maybe: int | None = 3
    is_on: bool = False


def test_load_policy_takes_values_as_they_are():
    values = {"whole": 7, "share": 0.25, "some": (1.5, 2.5), "either": 2, "maybe": None, "is_on": True}
    policy = load_policy(Mine, 64, **values)
    assert {name: getattr(policy, name) for name in values} == values
    assert type(policy) is Mine
    # values that mean the same in another type
    policy = load_policy(Mine, 64, share=1, some=[1, np.float32(2)], whole=np.int64(4), is_on=np.True_)
    assert (policy.share, policy.some, policy.whole, policy.is_on) == (1.0, (1.0, 2.0), 4, True)
    assert [type(value) for value in (policy.share, *policy.some, policy.whole)] == [*[float] * 3, int]


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"whole": "7"}, "whole must be a whole number, got '7'"),
        ({"whole": 7.0}, "whole must be a whole number, got 7.0"),
        ({"whole": True}, "whole must be a whole number, got True"),
        ({"whole": None}, "whole must be a whole number, got None"),
        ({"share": "0.5"}, "share must be a number, got '0.5'"),
        ({"some": 1.5}, "some must be a tuple, got 1.5"),
        ({"some": "1,2"}, "some must be a tuple, got '1,2'"),
        ({"some": ("1",)}, "some must be a number, got '1'"),
        ({"either": "c"}, "either must be one of a, 2, got 'c'"),
        ({"maybe": "none"}, "maybe must be a whole number or none, got 'none'"),
        ({"is_on": 1}, "is_on must be true or false, got 1"),
        ({"other": 1}, "there is no parameter 'other' .*; its parameters: window"),
    ],
)
def test_load_policy_checks_the_types_of_values(value, pattern):
    with pytest.raises(UsageError, match=f"^Mine: {pattern}"):
        load_policy(Mine, 64, **value)


def test_load_policy_takes_a_path_and_a_class(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from kvtool.policies.h2o import H2O as POLICY\n")
    assert (
        load_policy(path, 64, window=9) == load_policy(H2O, 64, window=9) == load_policy("h2o", 64, window=9)
    )
    with pytest.raises(UsageError, match="^int must be a dataclass that derives from kvtool.policy.Policy$"):
        load_policy(int, 64)


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        (lambda: load_policy("h3o", 64), "unknown policy 'h3o'. Did you mean h2o"),
        (lambda: load_policy("h2o", 64, window="many"), "h2o: window must be a whole number, got 'many'"),
        (lambda: load_policy("h2o", "10%"), "budget, a number of tokens, must be a whole number, got '10%'"),
        (lambda: load_policy("h2o", 64, evict_every="4"), "evict_every must be a whole number, got '4'"),
        (lambda: load_policy("h2o", 64, evict_every=0), "evict_every must be at least 1, got 0"),
        (lambda: load_policy("h2o", 64, evict_every=-3), "evict_every must be at least 1, got -3"),
        (lambda: load_policy("h2o", 2, evict_every=8), "--evict-every must be less than the budget"),
        (lambda: load_policy("roco", 3), "a budget of 3 is too small for roco; use at least 6"),
        (lambda: Settings(type_k="q9_0"), "type_k must be one of f32, f16, .*, got 'q9_0'"),
        (lambda: Settings(type_v="int8"), "type_v must be one of f32, f16, .*, got 'int8'"),
        (lambda: Settings(flash="yes"), "flash must be on, off or auto, got 'yes'"),
    ],
)
def test_invalid_values_raise_usage_error(wrong, pattern):
    with pytest.raises(UsageError, match=pattern):
        wrong()


@pytest.mark.parametrize("n_max", [-5, 2.5, "3"])
def test_invalid_n_max_is_refused_before_anything_is_read(talker, n_max):
    pattern = re.escape(f"n_max must be a whole number of at least -1 (no limit), got {n_max!r}")
    model = kvtool.Model(talker)
    with closing(model), closing(kvtool.Engine(model, load_policy("local", 64))) as engine:
        chat = kvtool.chat(engine)
        for write in (lambda: kvtool.generate(engine, "One", n_max), lambda: chat.reply("One", n_max)):
            with pytest.raises(UsageError, match=pattern):
                next(write())
        assert engine.n_past == 0
        assert next(chat.reply("One", -1))


@pytest.mark.parametrize("first", ["engine", "model"])
def test_use_after_close_raises_usage_error(tiny_model, first):
    model = kvtool.Model(tiny_model())
    engine = kvtool.Engine(model, load_policy("local", 64), Settings(n_threads=1))
    sampler = Sampler(model)
    engine.read(random_tokens(8))
    (engine if first == "engine" else model).close()
    ways = [
        lambda: engine.read(random_tokens(1)),
        lambda: engine.read(random_tokens(80)),
        lambda: dict(engine.save()),
        lambda: engine.rewind(0),
        lambda: engine.rewind(8),
        engine.reset,
        engine.context.logits,
        lambda: sampler.sample(engine.context),
    ]
    for use in ways:
        with pytest.raises(UsageError, match="this engine or its model is closed; make a new one"):
            use()
    engine.close()
    model.close()
    ways = [
        lambda: model.tokenize("a"),
        lambda: model.piece(5),
        lambda: model.ends_turn(5),
        lambda: kvtool.Engine(model, load_policy("local", 64), Settings(n_threads=1)),
    ]
    for use in ways:
        with pytest.raises(UsageError, match="this model is closed; load it again"):
            use()
    # closing again does nothing
    engine.close()
    model.close()
    sampler.close()


def test_unknown_damaged_or_unsupported_models_raise_errors(tmp_path, tiny_model, monkeypatch):
    with pytest.raises(ModelError, match=r"unknown model .*no such file"):
        load_model("smollm3-1t")
    (tmp_path / "none.gguf").write_bytes(b"GGUF" * 9)
    with pytest.raises(KvtoolError, match=r"none\.gguf"):
        load_model(tmp_path / "none.gguf")
    monkeypatch.setattr(
        "kvtool.models.resolve.unsupported", lambda info: f"{info.architecture} has no plain cache"
    )
    with pytest.raises(ModelError, match="llama has no plain cache"):
        load_model(tiny_model())


def test_every_public_name_can_be_imported_and_no_other():
    for name in kvtool.__all__:
        assert getattr(kvtool, name).__name__ == name
    assert set(kvtool.__all__) <= set(dir(kvtool))
    assert list(kvtool._MODULES) == kvtool.__all__
    other = "nothing"
    with pytest.raises(AttributeError, match="module 'kvtool' has no attribute 'nothing'"):
        getattr(kvtool, other)
    assert files("kvtool").joinpath("py.typed").is_file()


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, kvtool; from kvtool import KvtoolError;"
        "print([name for name in ('numpy', 'numba', 'kvtool_llama', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
