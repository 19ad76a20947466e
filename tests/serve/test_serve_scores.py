"""kvtool serve scores a prompt if a request has `echo` and `logprobs`, as in lm-evaluation-harness."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import open_run
from kvtool.chats.logprobs import Offsets, logprobs
from kvtool.config.run import ScoreOptions
from kvtool.errors import ModelError
from kvtool.llama.cache.context import Context
from kvtool.llama.sampler import Sampler
from kvtool.measure import perplexity
from kvtool.serve.api.completions import server_event
from tests import tiny
from tests.serve.http_requests import message, pieces_of
from tests.serve.in_process_server import serve_in_process

TOKENS = [3 + byte for byte in b"A lamp is lit where a ship is late, and a bell rings for it. " * 4]
"""Tokens of a text, with the vocabulary of tests/tiny.py."""

NOT_FINITE = "the model's logits are not finite; the model file may be damaged"


SCORED = {"echo": True, "logprobs": 1, "max_tokens": 1}


def scored(server, prompt, **more):
    answer = server.ask("/v1/completions", SCORED | {"prompt": prompt} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("policy", ["full", "recall", "h2o", "snapkv", "corm"])
def test_scores_of_a_prompt_equal_those_of_perplexity(chat_model, policy):
    options = {"policy": policy} | ({} if policy == "full" else {"budget": "64"})
    with open_run(ScoreOptions(model=str(chat_model), threads=1, **options)) as opened:
        nll = perplexity.stream(opened.engine, np.array(TOKENS, np.int32))
    with serve_in_process(chat_model, **options) as server:
        # the second answer must not depend on the first request
        for _ in range(2):
            scores = scored(server, [TOKENS], max_tokens=0)["logprobs"]
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            np.testing.assert_allclose(scores["token_logprobs"][1:], -nll, atol=1e-4)
        after = scored(server, TOKENS, max_tokens=3)["logprobs"]
        assert after["token_logprobs"][: len(TOKENS)] == scores["token_logprobs"]
        assert len(after["tokens"]) == len(after["text_offset"]) == len(TOKENS) + 3


def test_top_logprobs_of_a_prompt_include_the_token_itself(chat_model):
    with serve_in_process(chat_model, policy="full") as server:
        scores = scored(server, TOKENS, logprobs=0)["logprobs"]
        assert scores["top_logprobs"][0] is None
        pairs = zip(scores["tokens"][1:], scores["token_logprobs"][1:], strict=True)
        assert scores["top_logprobs"][1:] == [{token: value} for token, value in pairs]


def test_prompt_as_text_or_tokens_has_the_same_scores_and_offsets(tmp_path):
    path = tmp_path / "bos.gguf"
    tiny.write_llama(path, add_bos=True)
    text = "Hé, a lamp."
    with serve_in_process(path, policy="full") as server:
        tokens = server.ask("/tokenize", {"content": text}).json()["tokens"]
        of_text, of_tokens = scored(server, text), scored(server, [1, *tokens])
        stream = server.ask("/v1/completions", SCORED | {"prompt": text, "stream": True}).text
    one, two = of_text["logprobs"], of_tokens["logprobs"]
    assert one["tokens"] == two["tokens"]
    assert one["token_logprobs"] == two["token_logprobs"]
    assert of_tokens["text"] == f"<s>{of_text['text']}"
    # the second text begins with "<s>", so its offsets are larger by 3
    assert two["text_offset"] == [0, *(at + 3 for at in one["text_offset"][1:])]
    for choice in (of_text, of_tokens):
        for token, at in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<s>")):
                assert choice["text"][at:].startswith(token)
    pieces = [piece["choices"][0]["logprobs"] or {} for piece in pieces_of(stream)]
    for name, whole in one.items():
        assert [each for piece in pieces for each in piece.get(name, [])] == whole


def test_tokens_that_are_not_utf_8_are_listed_by_their_bytes(chat_model):
    with serve_in_process(chat_model, policy="full") as server:
        scores = scored(server, "A \u00e9", logprobs=20)["logprobs"]
    assert scores["tokens"][:4] == ["A", " ", r"bytes:\xc3", r"bytes:\xa9"]
    for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
        assert len({*top, token}) == len(top) >= 20
        assert sum(key.startswith("bytes:") for key in top) > 1


def test_end_token_is_listed_after_a_scored_prompt(chat_model):
    # clients that score a prompt drop the last entry of each list, so the lists must not end with a token of
    # the prompt
    with serve_in_process(chat_model, policy="full") as server:
        choice = scored(server, TOKENS[:9], logit_bias={"2": 100})
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == "A lamp is"
        assert choice["logprobs"]["tokens"][9:] == ["</s>"]
        assert len(choice["logprobs"]["text_offset"]) == 10


def test_prompts_that_cannot_be_scored_get_one_line(chat_model):
    wrong = {
        "logprobs must be in 0..20, got 21": {"logprobs": 21},
        "prompt must be one text: kvtool answers one prompt per request": {"prompt": [[1], [2]]},
        "prompt must have at least one token": {"prompt": []},
        "prompt must have tokens in 0..": {"prompt": [-1]},
        "the request exceeds the available context size: 512 tokens in a context of 512": {
            "prompt": [70] * 512
        },
    }
    with serve_in_process(chat_model, policy="full") as server:
        for words, fields in wrong.items():
            answer = server.ask("/v1/completions", SCORED | {"prompt": "A lamp"} | fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(words)
            assert answer.json()["error"]["message"].isprintable()


def test_logits_that_are_not_finite_give_status_500(chat_model, monkeypatch):
    def broken(*arguments):
        raise ModelError(NOT_FINITE)

    scores = {"prompt": TOKENS, "echo": True, "logprobs": 1, "max_tokens": 0}
    chat = {"messages": [message("user", "Hi.")], "max_tokens": 2}
    with serve_in_process(chat_model, policy="full") as server:
        nan = np.full((len(TOKENS), server.pool.slots[0].model.n_vocab), np.nan, np.float32)
        monkeypatch.setattr(Context, "logits", lambda context: nan)
        monkeypatch.setattr(Sampler, "sample", broken)
        for path, body in (("completions", scores), ("chat/completions", chat)):
            answer = server.ask(f"/v1/{path}", body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["message"]) == (500, "server_error", NOT_FINITE)
            assert NOT_FINITE in server.ask(f"/v1/{path}", body | {"stream": True}).text
        with pytest.raises(ModelError, match=NOT_FINITE):
            logprobs(server.pool.slots[0].model, np.array([1, np.nan, 2], np.float32), 0, 2)


def test_json_has_no_infinity(model):
    logits = np.full(model.n_vocab, -np.inf, np.float32)
    logits[5] = 1
    record = logprobs(model, logits, 6, 2)
    assert (record["logprob"], record["top_logprobs"][0]["logprob"]) == (-9999, 0)
    for number in (float("nan"), -float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            server_event("x", number=number)


def test_offsets_count_characters_that_are_split_between_pieces():
    offsets = Offsets(-2)
    pieces = [b"a b", "é".encode()[:1], "é".encode()[1:], b"c"]
    assert [offsets.next(piece) for piece in pieces] == [0, 1, 1, 2]
