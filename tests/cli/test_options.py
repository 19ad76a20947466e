"""Options as data: how they are filled, checked, stored and printed, and their effect on a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvtool.chats import session_meta
from kvtool.cli.declared import options, parameters
from kvtool.config import opening, report
from kvtool.config.generation import GenerationOptions
from kvtool.config.opening import open_run
from kvtool.config.run import RunOptions, ScoreOptions
from kvtool.errors import UsageError
from kvtool.options import Options, Range, declared, option, redeclared


@dataclass(frozen=True)
class Tide(Options):
    default_height: ClassVar[int] = 7

    height: int | None = option(
        "-h2, --height N", None, "How high.", default_text="{default_height}", valid=Range(1)
    )
    share: float = option(
        "--share X", 0.5, "Of the day.", in_session=True, in_record=True, valid=Range(0, 1, "; 1: all")
    )
    moon: str = option("--moon NAME", "full", "Which moon.", choices=("new", "half", "full"), in_session=True)
    names: tuple[str, ...] = option("--name TEXT", (), "Names.", read=lambda raw, flag: tuple(raw or ()))


@dataclass(frozen=True)
class Calm(Tide):
    hidden: ClassVar = ("names", "moon")
    default_height: ClassVar[int] = 2

    share: float = redeclared(Tide, "share", 0.25, help="Of the night.")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"height": 0}, "--height must be at least 1, got 0"),
        ({"share": 2}, "--share must be in 0..1, got 2; 1: all"),
        ({"share": float("nan")}, "--share must be in 0..1, got nan; 1: all"),
        ({"moon": "blue"}, "--moon must be new, half or full, got 'blue'"),
    ],
)
def test_error_about_a_value_names_the_long_flag(wrong, words):
    with pytest.raises(UsageError) as caught:
        Tide(**wrong)
    assert str(caught.value) == words


def test_typed_values_override_session_values_which_override_settings():
    raw = {"height": 3, "share": 0.75, "moon": "new", "names": ["a"]}
    tide = Tide.from_values(raw, typed=["share"], given=["share", "moon"])
    assert (tide.names, tide.typed, tide.given) == (("a",), {"share"}, {"share", "moon"})
    again_there = tide.resumed({"share": 0.1, "moon": "half", "unknown": 1})
    assert (again_there.share, again_there.moon) == (0.75, "half")
    # options that come from a session are not in `given`
    assert again_there.given == {"share"}
    assert tide.session_values() == {"share": 0.75, "moon": "new"}
    assert tide.record_values() == {"share": 0.75}
    assert tide.changed(moon="full").given == {"share", "moon"}


def test_subclass_may_redeclare_and_hide_fields():
    assert Calm().share == 0.25
    assert (declared(Calm)["share"].help, declared(Calm)["share"].in_session) == ("Of the night.", True)
    assert [parameter.name for parameter in parameters(Calm)] == ["height", "share"]
    with pytest.raises(UsageError, match="--share must be in"):
        Calm(share=-1)


def called(*arguments):
    """Call a command with these arguments. Return the values that it gets: (options, flag).

    Return Typer's result if Typer refuses the arguments.
    """
    calls = []

    @options
    def command(*, tide: Tide, loud: bool = False) -> None:
        calls.append((tide, loud))

    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [*arguments])
    return calls[0] if calls else done


def test_command_gets_filled_options_and_the_names_typed():
    tide, loud = called("--moon", "new", "-h2", "4", "--name", "a", "--name", "b", "--loud")
    assert (tide.moon, tide.height, tide.names, tide.share, loud) == ("new", 4, ("a", "b"), 0.5, True)
    assert tide.typed == tide.given == {"moon", "height", "names"}
    # Typer refuses this value before the command runs
    assert called("-h2", "0").exit_code == 2


@pytest.mark.parametrize("kind", [RunOptions, ScoreOptions, GenerationOptions])
def test_stored_options_are_restored_unchanged(kind):
    values = {
        "positions": "in-cache",
        "type_k": "q8_0",
        "n_ctx": 64,
        "options": ("a=1", "b=2"),
        "budget": "9",
    }
    changed = kind(**{name: value for name, value in values.items() if name in declared(kind)})
    assert kind().resumed(json.loads(json.dumps(changed.session_values()))) == changed
    assert kind.from_values(json.loads(json.dumps(changed.values()))) == changed


def test_option_names_are_unique():
    flags = [
        flag
        for kind in (RunOptions, GenerationOptions)
        for declaration in declared(kind).values()
        for flag in declaration.flags
    ]
    assert len(flags) == len(set(flags))
    named = [
        name
        for field, declaration in declared(GenerationOptions).items()
        for name in {*declaration.names(field)}
    ]
    assert len(named) == len(set(named))


def test_open_run_opens_an_engine_and_notes_changed_options(tiny_model):
    path = str(tiny_model(n_ctx_train=512))
    with open_run(RunOptions(model=path, policy="h2o", n_ctx=9999, threads=1)) as opened:
        assert opened.notes == ["--ctx-size 9,999 is above the model's trained length; 512 is used"]
        assert opened.engine.policy.budget == 512
        record = report.report(opened.engine, opened.run.policy)
        assert (record["policy"], record["budget"], record["archive_limit"]) == ("h2o", 512, None)
        assert report.line(record).startswith("0/512 cells per row, cache ")
    with open_run(ScoreOptions(model=path, threads=1), length=lambda model: 40) as opened:
        # each token of a batch is scored, so it needs logits; no batch may exceed the budget
        assert opened.engine.settings.n_output == opened.engine.settings.n_batch == 64
        assert not opened.engine.settings.over_budget
    with open_run(RunOptions(model=path, policy="full", threads=1), length=lambda model: 40) as opened:
        assert opened.engine.policy.budget == 40


@pytest.mark.parametrize(
    ("options", "policy", "budget"),
    [
        ({}, "recall", 512),
        ({"policy": "tova"}, "tova", 1024),
        # recall does not support in-cache positions. h2o replaces it, with its own default budget.
        ({"positions": "in-cache"}, "h2o", 1024),
        ({"positions": "in-cache", "budget": "96"}, "h2o", 96),
        ({"policy": "corm"}, "corm", 2048),
    ],
)
def test_default_budget_depends_on_the_policy(tiny_model, options, policy, budget):
    run = RunOptions(model=str(tiny_model(n_ctx_train=2048)), threads=1, **options)
    with open_run(run) as run_engine:
        assert (run_engine.run.policy, run_engine.engine.policy.budget) == (policy, budget)
        is_other = policy not in (run.policy, options.get("policy"))
        notes = ["recall does not work with --positions in-cache; the policy is h2o"]
        assert run_engine.notes == (notes if is_other else [])


def test_error_names_the_context_that_limits_the_budget(tiny_model):
    run = RunOptions(model=str(tiny_model()), n_ctx=1)
    with pytest.raises(UsageError, match="^--ctx-size 1 limits the budget: a budget of 1 is"), open_run(run):
        pass


def test_resumed_session_keeps_its_policy_and_budget():
    def resumed(run, policy, budget=None):
        fixed = {"parameters": {"budget": 1024}}
        return session_meta.resumed(run, {"options": {"policy": policy, "budget": budget}, "fixed": fixed})

    h2o, recall = (resumed(RunOptions(), policy) for policy in ("h2o", "recall"))
    assert (h2o.policy, h2o.budget, h2o.instead) == ("h2o", None, None)
    # the session's budget stays, even if recall's default budget has changed since
    assert (recall.policy, recall.budget, recall.instead) == ("recall", "1024", None)
    assert resumed(RunOptions(), "recall", "10%").budget == "10%"
    typed = RunOptions(budget="96", typed=frozenset({"budget"}))
    assert resumed(typed, "recall").budget == "96"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"policy": "h2o", "options": ("sinkz=1",)}, "h2o: there is no parameter 'sinkz'"),
        ({"archive": "many"}, "--archive is a number of tokens"),
        ({"policy": "h2o", "archive": "9", "typed": frozenset({"archive"})}, "`h2o` has no archive; leave"),
        ({"rpc": "there:50052", "gpu_layers": 0}, "--gpu-layers 0 leaves no layer for the workers"),
        ({"policy": "full", "budget": "9", "typed": frozenset({"budget"})}, "`full` keeps every token"),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_searched(monkeypatch, wrong, words):
    monkeypatch.setattr(opening, "find_model", lambda name: pytest.fail(str(name)))
    with pytest.raises(UsageError, match=words), open_run(RunOptions(**wrong)):
        pass


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"budget": 128, "archive": 2000}, ("128", "2000")),
        ({"budget": np.int64(128), "options": ["window=8"]}, ("128", ("window=8",))),
        ({"archive_file": "a"}, (Path("a"),)),
        ({"budget": None, "n_ctx": np.int32(64)}, (None, 64)),
    ],
)
def test_options_accept_numbers_instead_of_texts_and_lists_instead_of_tuples(options, values):
    run = RunOptions(**options)
    assert tuple(getattr(run, name) for name in options) == values
    assert run.typed == run.given == frozenset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": "window=64"}, "--option must be a tuple, got 'window=64'"),
        ({"options": (None,)}, "--option must be a text, got None"),
        ({"budget": True}, "--budget must be a text, got True"),
        ({"budget": b"128"}, "--budget must be a text, got b'128'"),
        ({"policy": None}, "--policy must be a text, got None"),
        ({"threads": "4"}, "--threads must be a whole number, got '4'"),
        ({"n_ctx": 2.5}, "--ctx-size must be a whole number, got 2.5"),
        ({"cpu_moe": 1}, "--cpu-moe must be True or False, got 1"),
        ({"archive_file": 1}, "--archive-file must be a path, got 1"),
    ],
)
def test_options_of_a_wrong_type_raise_an_error_that_names_the_type(options, message):
    with pytest.raises(UsageError) as caught:
        RunOptions(**options)
    assert str(caught.value) == message
