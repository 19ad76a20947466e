"""Policies in other packages: kvtool finds them by their entry points, and a broken one does no harm."""

from __future__ import annotations

import json
import sys

import pytest

from kvtool import policies
from kvtool.chats import session
from kvtool.errors import UsageError
from tests import forked
from tests.cli.called import called
from tests.tiny import CHATML

NEWEST = '''"""Newest: the newest tokens stay."""

from dataclasses import dataclass

import numpy as np

from kvtool.policy import Ranked


@dataclass(frozen=True, slots=True)
class Newest(Ranked):
    """No parameters."""

    budget: int
    slack: int

    def scores(self, view, state):
        return view.pos.astype(np.float32)


@dataclass(frozen=True, slots=True)
class All(Newest):
    """Keeps everything."""

    evicts = False

    @classmethod
    def fit(cls, budget, slack, **params):
        return cls(budget, 0, **params)

    def __post_init__(self):
        pass

    def highest(self, view, scores):
        return np.ones(view.pos.shape, np.bool_)
'''


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """install(name, code, {policy: "module:object"}) writes a package to sys.path, as pip does."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, code, entries, version="1.0"):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{policy} = {value}\n" for policy, value in entries.items())
        (info / "entry_points.txt").write_text(f"[kvtool.policies]\n{lines}")
        policies.installed.cache_clear()
        policies._load_installed.cache_clear()

    yield install
    policies.installed.cache_clear()
    policies._load_installed.cache_clear()
    for module in [name for name in sys.modules if name.startswith("some_")]:
        del sys.modules[module]


def kvtool(*args, stdin=""):
    # forget the packages that were found earlier, as a new process does
    policies.installed.cache_clear()
    policies._load_installed.cache_clear()
    return called(*args, stdin=stdin, env={"COLUMNS": "200"})


def test_policy_of_a_package_is_loaded_by_name(packages):
    packages("some-policies", NEWEST, {"newest": "some_policies:Newest"}, version="2.1")
    policy = policies.fit("newest", 64)
    assert type(policy).__name__ == "Newest"
    assert (policy.budget, policy.slack) == (64, 8)
    assert policies.package("newest") == "some-policies"
    assert policies.owners("newest") == "some-policies 2.1"
    assert "newest" not in policies.names()


def test_policy_of_a_package_is_hashed_like_a_user_s_file(packages, tmp_path):
    packages("some-policies", NEWEST, {"newest": "some_policies:Newest"})
    assert policies.file_sha256("newest") == policies.file_sha256(str(tmp_path / "some_policies.py"))
    assert policies.file_sha256("h2o") is policies.package("h2o") is None


def test_policies_are_listed_with_their_package(packages):
    packages("some-policies", NEWEST, {"newest": "some_policies:Newest"}, version="2.1")
    done = kvtool("policies", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = {policy["name"]: policy for policy in json.loads(done.stdout)}
    assert list(listed) == [*policies.names(), "newest"]
    assert listed["newest"]["package"] == "some-policies 2.1"
    assert listed["newest"]["what"] == "Newest: the newest tokens stay."
    assert listed["h2o"]["package"] is None
    assert "some-policies 2.1" in kvtool("policies").stdout
    assert "Did you mean newest?" in kvtool("policies", "newst").stderr


@pytest.mark.parametrize(
    ("code", "entry", "complaint"),
    [
        (
            "1 / 0",
            "some_broken:Newest",
            "(some_broken:Newest) cannot be loaded: ZeroDivisionError: division by zero (some_broken.py, ",
        ),
        ("def", "some_broken:Newest", "cannot be loaded: SyntaxError"),
        (NEWEST, "some_broken:Nothing", "(some_broken:Nothing) cannot be loaded: AttributeError"),
        (
            NEWEST,
            "some_nothing:Newest",
            "cannot be loaded: ModuleNotFoundError: No module named 'some_nothing'\n",
        ),
        ("Newest = 3", "some_broken:Newest", "must be a dataclass that derives from kvtool.policy.Policy"),
    ],
)
def test_broken_policy_prints_one_line_and_hides_no_other(packages, code, entry, complaint):
    packages("some-broken", code, {"newest": entry})
    done = kvtool("policies", "--json")
    assert done.returncode == 0
    assert [policy["name"] for policy in json.loads(done.stdout)] == policies.names()
    assert done.stderr.startswith("kvtool: policy 'newest' of some-broken 1.0")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    explained = kvtool("policies", "newest")
    assert (explained.returncode, explained.stderr) == (2, done.stderr)
    assert kvtool("policies", "h2o").stderr == ""


def test_policy_of_kvtool_wins_over_one_of_the_same_name(packages):
    packages("some-policies", NEWEST, {"h2o": "some_policies:Newest"})
    assert policies.load("h2o").__module__ == "kvtool.policies.h2o"
    assert policies.package("h2o") is None
    done = kvtool("policies", "--json")
    assert [policy["name"] for policy in json.loads(done.stdout)] == policies.names()
    assert done.stderr == (
        "kvtool: policy 'h2o' of some-policies 1.0 is ignored: kvtool has a policy of that name\n"
    )
    assert kvtool("policies", "h2o").stderr == ""


def test_policy_name_in_two_packages_is_refused(packages):
    packages("some-policies", NEWEST, {"newest": "some_policies:Newest"})
    packages("some-others", NEWEST, {"newest": "some_others:Newest"}, version="3")
    with pytest.raises(
        UsageError, match="'newest' is in several packages, .*; uninstall all but one"
    ) as refused:
        policies.load("newest")
    assert {"some-policies 1.0", "some-others 3"} <= set(str(refused.value).replace(";", ",").split(", "))


def test_start_does_not_search_for_installed_policies():
    code = (
        "import sys, kvtool.cli\n"
        "from kvtool import policies\n"
        "policies.fit('h2o', 64)\n"
        "assert not policies.installed.cache_info().currsize\n"
    )
    assert forked.run_python("-c", code).returncode == 0


def test_installed_policies_run_and_non_evicting_ones_act_like_full(packages, tiny_model, tmp_path):
    entries = {"newest": "some_policies:Newest", "all": "some_policies:All"}
    packages("some-policies", NEWEST, entries)
    path = tmp_path / "text.txt"
    path.write_text("word " * 100)
    model = ("-m", tiny_model(), "-t", "1")

    def measured(*policy):
        return json.loads(kvtool("perplexity", path, "--json", *model, "--policy", *policy).stdout)

    evicting, local = (measured(name, "--budget", 48) for name in ("newest", "local"))
    assert evicting["perplexity"] == local["perplexity"]
    everything, full = measured("all"), measured("full")
    assert (everything["perplexity"], everything["budget"]) == (full["perplexity"], full["budget"])
    refused = kvtool("perplexity", path, "--policy", "all", "--budget", 48, *model)
    assert (refused.returncode, refused.stderr) == (
        2,
        "kvtool: `all` keeps every token and takes no --budget; --ctx-size sets its cache size\n",
    )


def test_session_continues_only_with_the_same_package(packages, tiny_model, tmp_path):
    packages("some-policies", NEWEST, {"newest": "some_policies:Newest"})
    path = tmp_path / "chat.kv"
    model = tiny_model(chat_template=CHATML)
    options = ("-m", model, "-t", "1", "--policy", "newest", "--budget", 64)
    command = ("chat", *options, "-n", 4, "--session", path)
    done = kvtool(*command, stdin="hello\n")
    assert done.returncode == 0, done.stderr
    assert session.read_meta(path)["fixed"]["policy_package"] == "some-policies"
    (tmp_path / "some_policies-1.0.dist-info" / "METADATA").write_text("Name: some-others\nVersion: 1\n")
    done = kvtool(*command, stdin="hello\n")
    assert done.returncode == 9
    assert "started with a policy of the package some-policies; it cannot" in done.stderr
    assert "continue with a policy of the package some-others" in done.stderr
