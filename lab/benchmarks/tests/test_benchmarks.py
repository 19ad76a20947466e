"""Each benchmark starts and prints its purpose. The random model runs."""

from __future__ import annotations

import json
import lzma
import re
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import perplexity
from lab.benchmarks import tools
from lab.benchmarks.common import mcnemar
from tests.engine.exact_engines import open_engine

FOLDER = Path(__file__).parents[1]
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_of_a_benchmark_prints_its_purpose(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGPIPE) == before
    assert path.read_text().split('"""')[1].split("\n")[0] in capsys.readouterr().out


READ = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"type": ["integer", "null"]},
        "mode": {"enum": ["text", "lines"]},
        "parts": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "number"}]}},
    },
    "required": ["path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"path": "a.py"}, True),
        ({"path": "a.py", "limit": 5, "mode": "text", "parts": ["x", 1.5]}, True),
        ({"path": "a.py", "limit": None}, True),
        ({"limit": 5}, False),
        ({"path": 5}, False),
        ({"path": "a.py", "limit": 1.5}, False),
        ({"path": "a.py", "limit": True}, False),
        ({"path": "a.py", "mode": "all"}, False),
        ({"path": "a.py", "parts": [None]}, False),
        ({"path": "a.py", "other": 1}, False),
        (["a.py"], False),
    ],
)
def test_a_call_is_valid_if_its_arguments_fit_the_schema(arguments, fits):
    assert tools.fits(arguments, READ) is fits
    row = {"kind": "read", "needs": ["b.py"], "name": "read", "arguments": json.dumps(arguments)}
    assert tools.score(row, {"read": READ}) == {"valid": fits, "right": False}
    assert not tools.score(row, {"write": READ})["valid"]
    assert not tools.score(row | {"arguments": '{"path": "a'}, {"read": READ})["valid"]
    assert not tools.score(row | {"name": None, "arguments": None}, {"read": READ})["valid"]


@pytest.mark.parametrize(
    ("kind", "needs", "name", "arguments", "right"),
    [
        ("read", ["src/a.py"], "read_file", {"path": "/home/dev/src/a.py"}, True),
        ("read", ["src/a.py"], "read_files", {"files": [{"path": "src/a.py"}]}, True),
        ("read", ["src/a.py"], "read_file", {"path": "/home/dev/a.py"}, False),
        ("read", ["src/a.py"], "bash", {"command": "cat src/a.py"}, True),
        ("read", ["src/a.py"], "bash", {"command": "python src/a.py"}, False),
        ("read", ["src/a.py"], "write_file", {"path": "src/a.py"}, False),
        ("list", ["src/api"], "glob", {"pattern": "src/api/**"}, True),
        ("list", ["src/api"], "read_file", {"path": "src/api"}, False),
        ("search", ["TODO"], "exec_command", {"cmd": "rg TODO ."}, True),
        ("search", ["TODO"], "exec_command", {"cmd": "echo TODO"}, False),
        ("run", ["make docs"], "run_commands", {"commands": ["make docs"]}, True),
        ("run", ["make docs"], "grep", {"pattern": "make docs"}, False),
        ("write", ["a.md", "port: 80"], "write", {"filePath": "/x/a.md", "content": "port: 80\n"}, True),
        ("write", ["a.md", "port: 80"], "write", {"filePath": "/x/a.md", "content": ""}, False),
        ("write", ["a.md", "port: 80"], "bash", {"command": "echo 'port: 80' > a.md"}, True),
        ("write", ["a.md", "port: 80"], "bash", {"command": "grep 'port: 80' a.md"}, False),
    ],
)
def test_a_call_is_right_if_it_does_what_was_asked_for(kind, needs, name, arguments, right):
    assert tools.is_right(kind, needs, name, arguments) is right


def test_requests_depend_only_on_the_seed_and_are_distinct():
    requests = tools.make_requests(50, seed=1)
    assert requests == tools.make_requests(50, seed=1) != tools.make_requests(50, seed=2)
    assert requests[:25] == tools.make_requests(25, seed=1)
    assert len({each["text"] for each in requests}) == 50
    assert all(need in each["text"] for each in requests for need in each["needs"])
    assert {each["kind"] for each in requests} == set(tools.TASKS)


def test_recorded_agents_have_a_shell_tool_and_send_the_request():
    with lzma.open(tools.REQUESTS, "rt", encoding="utf-8") as lines:
        agents = [json.loads(line) for line in lines]
    assert len({each["client"] for each in agents}) == 4
    for each in agents:
        text = json.dumps(each)
        # the records must not say anything about the machine that made them
        assert not [word for word in ("/root/", "node_modules", "127.0.0.1") if word in text]
        assert set(re.findall(r"/home/(\w+)", text)) <= {"dev", "user"}
        body = each["body"]
        names = {tool.get("function", tool).get("name") for tool in body["tools"]}
        assert names & tools.SHELLS
        is_response = each["path"] == "/v1/responses"
        sent = tools.body_of(each | {"is_response": is_response}, "Read a.py.", "required", 9)
        messages = sent["input" if is_response else "messages"]
        assert messages[-1]["role"] == "user"
        assert "Read a.py." in json.dumps(messages[-1])
        assert messages[:-1] == body["input" if is_response else "messages"][:-1]
        assert sent["tools"] == body["tools"]


def test_answers_of_chat_completions_and_responses_are_read():
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens": 3}
    calls = [{"function": {"name": "read", "arguments": '{"path": "a"}'}}, {"function": {"name": "no"}}]
    chat = {"choices": [{"message": {"content": None, "tool_calls": calls}}], "usage": usage}
    answer = tools.answer_of(chat | {"kvtool": {"forgotten": 2}})
    assert answer == {
        "name": "read", "arguments": '{"path": "a"}', "calls": 2, "said": "",
        "prompt": 9, "cached": 4, "written": 3, "forgotten": 2,
    }  # fmt: skip
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}
    call = {"type": "function_call", "namespace": "team", "name": "wait", "arguments": "{}"}
    response = {"output": [call], "usage": usage, "kvtool": {"forgotten": 0}}
    assert tools.answer_of(response)["name"] == "team__wait"
    text = {"type": "message", "content": [{"type": "output_text", "text": "No."}]}
    answer = tools.answer_of(response | {"output": [text]})
    assert (answer["name"], answer["calls"], answer["said"]) == (None, 0, "No.")


def test_table_counts_only_requests_answered_under_all_settings():
    def row(policy, text, valid, right):
        return {"agent": "A", "policy": policy, "text": text, "prompt": 7, "valid": valid, "right": right}

    rows = [row("full", each, True, each != "d") for each in "abcde"]
    rows += [row("h2o@8", "a", True, True), row("h2o@8", "b", True, False), row("h2o@8", "c", False, False)]
    rows += [row("h2o@8", "d", True, True), row("other", "e", True, True)]
    table = tools.table_of(rows, ["full", "h2o@8"], "")
    columns = [list(column.cells) for column in table.columns]
    assert columns == [
        ["A", "all", "right, against the first"],
        ["7", "", ""],
        ["4", "4", ""],
        ["4 3", "4 3", ""],
        ["3 2", "3 2", "-2 +1, p 1"],
    ]


def test_budget_with_plus_is_added_to_the_pinned_tokens():
    arguments = [
        tools.Kvtool(None, 0, policy, 5000).policy[1:] for policy in ("full", "recall@1024", "h2o@+1024")
    ]
    assert arguments == [["full"], ["recall", "--budget", "1024"], ["h2o", "--budget", "6024"]]


def test_mcnemar_gives_the_exact_p_value():
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    # the p value is the probability that 9 or more of 10 coin throws are equal: 22 of 1,024 cases
    assert mcnemar(9, 1) == mcnemar(1, 9) == pytest.approx(22 / 1024)


def test_random_model_has_the_nll_of_random_logits(monkeypatch, tmp_path, smollm2):
    path = tmp_path / "random.gguf"
    shape = {"layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 32, "ff": 64, "n-ctx": 512}
    given = [part for name, size in shape.items() for part in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", ["random_model.py", str(path), "-m", str(smollm2), *given])
    runpy.run_path(str(FOLDER / "random_model.py"), run_name="__main__")
    with open_engine(path, policies.fit("h2o", 32)) as engine:
        tokens = engine.model.tokenize(Path(__file__).read_text())[:400]
        nll = perplexity.stream(engine, tokens)
        assert engine.model.n_vocab == 49152
    # The random model's logits have a standard deviation of 1. Therefore its mean NLL is half a nat above the
    # NLL of a model for which all tokens are equally likely.
    assert np.mean(nll) == pytest.approx(np.log(49152) + 0.5, abs=0.3)
