"""Policies in a user's file: the example in docs/writing-a-policy.md works, mistakes get short messages."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cache import kept_at_first, kept_positions, view_of

from kvtool import parameters, policies
from kvtool.errors import PlanError, UsageError
from kvtool.policy import Plan
from tests.cli.in_process_command import run_kvtool
from tests.engine.exact_engines import open_engine, random_tokens

DOCUMENT = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"


@pytest.fixture
def policy_file(tmp_path):
    """The policy in docs/writing-a-policy.md, saved as a file."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_documented_policy_has_at_most_40_lines(policy_file):
    assert len(policy_file.read_text(encoding="utf-8").splitlines()) <= 40


def test_documented_policy_explains_its_parameters(policy_file):
    (listed,) = json.loads(run_kvtool("policies", policy_file, "--json").stdout)
    assert listed["explained"] == {
        "window": "newest tokens, never evicted.",
        "sinks": "first tokens, never evicted.",
    }


STYLES = {
    "lines": """Keeps some.

    window: newest tokens,
        never evicted.
    like: how much: 0 to 1.

    The rest says nothing of parameters: like this.
    """,
    "a paragraph": "Keeps some. window: newest tokens, never evicted. like: how much: 0 to 1.",
    "numpydoc": """Keeps some.

    Parameters
    ----------
    window : int
        newest tokens,
        never evicted.
    like
        how much: 0 to 1.
    """,
    "Google": """Keeps some.

    Args:
        window (int): newest tokens,
            never evicted.
        like (float): how much: 0 to 1.
    """,
    "reStructuredText": """Keeps some.

    :param int window: newest tokens,
        never evicted.
    :param like: how much: 0 to 1.
    """,
}


@pytest.mark.parametrize("doc", STYLES.values(), ids=STYLES)
def test_a_docstring_explains_parameters_in_any_style(doc):
    fields = [("window", int, 1), ("like", float, 0.5), ("silent", int, 0)]
    explained = parameters.explained(dataclasses.make_dataclass("Mine", fields, namespace={"__doc__": doc}))
    assert explained == {"window": "newest tokens, never evicted.", "like": "how much: 0 to 1."}


def test_documented_policy_runs(tiny_model, policy_file):
    policy = policies.fit(str(policy_file), 48, 8, ["window=10"])
    assert (policy.window, policy.sinks) == (10, 4)
    with open_engine(tiny_model(), policy) as engine:
        engine.read(random_tokens(200))
        assert engine.n_evicted == 200 - engine.n_kv > 100
        assert (np.sort(engine.rows.pos[:, : engine.n_kv], axis=1)[:, :4] == np.arange(4)).all()


def test_documented_policy_keeps_the_highest_average(policy_file):
    policy = policies.load(str(policy_file))(4, 1, window=1, sinks=0)
    # token 3 is the newest, so it is protected. The averages of tokens 0, 2 and 1 are 1, 1 and 1/3
    assert kept_at_first(policy, view_of([3, 0, 2, 1], attn=[0, 4, 2, 1])) == [0, 2, 3]


def test_refused_budget_names_the_smallest_for_a_user_s_policy(policy_file):
    with pytest.raises(
        UsageError, match=r"a budget of 6 is too small for .*\.py with --evict-every 2; use at least 7$"
    ):
        policies.fit(str(policy_file), 6, 2)


LACKING = """from dataclasses import dataclass
from kvtool.policy import Policy, Ranked

@dataclass(frozen=True)
class POLICY({}):
    {}
"""


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("POLICY = ", r"SyntaxError: invalid syntax"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py, line 1\)"),
        ("", "defines no POLICY; add POLICY = NAME with the name of the policy's class$"),
        ("POLICY = 3", "POLICY must be a dataclass that derives from kvtool.policy.Policy$"),
        ("from kvtool.policy import Policy as POLICY", "POLICY must be a dataclass"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(mine.py, line 1\)"),
        (LACKING.format("Policy", "budget: int"), "POLICY must define the field slack and the method plan$"),
        (LACKING.format("Ranked", "budget: int; slack: int"), "POLICY must define the method scores$"),
    ],
)
def test_file_without_a_valid_policy_is_refused_with_one_line(tmp_path, code, complaint):
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(UsageError, match=complaint) as caught:
        policies.load(str(path))
    assert re.match(rf"{re.escape(str(path))}(: | defines )", str(caught.value))
    assert "\n" not in str(caught.value)


SUBCLASS = """from dataclasses import dataclass
from kvtool.policies.h2o import H2O

@dataclass(frozen=True)
class Mine(H2O):
    pass

POLICY = Mine
"""


def test_files_of_the_same_name_in_two_folders_are_two_modules(tmp_path):
    paths = [tmp_path / folder / "mine.py" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f'"""Policy {path.parent.name}."""\n{SUBCLASS}')
    loaded = [policies.load(str(path)) for path in paths]
    assert [sys.modules[policy.__module__].__doc__ for policy in loaded] == ["Policy one.", "Policy two."]


def test_missing_policy_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="no policy file .*nowhere.py"):
        policies.load(str(tmp_path / "nowhere.py"))


SCORES = "        return state[0][:, : view.n_kv] / view.lived\n"


def planned(*lines):
    """Return the code of a policy that has the document's `scores`, but another `plan`."""
    body = (
        "from kvtool.policy import Plan, keep_ranked, sum_rows",
        "keep = self.highest(view, self.scores(view, state))",
        *lines,
    )
    return f"{SCORES}\n    def plan(self, view, state):\n" + "".join(f"        {line}\n" for line in body)


def fill_and_evict(engine):
    """Let an engine evict from a full cache. If the eviction fails, check that it has changed nothing."""
    engine.pin(6)
    engine.hold(3)
    for token in random_tokens(48):
        engine.step(np.array([token]))
    before = (engine.rows.pos.copy(), engine.n_kv, engine.context.state())
    try:
        engine.evict_if_due()
    finally:
        assert (engine.rows.pos == before[0]).all()
        assert (engine.n_kv, engine.context.state()) == before[1:]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            SCORES,
            planned("from kvtool.policy import Merge", "return Plan(keep, Merge([], [], [], []))"),
            "^Average: plan merges values; set merges = True$",
        ),
        (
            "def start(self, n_row, n_cell, n_dim):",
            "def start(self, n_row, n_cell):",
            r"^Average.start: TypeError: .* takes 3 positional .* 4 were given \(mine.py, line \d+\)$",
        ),
        (
            "reads = Signal.ATTENTION",
            "reads = 'attn'",
            "^Average: TypeError: reads must be a Signal, such as Signal.ATTENTION, got 'attn'",
        ),
        (
            "reads = Signal.ATTENTION",
            "reads = Signal.ATTENTION | Signal.RECENT",
            "^Average: ValueError: Signal.RECENT needs n_query of 1 or more",
        ),
        (SCORES, planned("return [][1]"), r"plan: IndexError: list index out of range \(mine.py, line 3"),
        ("+= view.attn", "+= view.last", r"view.last is None; add Signal.LAST to reads \(mine.py, line"),
        ("    reads = Signal", "    sums = ('attn',)\n    other = Signal", "add Signal.ATTENTION to reads"),
        (
            SCORES,
            "        mine = view.last\n        return mine.copy()\n",
            r"^Average.scores: .*; a signal of the view is None unless it is in reads \(mine.py, line \d+\)$",
        ),
        (SCORES, planned("raise SystemExit(3)"), r"Average.plan: SystemExit: 3 \(mine.py, line 3"),
        (
            SCORES,
            planned("return Plan(view.pos < 40)"),
            r"row 0 evicts one of the newest 3 tokens \(view.held\)$",
        ),
    ],
)
def test_invalid_plan_is_refused_and_the_cache_stays_unchanged(tiny_model, policy_file, old, new, complaint):
    assert_refused(tiny_model, policy_file, old, new, complaint)


FEW = r"ValueError: the score must be of shape \[\d+, 48 or more\], got"
TYPE = "TypeError: the score must be of type float32, got"


@pytest.mark.parametrize(
    ("score", "complaint"),
    [
        ("score[:, :-1].copy()", FEW),
        ("score[:-1]", FEW),
        ("score[0]", FEW),
        ("score[None]", FEW),
        ("score.astype(np.float64)", TYPE),
        ("score.astype(int)", TYPE),
        ("score.tolist()", "the score must be a NumPy array, got list"),
        ("view.last", "NumPy array, got NoneType; a signal of the view is None unless it is in reads"),
        (
            "np.where(view.pos == 9, np.float32(np.nan), score)",
            r"the score of row 0, cell 9, is not a number",
        ),
    ],
)
def test_invalid_scores_are_refused_before_kernels_read_them(tiny_model, policy_file, score, complaint):
    new = SCORES.replace("return", "score =") + f"        return {score}\n"
    assert_refused(tiny_model, policy_file, SCORES, new, rf"Average.scores: .*{complaint}.*(?<!, line ..\))$")


@pytest.mark.parametrize("layout", [np.array, np.asfortranarray, lambda a: np.repeat(a, 2, 1)[:, ::2]])
def test_a_score_may_have_any_layout_in_memory(policy_file, layout):
    view = view_of([[3, 0, 2, 1, 4]] * 2, attn=None)
    policy = policies.load(str(policy_file))(4, 2, window=1, sinks=0)
    score = layout(np.array([[1, 3, 2, 0, 0], [3, 1, 2, 0, 0]], np.float32))
    score.flags.writeable = False
    assert kept_positions(view, Plan(policy.highest(view, score))) == [[0, 4], [3, 4]]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("keep_ranked(view, score[:, :-1].copy(), 40, 4, 10)", FEW),
        ("keep_ranked(view, score, 40.0, 4, 10)", "TypeError: n_keep must be a whole number, got 40.0"),
        ("keep_ranked(view, score, 40, None, 10)", "TypeError: sinks must be a whole number, got None"),
        ("keep_ranked(view, score, 40, 4, '10')", "TypeError: window must be a whole number, got '10'"),
        ("sum_rows(view, score[:, :-1].copy(), 'row')", FEW),
        ("sum_rows(view, score.astype(np.float64), 'all')", TYPE),
        ("sum_rows(view, score, 'head')", "ValueError: per must be one of row, layer, all, got 'head'"),
    ],
)
def test_helper_functions_refuse_invalid_arguments_and_name_the_line(
    tiny_model, policy_file, call, complaint
):
    new = planned("score = self.scores(view, state)", f"return Plan({call})")
    assert_refused(
        tiny_model, policy_file, SCORES, new, rf"Average.plan: .*{complaint}.* \(mine.py, line 3\d\)"
    )


@pytest.mark.parametrize(
    ("fit", "complaint"),
    [
        ("return None", "TypeError: fit must return an instance of Average, got NoneType"),
        ("return cls(budget)", "TypeError: .* missing 2 required .*: 'slack' and 'window' .*mine.py, line"),
        ("return cls(budget, slack, window=9.5)", "window must be a whole number, got 9.5"),
    ],
)
def test_invalid_fit_method_is_refused_with_one_line(policy_file, fit, complaint):
    lines = f"    @classmethod\n    def fit(cls, budget, slack, **params):\n        {fit}\n\n    def start"
    policy_file.write_text(
        policy_file.read_text(encoding="utf-8").replace("    def start", lines), encoding="utf-8"
    )
    with pytest.raises(UsageError, match=complaint) as error:
        policies.fit(str(policy_file), 48)
    assert "\n" not in str(error.value)


KERNEL = """from kvtool.kernels.kernel import kernel


@kernel("f4[:,::1](f4[:,::1])")
def _scaled(scores):
    return scores.no_such_attribute


"""


def test_an_error_of_a_kernel_names_its_cause_and_its_line(tiny_model, policy_file):
    code = policy_file.read_text(encoding="utf-8").replace("@dataclass", f"{KERNEL}@dataclass", 1)
    policy_file.write_text(code, encoding="utf-8")
    line = code.splitlines().index("    return scores.no_such_attribute") + 1
    complaint = rf"no_such_attribute.* \(mine.py, line {line}\)$"
    assert_refused(
        tiny_model,
        policy_file,
        SCORES,
        SCORES.replace("return ", "return _scaled(").replace("\n", ")\n"),
        complaint,
    )
    # a policy need not call all of its kernels, so a faulty one is no error before it is called
    policies.load_kernels(policies.fit(str(policy_file), 48))


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT", "0") != "0", reason="nothing is compiled")
@pytest.mark.parametrize("command", ["perplexity", "inspect", "compare"])
def test_kernels_are_compiled_before_a_run_is_timed(tiny_model, policy_file, command):
    code = policy_file.read_text(encoding="utf-8").replace("@dataclass", f"{KERNEL}@dataclass", 1)
    code = code.replace("scores.no_such_attribute", "scores * np.float32(2)")
    code = code.replace(SCORES, SCORES.replace("return ", "return _scaled(").replace("\n", ")\n"))
    # print whether the kernel is compiled each time the policy observes; the first time counts
    start = "        print('compiled', _scaled._compiled is not None)\n"
    code = code.replace("def observe(self, view, state):\n", f"def observe(self, view, state):\n{start}")
    policy_file.write_text(code, encoding="utf-8")
    file = policy_file.with_name("text.txt")
    file.write_text("The tide came in. " * 10)
    policy = "--policies" if command == "compare" else "--policy"
    options = ("-m", tiny_model(), policy, policy_file, "--budget", 48, "-t", 1, "--max-tokens", 60)
    done = run_kvtool(command, file, *options)
    assert done.returncode == 0, done.stderr
    # `compare` shows a policy's output on stderr, after the line about the run of `full`
    assert re.search("^compiled (.*)", done.stdout + done.stderr, re.M)[1] == "True"


def test_parameter_without_a_default_is_required(policy_file):
    code = policy_file.read_text(encoding="utf-8").replace(
        "    window: int\n", "    alpha: float\n    window: int\n"
    )
    policy_file.write_text(code, encoding="utf-8")
    assert re.search(r"^alpha +required", run_kvtool("policies", policy_file).stdout, re.M)
    with pytest.raises(UsageError, match=r"mine.py: set it with -o alpha=\.\.\.$"):
        policies.fit(str(policy_file), 48)
    assert policies.fit(str(policy_file), 48, 8, ["alpha=0.5", "window=9"]).alpha == 0.5


TYPED = """from dataclasses import dataclass
from typing import Literal, Optional
import numpy as np
from kvtool.policies.h2o import H2O

@dataclass(frozen=True, slots=True)
class POLICY(H2O):
    x: {} = None
"""


@pytest.mark.parametrize(
    ("kind", "typed", "value", "refused"),
    [
        ("int | None", "3", 3, "x must be a whole number or none, got '2.5'"),
        ("int | None", "none", None, "x must be a whole number or none, got '2.5'"),
        ("Optional[int]", "3", 3, "x must be a whole number or none, got '2.5'"),
        ("float | None", "2.5", 2.5, None),
        ("bool | None", "False", False, "x must be true or false or none, got '2.5'"),
        ("None | str", "none", None, None),
        ("Literal['a', 'b']", "b", "b", "x must be one of a, b, got '2.5'"),
        ("Literal['a', 2] | None", "2", 2, "x must be one of a, 2 or none, got '2.5'"),
        ("tuple[int, ...]", "1, 2", (1, 2), "x must be a whole number, got '2.5'"),
        ("tuple[float, ...] | None", "none", None, None),
    ],
)
def test_types_of_parameters(tmp_path, kind, typed, value, refused):
    path = tmp_path / "mine.py"
    path.write_text(TYPED.format(kind))
    actual = policies.fit(str(path), 64, 8, [f"x={typed}"]).x
    assert (actual, type(actual)) == (value, type(value))
    if refused:
        with pytest.raises(UsageError, match=f"^{re.escape(f'{path}: {refused}')}$"):
            policies.fit(str(path), 64, 8, ["x=2.5"])
    else:
        policies.fit(str(path), 64, 8, ["x=2.5"])


@pytest.mark.parametrize(
    ("kind", "type_name"),
    [
        ("int | str", "int | str"),
        ("int | str | None", "int | str | None"),
        ("list[float]", "list[float]"),
        ("list", "list"),
        ("tuple", "tuple"),
        ("tuple[int, int]", "tuple[int, int]"),
        ("tuple[list, ...]", "tuple[list, ...]"),
        ("np.float32", "float32"),
        ("object", "object"),
    ],
)
def test_other_types_of_parameters_are_refused_when_the_file_is_loaded(tmp_path, kind, type_name):
    path = tmp_path / "mine.py"
    path.write_text(TYPED.format(kind))
    message = (
        f"{path}: POLICY: x cannot be of type {type_name}; "
        "use bool, int, float, str, tuple[int, ...], Literal, or"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)} one of these with . None$"):
        policies.load(str(path))


def test_an_unknown_name_in_a_type_is_refused_when_the_file_is_loaded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"from __future__ import annotations\n{TYPED.format('Nothing')}")
    message = f"{path}: POLICY: NameError in the type of a field: name 'Nothing' is not defined"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        policies.load(str(path))


@pytest.mark.parametrize("name", policies.names())
def test_types_of_built_in_parameters_are_known(name):
    parameters.check_types(policies.load(name), name)


def assert_refused(tiny_model, policy_file, old, new, complaint):
    """Check that the document's policy fails with a one-line message if `old` is replaced by `new`."""
    code = policy_file.read_text(encoding="utf-8")
    assert code.count(old) == 1
    policy_file.write_text(code.replace(old, new), encoding="utf-8")
    policy = policies.fit(str(policy_file), 48, 8, ["window=10"])
    with pytest.raises(PlanError, match=complaint) as error, open_engine(tiny_model(), policy) as engine:
        fill_and_evict(engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("budget", "n"), [("48", 1), ("10%", 1), ("4MiB", 2)])
def test_policy_is_fitted_again_only_for_budgets_in_bytes(tiny_model, tmp_path, budget, n):
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvtool.policies.local import Local\n\n\n"
        "class POLICY(Local):\n"
        "    @classmethod\n"
        "    def fit(cls, budget, slack, **params):\n"
        "        print('fitted', budget)\n"
        "        return cls(budget, slack, **params)\n"
    )
    options = ["-m", tiny_model(), "--policy", path, "--budget", budget]
    done = run_kvtool("generate", "hi", "--raw", "-n", 2, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fitted") == n
