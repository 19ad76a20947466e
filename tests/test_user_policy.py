"""A policy in a file of one's own: the one in the document works, and mistakes get one line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import PlanError, UsageError
from tests.running import open_engine, text

DOCUMENT = Path(__file__).parent.parent / "docs" / "writing-a-policy.md"


@pytest.fixture
def written(tmp_path):
    """The document's own policy, as a reader saves it."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_the_documents_policy_is_short(written):
    assert len(written.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.engine
def test_the_documents_policy_runs(tiny_model, written):
    policy = policies.fit(str(written), 48, 8, ["window=10"])
    assert (policy.window, policy.sinks) == (10, 4)
    with open_engine(tiny_model(), policy) as engine:
        engine.read(text(200))
        assert engine.n_evicted == 200 - engine.n_kv > 100
        assert (np.sort(engine.rows.pos[:, : engine.n_kv], axis=1)[:, :4] == np.arange(4)).all()


def test_the_documents_policy_keeps_the_highest_average(written):
    policy = policies.load(str(written))(4, 1, window=1, sinks=0)
    from kvtool.policy import View

    view = View(
        pos=np.array([[3, 0, 2, 1]], np.int32),
        layer=np.zeros(1, np.int32),
        next=4,
        attn=np.array([[0, 4, 2, 1]], np.float32),
    )
    state = policy.start(1, 4, 0)
    policy.observe(view, state)
    # averages: the newest is protected, then 1, 1, 1/3
    assert policy.plan(view, state).keep.tolist() == [[True, True, True, False]]


def test_the_smallest_budget_is_named_for_it_too(written):
    with pytest.raises(UsageError, match="the smallest budget that works with these parameters is 38"):
        policies.fit(str(written), 20, 2)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("POLICY = ", r"SyntaxError: invalid syntax"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py, line 1\)"),
        ("", "POLICY must be a dataclass that derives from kvtool.policy.Policy"),
        ("POLICY = 3", "POLICY must be a dataclass"),
        ("from kvtool.policy import Policy as POLICY", "POLICY must be a dataclass"),
    ],
)
def test_a_file_that_is_no_policy_is_refused_in_one_line(tmp_path, code, complaint):
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(UsageError, match=complaint) as refused:
        policies.load(str(path))
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="no policy file .*nowhere.py"):
        policies.load(str(tmp_path / "nowhere.py"))


PLAN = "        return Plan(keep)\n"


def fill_and_evict(engine):
    """Sees that an eviction that fails has changed nothing."""
    engine.pin(6)
    for token in text(48):
        engine.step(np.array([token]))
    before = (engine.rows.pos.copy(), engine.n_kv, engine.context.state())
    try:
        engine.room()
    finally:
        assert (engine.rows.pos == before[0]).all()
        assert (engine.n_kv, engine.context.state()) == before[1:]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (PLAN, "        keep[3, 0] = ~keep[3, 0]\n" + PLAN, "Average: row 3 keeps"),
        (PLAN, "        return Plan(keep[:, :-1])\n", "Average: keep must be a C-contiguous bool"),
        (PLAN, "        return Plan(keep.astype(int))\n", "Average: keep must be a C-contiguous bool"),
        (PLAN, "        return Plan(~keep)\n", "Average: row 0 evicts a pinned token|Average: row 0 keeps"),
        (PLAN, "        return keep\n", "Average: plan must return a Plan, got ndarray"),
        (
            PLAN,
            "        return [][1]\n",
            r"Average.plan: IndexError: list index out of range \(mine.py, line",
        ),
        ("+= view.attn", "+= view.last", r"Average.observe: .*\(mine.py, line"),
        ("np.zeros((n_row, n_cell)", "np.zeros((n_cell, n_row)", "start must return a tuple of arrays"),
        (
            "return (np.zeros((n_row, n_cell), np.float32),)",
            "return 5",
            "start must return a tuple of arrays",
        ),
    ],
)
def test_a_bad_plan_is_refused_and_the_cache_stays(tiny_model, written, old, new, complaint):
    code = written.read_text(encoding="utf-8")
    assert code.count(old) == 1
    written.write_text(code.replace(old, new), encoding="utf-8")
    policy = policies.fit(str(written), 48, 8, ["window=10"])
    with pytest.raises(PlanError, match=complaint) as refused, open_engine(tiny_model(), policy) as engine:
        fill_and_evict(engine)
    assert "\n" not in str(refused.value)
