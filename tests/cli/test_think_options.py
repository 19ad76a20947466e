"""The option --think and the command /think, tested with typed input."""

from __future__ import annotations

import json
import re

import pytest

from kvtool.chats import session
from kvtool.chats.effort import LEVELS, OFF, ON
from kvtool.config.generation import EFFORTS
from tests import tiny
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import terminals

EMPTY = "<think></think>"

SWITCHED = tiny.CHAT_TEMPLATE.replace(
    "[a]{% endif", "[a]{% if enable_thinking is false %}" + EMPTY + "{% endif %}{% endif"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}[s]I am made up.[e]{% endif %}"
    + tiny.CHAT_TEMPLATE.replace("{% for", "effort {{ reasoning_effort or 'high' }}.{% for", 1).replace(
        "[a]", "[a]<think>"
    )
)

OPENS = tiny.CHAT_TEMPLATE.replace("[a]", "[a]<think>")
COUNTS = "{{ thinking_budget or 'any' }} tokens." + OPENS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(source): return the path of a small model with this chat template."""
    folder, paths = tmp_path_factory.mktemp("thinkers"), {}

    def model(source):
        if source not in paths:
            paths[source] = folder / f"thinker{len(paths)}.gguf"
            tiny.write_llama(paths[source], letters=True, chat_template=source, n_ctx_train=4096)
        return paths[source]

    return model


def n_prompt(model, *options, **kwargs):
    done = run_kvtool("generate", "Hello", "-m", model, "-n", 1, "-t", 1, "--json", *options, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["prompt_tokens"], done.stderr


def test_think_option_accepts_every_effort():
    assert {*EFFORTS} == {ON, OFF, *LEVELS}


def test_an_effort_reaches_the_prompt_of_generate(models):
    n, _ = n_prompt(models(SWITCHED))
    assert n_prompt(models(SWITCHED), "--think", "off")[0] == n + len(EMPTY)
    assert n_prompt(models(SWITCHED), "--think", "None")[0] == n + len(EMPTY)
    assert n_prompt(models(SWITCHED), "--think", "on")[0] == n


def test_unsupported_effort_is_refused_if_typed_and_reported_if_set(models):
    done = run_kvtool("generate", "Hello", "-m", models(SWITCHED), "--think", "low", "-n", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvtool: think low: the model's chat template takes off and on\n"
    n, stderr = n_prompt(models(SWITCHED), env={"KVTOOL_THINK": "low"})
    assert "think low: the model's chat template takes off and on; it is left out\n" in stderr
    assert n == n_prompt(models(SWITCHED))[0]
    done = run_kvtool("generate", "Hello", "-m", models(SWITCHED), "--think", "deep")
    assert (done.returncode, "--think must be one of on, off," in done.stderr) == (2, True)
    done = run_kvtool("generate", "Hello", "-m", models(SWITCHED), "--think", "off", "--raw")
    assert (done.returncode, "--raw leaves out" in done.stderr) == (2, True)


def test_a_session_keeps_its_effort(models, tmp_path):
    path, model = tmp_path / "talk.kv", models(SWITCHED)
    command = ["chat", "-m", model, "-n", 4, "-t", 1, "--policy", "h2o", "--session", path]

    def effort():
        meta = session.read(path)[0]
        assert meta["options"]["think"] == meta["effort"]
        return meta["effort"]

    assert run_kvtool(*command, "--think", "off", stdin="One\n").returncode == 0
    assert effort() == "off"
    assert run_kvtool(*command, stdin="Two\n").returncode == 0
    assert effort() == "off"
    assert run_kvtool(*command, "--think", "on", stdin="Three\n").returncode == 0
    assert effort() == "on"
    done = run_kvtool(*command, "--think", "low", stdin="Four\n")
    assert (done.returncode, done.stderr.count("takes off and on")) == (2, 1)


def test_think_budget_closes_the_thought_after_n_tokens(models):
    command = ["generate", "Hello", "-m", models(OPENS), "-t", 1, "-n", 40, "--temp", 0]
    command += ["--json", "--logprobs", 0]
    for n in (0, 7):
        done = run_kvtool(*command, "--think-budget", n)
        tokens = [token["token"] for token in json.loads(done.stdout)["logprobs"]["content"]]
        assert "</think>" not in "".join(tokens[:n])
        assert "".join(tokens[n:]).startswith("</think>")
        assert len(tokens) == 40
    # without a limit the thought never ends
    assert "</think>" not in json.loads(run_kvtool(*command, "--think-budget", -1).stdout)["text"]
    done = run_kvtool(*command, "--think-budget", 7, "--raw")
    assert (done.returncode, "--think-budget is for the chat template" in done.stderr) == (2, True)


@pytest.fixture(scope="module")
def said(models):
    """said(command, *options): return what a model that thinks for 3 tokens writes to stdout."""

    def run(command, *options, stdin="Hello\n"):
        how = ["-m", models(OPENS), "-t", 1, "-n", 40, "--temp", 0, "--think-budget", 3, "--policy", "h2o"]
        done = run_kvtool(command, *how, *options, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_stdout_has_both_tags_of_a_thought_or_only_the_answer(said, command):
    whole = said(command)
    assert re.match(r"<think>(?!</think>).+</think>.", whole)
    assert said(command, "--hide-thinking") == whole.partition("</think>")[2].lstrip("\n")


def test_json_separates_the_thought_from_the_answer(said):
    thought, _, answer = said("generate").removeprefix("<think>").partition("</think>")
    record = json.loads(said("generate", "--json"))
    assert (record["reasoning_content"], record["text"]) == (thought, answer.strip("\n"))
    record = json.loads(said("generate", "--json", "--hide-thinking"))
    assert ("reasoning_content" in record, record["text"]) == (False, answer.strip("\n"))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_with_a_schema_or_a_grammar_comes_without_the_thought(said, command):
    assert said(command, "--json-schema", '{"const": "yes"}') == '"yes"\n'
    assert said(command, "--grammar", 'root ::= "yes"') == "yes\n"


def test_export_has_both_tags_of_a_thought(said, tmp_path):
    path = tmp_path / "talk.kv"
    whole = said("chat", "--session", path)
    assert whole.startswith("<think>")
    assert run_kvtool("session", "export", path).stdout == f"> Hello\n\n{whole}\n"


def test_replies_stay_visible_after_the_effort_has_changed(models, tmp_path):
    path = tmp_path / "talk.kv"
    opens = SWITCHED.replace("[a]{%", "[a]<think>{%").replace(EMPTY, "</think>")
    with terminals(models(opens), "-n", 12, "--policy", "h2o", "--session", path) as start:
        chat = start("--think", "off")
        chat.say("Hello")
        reply = session.read(path)[0]["messages"][-1]["content"]
        assert reply.strip()
        last = f"> Hello\n\n{reply.strip()}"
        assert chat.say("/show last") == last
        chat.say("/think on")
        assert chat.say("/show last") == last
        chat.leave()
        assert last in start("--think", "on").text


def test_think_budget_reaches_a_template_that_reads_it(models):
    n, _ = n_prompt(models(COUNTS), "--think-budget", "64")
    assert n_prompt(models(COUNTS), "--think-budget", "6464")[0] == n + 2
    assert n_prompt(models(OPENS))[0] == n_prompt(models(OPENS), "--think-budget", "64")[0]


def test_session_keeps_its_thinking_budget(models, tmp_path):
    path, command = tmp_path / "talk.kv", ["chat", "-m", models(OPENS), "-n", 40, "-t", 1, "--policy", "h2o"]
    assert run_kvtool(*command, "--session", path, "--think-budget", 3, stdin="One\n").returncode == 0
    assert run_kvtool(*command, "--session", path, stdin="Two\n").returncode == 0
    meta = session.read(path)[0]
    assert meta["options"]["think_budget"] == 3
    replies = [message["content"] for message in meta["messages"] if message["role"] == "assistant"]
    assert all("</think>" in reply for reply in replies)


def test_session_is_reread_only_if_the_thinking_budget_in_its_prompt_changes(models, tmp_path):
    path, command = tmp_path / "talk.kv", ["chat", "-m", models(COUNTS), "-n", 4, "-t", 1, "--policy", "h2o"]
    for n_mark, options in ((1, ["--think-budget", 3]), (2, []), (1, ["--think-budget", 4]), (2, [])):
        assert run_kvtool(*command, "--session", path, *options, stdin="Hello\n").returncode == 0
        # turns from before a reread cannot be undone, so they have no marks
        assert len(session.read(path)[0]["marks"]) == n_mark


def test_think_in_a_chat_shows_and_changes_the_effort(models, tmp_path):
    efforts = "the model's chat template takes on, low, medium and high"
    with terminals(models(DEFAULT_SYSTEM), "-n", 4, "--policy", "h2o", "--budget", 128) as start:
        chat = start()
        assert chat.say("/think") == f"think  (the model's own); {efforts}"
        assert chat.say("/think low") == f"think  low; {efforts}"
        assert chat.say("/set think") == f"think  low; {efforts}"
        assert chat.say("/think deep").startswith("/think must be one of on, off, ")
        assert chat.say("/think off") == "think off: the model's chat template cannot switch thinking off"
        chat.say("Hello")
        reread_note = "the next turn first reads the chat again, because its text has changed"
        assert chat.say("/set think HIGH") == f"{reread_note}\nthink  high; {efforts}"
        chat.say("Hello again")
        assert "effort high." in chat.say("/cells 200")
        chat.say("/undo")
        assert "took back /think HIGH" in chat.say("/undo")
        assert chat.say("/think") == f"think  low; {efforts}"
        assert chat.say("/set think_budget 5") == "think_budget  5"
        chat.say("/set n 40")
        assert "thought for" in chat.say("Hello again")
        assert len(chat.say("/show thought")) <= 5 * len("aB")
        assert chat.say("/set think_budget -1") == "think_budget  no limit"
        assert chat.say("/think default").endswith(f"think  (the model's own); {efforts}")
        # the test has set no system prompt, and the model's template has its own
        line = "none was given; the model's chat template brings its own, which may be evicted"
        assert chat.say("/show system") == chat.say("/system") == line
        chat.say("/system Be brief.")
        assert chat.say("/show system") == "Be brief."


def test_load_takes_effort_and_budget_of_the_session_and_says_so(models, tmp_path):
    path = tmp_path / "talk.kv"
    with terminals(models(COUNTS), "-n", 4, "--policy", "h2o", "--budget", 128) as start:
        chat = start()
        chat.say("/set think_budget 5")
        chat.say("Hello")
        chat.say(f"/save {path}")
        assert "think_budget" not in chat.say(f"/load {path}")
        chat.say("/reset")
        chat.say("/set think_budget 7")
        assert "\nthink_budget  5\n\n> Hello" in chat.say(f"/load {path}")
        assert chat.say("/set think_budget") == "think_budget  5"
        # the loaded turn, and the load
        chat.say("/undo 2")
        assert chat.say("/set think_budget") == "think_budget  7"
