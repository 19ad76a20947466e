"""If a client changes a stored chat, the server rewinds its cache to the first changed token and reads on."""

from __future__ import annotations

import json
import string
from contextlib import closing
from types import SimpleNamespace

import pytest

from kvtool.chats import session
from kvtool.chats.undo import TurnEnd, turn_label
from kvtool.llama.loaded.model import Model
from kvtool.serve.api import requests
from kvtool.serve.api.requests import Defaults
from tests import tiny
from tests.serve.http_requests import ask, message, open_connection
from tests.serve.in_process_server import serve_in_process
from tests.serve.killed_server import get_response
from tests.serve.killed_turns import SlotServer
from tests.serve.subprocess_server import start_server

pytestmark = pytest.mark.engine

SYSTEM = message("system", "Be kind. " * 4)
QUESTIONS = (
    "What is a tide, and who counts the waves?",
    "And a river that is long and slow?",
    "Why is it so?",
)
RECALL = ("--policy", "recall", "--budget", "96", "--temp", "0", "-o", "search=all", "--archive-type", "f16")

FULL = ("--policy", "full", "--temp", "0")


@pytest.fixture(scope="module", params=[RECALL, FULL], ids=["recall", "full"])
def options(request):
    return request.param


@pytest.fixture(scope="module")
def url(talker, options):
    with start_server(talker, *options) as server:
        yield server.url


def talked(url, **more):
    """Return the messages of a chat of three turns, and the number of its tokens after each turn."""
    messages, n_all = [SYSTEM], []
    for text in QUESTIONS:
        messages.append(message("user", text))
        answer = ask(url, messages, **more)
        messages.append(answer.reply)
        n_all.append(answer.n_all)
    stats = answer.stats
    assert stats["archived"] > 100 or stats["held"] == stats["tokens"]
    assert stats["held"] + stats["archived"] + stats["forgotten"] == stats["tokens"]
    return messages, n_all


def test_edited_request_reads_only_tokens_after_the_first_change(url):
    messages, _ = talked(url)
    before, text = messages[:3], messages[3]["content"]
    # Each letter is one token. The server reads the changed last letter, and the template's tokens after it.
    n_tail = ask(url, [*before, message("user", text[:-1] + "!")]).n_read
    assert 1 < n_tail < 12
    for n_same in (30, 10, 0):
        edited = text[:n_same] + "X" * 20
        assert ask(url, [*before, message("user", edited)]).n_read == n_tail - 1 + 20
    # if a request is repeated, only the prompt's last token is read
    assert ask(url, messages[:4]).n_read == 1
    assert ask(url, messages[:2]).n_read == 1


def test_edited_chat_gets_the_answer_of_a_fresh_server(url, talker, options):
    messages, _ = talked(url)
    edited = [*messages[:3], message("user", QUESTIONS[1][:20] + " that is deep?")]
    reply = ask(url, edited).reply
    assert ask(url, messages[:4]).reply == messages[4]
    with start_server(talker, *options) as fresh:
        assert ask(fresh.url, edited).reply == reply


def test_request_that_reuses_nothing_reads_all_its_tokens(url):
    messages, n_all = talked(url)
    second_answer = ask(url, messages[:4], cache_prompt=False)
    assert second_answer.n_cached == 0
    assert (second_answer.reply, second_answer.n_all) == (messages[4], n_all[1])
    assert ask(url, messages[:4]).n_read == 1


def test_short_chat_continues_after_another_chat(url):
    short, other = [message("user", "Name a river. " * 12)], [message("user", "A title, please.")]
    assert ask(url, short).n_read < 256
    assert ask(url, short).n_read == 1
    ask(url, other)
    assert ask(url, short).n_read == 1


@pytest.mark.parametrize("is_old", [False, True], ids=["", "of an earlier version"])
def test_chat_stored_by_another_server_can_be_rewound(talker, tmp_path, options, is_old):
    arguments = (*options, "--sessions", str(tmp_path))
    with start_server(talker, *arguments) as server:
        messages, _ = talked(server.url)
        # each turn replaces the previous turn in the folder
        files = sorted(path.suffix for path in tmp_path.glob("*.kv*"))
        assert files == [*[".archive"] * (options is RECALL), ".kv"]
        server.stop()
    if is_old:
        (path,) = tmp_path.glob("*.kv")
        meta, arrays = session.read(path)
        ends = [TurnEnd(*saved) for saved in meta["marks"]]
        turns = [(end.n_message, end.n_token, end.writer["recent"]) for end in ends]
        beginnings = [""] * (len(messages) + 1)
        for end in ends:
            beginnings[end.n_message] = end.digest
        meta |= {"marks": [], "turns": turns, "beginnings": beginnings}
        session.write(path, meta, arrays.items())
    with start_server(talker, *arguments) as server:
        answer = ask(server.url, messages[:4])
        assert (answer.reply, answer.n_read) == (messages[4], 1)
        assert ask(server.url, [*messages, message("user", "And?")]).n_read < 20


def test_stored_chat_can_be_undone_turn_by_turn(talker, tmp_path):
    messages, sizes = [SYSTEM], []
    with closing(Model(talker)) as model:
        server = SlotServer(model, "recall", tmp_path / "chats")
        for text in QUESTIONS:
            messages.append(message("user", text))
            reply, _, n = server.ask(messages)
            messages.append(message("assistant", reply))
            sizes.append(n)
        (path,) = (tmp_path / "chats").glob("*.kv")
        chat = SlotServer(model, "recall", tmp_path / "other").slot._resumer.conversation
        chat.resume(*session.read(path))
        for n in (2, 1):
            assert chat.undo() == turn_label(QUESTIONS[n])
            assert chat.messages == messages[: 2 * n + 1]
            assert chat.writer.engine.n_past + len(chat.writer.unread) == sizes[n - 1]
        assert chat.undo() is None


def test_chats_with_different_keys_share_their_first_tokens(url):
    messages, n_all = talked(url)
    answer = ask(url, messages[:2], prompt_cache_key="one")
    assert (answer.reply, answer.n_all, answer.n_read) == (messages[2], n_all[0], 1)
    # the first chat is still stored
    assert ask(url, [*messages, message("user", "And?")]).n_read < 20


def test_changed_system_prompt_is_read_from_the_first_difference(talker):
    with start_server(talker, *RECALL) as server:
        url = server.url
        for other in ("Be kind. Be kind. Be brief.", "Be kind!", "Be kind. " * 3 + "Be long.", None):
            talked(url)
            first = [message("system", other)] if other else []
            messages = [*first, message("user", QUESTIONS[0])]
            answer = ask(url, messages)
            assert len(QUESTIONS[0]) < answer.n_read < answer.n_prompt
            messages += [answer.reply, message("user", "x" * 200)]
            stats = ask(url, messages, kvtool={"share": 10**6}).stats
            # the system prompt is not pinned: only the policy's 4 sinks stay
            assert stats["share"]["held"].index(0) == 4


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Counts waves. " * 5, "parameters": {}}}
    for name in ("one", "two", "three")
]


def test_added_tool_is_read_from_its_first_token(url):
    messages = [SYSTEM, message("user", QUESTIONS[0])]
    n_prompt = ask(url, messages, tools=TOOLS[:2]).n_prompt
    more = ask(url, messages, tools=TOOLS)
    # the server reads the third tool, the messages and the reply header
    assert 0 < more.n_prompt - n_prompt < more.n_read < more.n_prompt - 300
    # the chat without the third tool is still stored
    assert ask(url, messages, tools=TOOLS[:2]).n_read == 1


def test_long_common_prefix_is_taken_from_any_stored_chat(talker, tmp_path):
    arguments = (*RECALL, "--budget", "640", "--sessions", str(tmp_path))
    systems = [message("system", "Be kind. " * 9 + last + " Be kind." * 40) for last in "AB"]
    with start_server(talker, *arguments) as server:
        for i, system in enumerate(systems):
            ask(server.url, [system, message("user", "Why?")], prompt_cache_key=str(i))
        server.stop()
    with start_server(talker, *arguments) as server:
        for key in ("2", "3"):
            for system in systems:
                answer = ask(server.url, [system, message("user", "Who?")], prompt_cache_key=key)
                # the stored question "Why?" shares the tokens "Wh" with "Who?", so the server reads
                # only "o?" and the reply header
                assert answer.n_read <= 8, key


def test_tokens_read_for_a_disconnected_client_are_not_read_again(talker, tmp_path):
    messages = [message("user", "Waves come and go. " * 40)]
    with closing(Model(talker)) as model:
        server = SlotServer(model, "recall", tmp_path)
        server.leave(messages, 256)
        assert 256 <= server.ask(messages)[1] < 512


def test_system_prompt_is_read_once_if_the_cache_cannot_be_rewound(tmp_path):
    tiny.write_gemma3(tmp_path / "m.gguf", chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=2048)
    with start_server(tmp_path / "m.gguf", *RECALL, "--checkpoints", "0") as server:
        system = message("system", "Be kind. " * 80)
        chats = [[system, message("user", text)] for text in ("Why?", "Who?", "How?")]
        n_read = [ask(server.url, chat).n_read for chat in chats]
        # the server stores a system prompt only up to its last full batch, which is 512 tokens here
        assert n_read[1:] == [n_read[0] - 512] * 2


def test_changed_chat_is_reread_if_earlier_tokens_were_forgotten(talker):
    with start_server(talker, *RECALL, "--archive", "40") as server:
        messages = [SYSTEM]
        for text in (*QUESTIONS, *QUESTIONS):
            messages.append(message("user", text))
            answer = ask(server.url, messages)
            messages.append(answer.reply)
        assert answer.stats["forgotten"] > 100
        assert ask(server.url, [*messages[:3], message("user", "Other.")]).n_cached == 0


PROMPT = "A tide is slow, and the moon is far. " * 12


def continued(server, prompt, **more):
    """Return (text, (number of tokens of the prompt, of cached tokens, of tokens of the text))."""
    body = {"prompt": prompt, "max_tokens": 6, **more}
    answer = server.ask("/v1/completions", body).json()
    assert "ignored" not in answer["kvtool"]
    usage = answer["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], (usage["prompt_tokens"], n_cached, usage["completion_tokens"])


def check_prompts(model, n_batch=1, **options):
    """Check how many tokens equal and longer prompts reuse. Return a longer prompt and its answer.

    n_batch: the server goes back to a multiple of this number of tokens.
    """
    with serve_in_process(model, **options) as server:
        slot = server.pool.slots[0]

        def n_shared(body):
            return slot.n_shared(SimpleNamespace(request=requests.check_text(body, Defaults()), prompt=None))

        text, (n, n_cached, n_written) = continued(server, PROMPT)
        assert n_cached == 0
        n_same = (n - 1) // n_batch * n_batch
        assert n_same > n / 2
        assert continued(server, PROMPT) == (text, (n, n_same, n_written))
        longer = [*slot.writer.tokens.tolist(), *slot.model.tokenize(" and it is deep").tolist()]
        remainder, counts = continued(server, longer)
        assert counts[:2] == (len(longer), n + n_written)
        # go back to the first prompt
        assert n_shared({"prompt": PROMPT}) == n_same
        assert continued(server, PROMPT) == (text, (n, n_same, n_written))
        assert continued(server, PROMPT, cache_prompt=False) == (text, (n, 0, n_written))
        # a prompt is read again if its tokens are scored
        assert continued(server, PROMPT, echo=True, logprobs=0)[1] == (n, 0, n_written)
        for more in ({"cache_prompt": False}, {"echo": True, "logprobs": 0}):
            assert n_shared({"prompt": PROMPT, **more}) == 0
        # an error is left to the answer
        assert n_shared({"prompt": ""}) == 0
    return longer, remainder


KEEPS_ALL = {
    "recall": {"policy": "recall", "budget": "96", "options": ["search=all"], "archive_type": "f16"},
    "full": {"policy": "full"},
}
FORGETS = {"policy": "h2o", "budget": "96", "checkpoints": "64MiB"}


@pytest.mark.parametrize("options", KEEPS_ALL.values(), ids=KEEPS_ALL)
def test_prompt_of_a_text_is_read_from_its_first_change(talker, options):
    longer, remainder = check_prompts(talker, **options)
    with serve_in_process(talker, **options) as server:
        assert continued(server, longer)[0] == remainder
        same, other = ([*server.pool.slots[0].model.tokenize(text).tolist()] for text in (PROMPT, "the sun"))
        changed = same[:-40] + other
        text, (n, _, n_written) = continued(server, changed)
        continued(server, same)
        assert continued(server, changed) == (text, (n, len(same) - 40, n_written))


def test_prompt_of_a_text_is_read_from_a_checkpoint_if_the_policy_evicts(talker):
    check_prompts(talker, n_batch=256, **FORGETS)
    with serve_in_process(talker, **FORGETS) as server:
        for prompt, n_cached in (
            (PROMPT * 3, 0),
            # the server makes a checkpoint every 1,024 tokens
            ((PROMPT * 3)[:-40] + "the sun", 1024),
            ((PROMPT * 2)[:-40] + "the sun", 0),
            # a short prompt gets no checkpoint
            (PROMPT[:99], 0),
            (PROMPT[:99], 0),
        ):
            assert continued(server, prompt)[1][1] == n_cached


def test_prompt_of_a_text_is_read_from_a_checkpoint_with_recurrent_layers(hybrid_talker):
    with serve_in_process(hybrid_talker, policy="full", checkpoints="64MiB") as server:
        text, (n, _, n_written) = continued(server, PROMPT[:40])
        assert continued(server, PROMPT[:40]) == (text, (n, n - 1, n_written))


@pytest.mark.parametrize("options", [KEEPS_ALL["recall"], FORGETS], ids=["recall", "h2o"])
def test_text_after_a_chat_pins_and_holds_nothing(talker, options):
    with serve_in_process(talker, **options) as server:
        slot = server.pool.slots[0]
        first = continued(server, PROMPT)[0]
        for chat in ([SYSTEM, message("user", "Hi.")], [message("user", PROMPT)]):
            server.chat(chat)
            assert continued(server, PROMPT)[0] == first
            assert (slot.engine.n_pinned, slot.engine.n_held) == (0, 0)
        # the tokens of a chat are reused unless some are pinned
        for before in ([], [SYSTEM]):
            server.chat([*before, message("user", PROMPT)])
            tokens = slot.writer.tokens.tolist()
            _, (_, n_cached, _) = continued(server, [*tokens, 70])
            assert n_cached == (0 if before and options is FORGETS else len(tokens))
            assert (slot.engine.n_pinned, slot.engine.n_held) == (0, 0)


PENALTY = {"repeat_penalty": 100, "repeat_last_n": 500}
EARLIER = "".join(f"a{letter}" for letter in string.ascii_letters)
"""Most tokens of the model are such pairs."""


def test_penalties_count_earlier_replies_and_the_prompt_of_a_completion(url):
    # only earlier tokens can change the first token of a reply
    def chat(text, role, **more):
        messages = [SYSTEM, message("user", "Hi."), message(role, text), message("user", "And?")]
        return ask(url, messages, max_tokens=1, **more).reply["content"]

    def completion(text, **more):
        with open_connection(url) as link:
            body = {"prompt": text, "max_tokens": 1} | more
            link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(get_response(link).read())["choices"][0]["text"]

    assert chat(EARLIER, "assistant", **PENALTY) != chat(EARLIER, "assistant")
    assert chat(EARLIER, "user", **PENALTY) == chat(EARLIER, "user")
    assert completion(EARLIER, **PENALTY) != completion(EARLIER)
