"""Requests of coding agents to a model that thinks, replayed against kvtool serve in this process.

tests/data/thinking_clients.jsonl has the recorded requests of each agent. As in the recording, the model
answers twice with a thought and a call, then with a thought and a text. The requests are shortened. They have
the placeholders of tests/serve/test_serve_clients.py, and three more: THOUGHT and SIGNATURE are parts of an
answer's thought, and STRIPPED is a thought without blanks at its ends. The field `calls` of a line is the
name of the tool that the answer calls.
"""

from __future__ import annotations

import json
import re

import pytest

from kvtool.serve.tools.formats import HERMES
from tests.serve.in_process_server import serve_in_process
from tests.serve.slot_requests import DictatedSlot
from tests.serve.test_serve_clients import filled, read_chat, read_message, recorded

LOGS = recorded("thinking_clients.jsonl")

KEEPS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that opens a thought in the reply header, and shows the thoughts of all earlier replies."""


@pytest.fixture(scope="module")
def server(smol, tmp_path_factory):
    template = tmp_path_factory.mktemp("thinker") / "keeps.jinja"
    template.write_text(KEEPS)
    with serve_in_process(smol, budget="1024", chat_template=str(template)) as server:
        yield server


def test_all_recorded_agents_except_continue_send_thoughts_back():
    senders = {client for client in LOGS if re.search('"(THOUGHT|STRIPPED) ', json.dumps(LOGS[client]))}
    assert LOGS.keys() - senders == {"continue 1.5.47"}


def arguments_for(body, name, n):
    """Return the n-th arguments for the tool `name` of a request. The required ones are strings or lists."""
    functions = [tool.get("function", tool) for tool in body.get("tools", [])]
    schemas = [each.get("parameters") or each["input_schema"] for each in functions if each["name"] == name]
    return {
        key: [] if schema["properties"][key]["type"] == "array" else f"{n}"
        for schema in schemas
        for key in schema.get("required", ())
    }


@pytest.mark.parametrize("client", LOGS)
def test_agents_get_separate_thoughts_and_thoughts_sent_back_are_read(server, client):
    model, answers = DictatedSlot(server.pool.slots[0], server.site.defaults), []
    for n, line in enumerate(LOGS[client]):
        body, name = filled(line["body"], answers), line["calls"]
        thought, text, call = (
            f"This is thought {n}.",
            "" if name else f"Answer {n}.",
            (name, arguments_for(body, name, n)),
        )
        model.dictated = [f"{thought}\n</think>\n\n{HERMES.written([call]) if name else text}"]
        sent = server.ask(line["path"], body, headers=line["headers"])
        assert sent.status_code == 200, sent.text
        assert '"ignored"' not in sent.text
        answer = (read_message if line["path"].startswith("/v1/messages") else read_chat)(sent.text, body)
        assert (answer.thought.strip(), answer.text) == (thought, text)
        assert json.loads(answer.call[1]) == call[1] if name else answer.call is None
        answers.append(answer)
        sent_back = json.dumps(body["messages"])
        for earlier in (f"This is thought {i}." for i in range(n)):
            assert model.prompt.count(earlier) == (earlier in sent_back)
        if line["follows"] is not None:
            before = answers[line["follows"]]
            least = before.n_all if before.thought.strip() in sent_back else before.n_prompt
            assert answer.n_cached >= least
