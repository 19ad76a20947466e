"""The option --chat-template of chat, generate, eval and serve."""

from __future__ import annotations

import json

import pytest

from kvtool.chats import session
from tests import tiny
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.serve.http_requests import message
from tests.serve.in_process_server import serve_in_process

_MEND = "correct the file, or leave out --chat-template\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Path of a small model without a chat template."""
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    tiny.write_llama(path, letters=True, n_ctx_train=4096)
    return path


@pytest.fixture
def template(tmp_path):
    """template(source): write a template to a file, and return the file's path."""

    def write(source, name="template.jinja"):
        (tmp_path / name).write_text(source)
        return tmp_path / name

    return write


@pytest.mark.parametrize("flag", ["--chat-template", "--chat-template-file"])
def test_template_of_a_file_lets_a_model_without_a_template_chat(bare, template, flag):
    words = ["-m", bare, "-n", 3, "-t", 1]
    path = template(tiny.CHAT_TEMPLATE)
    for command, stdin in ((["chat"], "Hello\n"), (["generate", "Hello", "--json"], "")):
        advice = "bare.gguf has no chat template; --chat-template FILE sets one, and kvtool generate"
        assert_one_line(run_kvtool(*command, *words, stdin=stdin), 3, advice)
        assert run_kvtool(*command, *words, flag, path, stdin=stdin).returncode == 0
    n = [
        json.loads(run_kvtool("generate", "Hello", "--json", *words, flag, of).stdout)["prompt_tokens"]
        for of in (path, template(tiny.CHAT_TEMPLATE.replace("[a]", "[a]!!!"), "other.jinja"))
    ]
    assert n[1] == n[0] + 3
    done = run_kvtool("generate", "Hello", "--raw", *words, flag, path)
    assert_one_line(done, 2, "--chat-template is for the chat template, which --raw leaves out")


@pytest.mark.parametrize(
    ("source", "exit_code", "words"),
    [
        ("{% for", 5, "template.jinja: the chat template fails ("),
        ("{{ messages | nonsense }}", 5, "template.jinja: the chat template fails ("),
        ("{{ raise_exception('no') }}", 5, "template.jinja: the chat template fails (no); " + _MEND),
        ("Hello", 5, "template.jinja: the chat template leaves replies out; " + _MEND),
        ("", 5, "template.jinja is empty"),
        (None, 5, "template.jinja: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_unusable_template_is_refused_when_it_is_read(
    bare, template, tmp_path, command, source, exit_code, words
):
    path = tmp_path / "template.jinja" if source is None else template(source)
    done = run_kvtool(command, "-m", bare, "-t", 1, "--chat-template", path, stdin="Hello\n")
    assert_one_line(done, exit_code, words)


def test_session_keeps_its_template_and_refuses_another(bare, template, tmp_path, monkeypatch):
    path, template_path = tmp_path / "talk.kv", template(tiny.CHAT_TEMPLATE)
    command = ["chat", "-m", bare, "-n", 3, "-t", 1, "--policy", "h2o", "--session", path]
    monkeypatch.chdir(tmp_path)
    assert run_kvtool(*command, "--chat-template", template_path.name, stdin="One\n").returncode == 0
    assert run_kvtool(*command, stdin="Two\n").returncode == 0
    assert session.read_meta(path)["options"]["chat_template"] == str(template_path)
    other = template(tiny.CHAT_TEMPLATE + "\n{# changed #}", "other.jinja")
    done = run_kvtool(*command, "--chat-template", other, stdin="Three\n")
    assert_one_line(done, 9, "leave out --chat-template to continue it, or read its text again")
    template_path.write_text(other.read_text())
    assert_one_line(
        run_kvtool(*command, stdin="Three\n"), 9, "talk.kv was started with --chat-template of SHA-256 "
    )


def test_server_renders_chats_with_the_template_of_a_file(bare, template):
    source = tiny.CHAT_TEMPLATE.replace("[a]", "[a]!!!")
    with serve_in_process(bare, policy="h2o", chat_template=str(template(source))) as server:
        assert server.ask("/props", method="GET").json()["chat_template"] == source
        server.chat([message("user", "Hello")])
    with serve_in_process(bare, policy="h2o") as server:
        answer = server.ask("/v1/chat/completions", {"messages": [message("user", "Hello")]})
        assert "serve with --chat-template FILE" in answer.json()["error"]["message"]
