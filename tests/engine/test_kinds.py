"""Every kind of model scores like the definition, and continues bit-identically from a session."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import tests.tiny_kinds as tiny_kinds
from kvtool import policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.template import Template
from kvtool.chats.writer import Writer
from kvtool.errors import KvtoolError
from kvtool.llama.sampler import Sampler
from kvtool.measure import perplexity
from tests.engine.exact_engines import (
    LOGIT_TOLERANCE,
    TOLERANCE,
    assert_continues_as_defined,
    distinct_tokens,
    open_engine,
    random_tokens,
)
from tests.engine.test_exactness import reference, score_errors, twin
from tests.reference import models, transformer

N_CTX_TRAIN = 130
KINDS = {
    "smollm3": {},
    "maincoder": {},
    "qwen2vl": {},
    "gpt_oss": {},
    "lfm2": {},
    "deepseek2": {},
    "deepseek2-no-q-rank": {"q_rank": 0},
    "deepseek32": {},
    "gemma3": {"window": 16},
    "gemma4": {},
    "refact": {},
    "gpt2": {},
}
"""Kinds of models that tests/tiny_kinds.py writes, with the options of each writer."""

SIMILAR = ("smollm3", "maincoder", "qwen2vl", "deepseek2-no-q-rank")
"""Kinds whose layers differ little from llama's or another kind's. Only some tests run with them."""

every_kind = pytest.mark.parametrize("path", KINDS, indirect=True, scope="module")


@pytest.fixture(scope="module", params=[name for name in KINDS if name not in SIMILAR])
def path(request, tmp_path_factory):
    name = request.param
    path = tmp_path_factory.mktemp(name) / f"{name}.gguf"
    tiny_kinds.write(name.split("-")[0], path, n_ctx_train=N_CTX_TRAIN, **KINDS[name])
    return path


@pytest.fixture(scope="module")
def model(path):
    return models.load(path)


@every_kind
@pytest.mark.share(2, "name")
@pytest.mark.parametrize("name", ["full", "h2o", "tova", "buzz", "streamingllm"])
def test_scores_like_the_definition(path, model, name):
    # at the trained length, 130, gaps are closed, and the stored keys are rotated
    tokens = random_tokens(120 if name == "full" else 300)
    policy = policies.fit(name, 128, None) if name == "full" else policies.fit(name, 48, 16)
    expected = reference(model, tokens, policy, name, positions="auto")
    with open_engine(path, policy, positions="auto") as engine:
        actual = perplexity.stream(engine, tokens)
        assert (engine.n_evicted > 0) == (engine.n_restart > 0) == (name != "full")
    assert np.abs(actual - expected.nll).max() < TOLERANCE


OTHERS = [
    ("weightedkv", []),
    ("keydiff", []),
    ("roco", ["keep_std=6", "window=3"]),
    ("scissorhands", []),
    ("expected", ["queries=30"]),
    ("rkv", []),
    ("buzz", ["logn=true"]),
    ("corm", ["history=8", "window=2", "t=cells"]),
    ("recall", []),
    ("recall", ["search=all"]),
]


@pytest.mark.share(2, "name", "options")
@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
def test_other_policies_score_like_the_definition(path, model, name, options):
    refused = {"weightedkv": "deepseek", "recall": "refact"}
    if path.stem.startswith(refused.get(name, "none")):
        pytest.skip("refused")
    tokens = distinct_tokens(160)
    policy = policies.fit(name, 96 if name == "corm" else 48, 16, options)
    has_values = not path.stem.startswith("deepseek")
    # the distance of archived tokens is limited to half of the context. If tokens are clustered, the limit
    # applies to whole blocks of 256 tokens
    n_block = 256 if name == "recall" and not options else None
    settings = {"positions": "auto", "n_block": n_block, "archive_type": "f32"}
    assert (
        score_errors(path, tokens, policy, name, has_values=has_values, model=model, **settings).max()
        < TOLERANCE
    )


def test_ragged_rows_with_flash_attention_nearly_match_the_definition(path, model):
    policy = policies.fit("corm", 96, 16, ["history=8", "window=2", "t=cells"])
    options = {"positions": "auto", "flash": "on", "type_k": "f16", "type_v": "f16"}
    errors = score_errors(path, distinct_tokens(160), policy, "corm", model=model, **options)
    # only the median is compared: near a tie, a row may keep another token, which changes all later scores
    assert np.median(errors) < 0.02


@pytest.mark.share(1, "name")
@pytest.mark.parametrize("name", ["h2o", "weightedkv"])
def test_edits_on_the_device_score_like_the_definition(edits_on_device, path, model, name):
    if name == "weightedkv" and path.stem.startswith("deepseek"):
        pytest.skip("refused")
    policy, options = policies.fit(name, 48, 16), {"positions": "auto", "restarts": True}
    assert score_errors(path, distinct_tokens(160), policy, name, model=model, **options).max() < TOLERANCE


def test_rotation_of_quantized_keys_adds_little_error(path, model):
    policy, options = policies.fit("streamingllm", 48, 16), {"positions": "auto", "restarts": True}
    quantized = {"flash": "on", "type_k": "q8_0", "type_v": "q8_0"}
    errors = score_errors(
        path, random_tokens(300), policy, "streamingllm", model=model, **options, **quantized
    )
    # the rotation that closes gaps, at 130, adds little to the error of q8_0
    assert 1e-3 < np.median(errors[130:]) < 3 * np.median(errors[:130])


@pytest.mark.share(1, "n")
@pytest.mark.parametrize("n", [100, 300])
def test_a_prompt_read_whole_scores_like_the_definition(path, model, n):
    """With a trained length of 130, a prompt of 300 tokens has three segments.

    The state of layers without rows continues from one segment to the next.
    """
    tokens = random_tokens(n + 40) if n > 200 else distinct_tokens(n + 40)
    policy = policies.fit("h2o", 48, 16)
    keep, observe = twin("h2o", policy, N_CTX_TRAIN)
    streams = []
    for segment in np.array_split(tokens[:n], -(-n // N_CTX_TRAIN)):
        stream = transformer.Stream(model, positions="auto", observe=observe)
        stream.next = streams[-1].next if streams else 0
        expected = stream.decode(segment)[-1]
        streams.append(stream)
    if len(streams) > 1:
        transformer.join(streams, 48 - 16)
    evict = partial(stream.evict, keep, pinned=0, budget=48, slack=16)
    evict()
    # `join` sets in_cache, so the eviction above has closed all gaps between positions. Later evictions must
    # leave gaps
    stream.in_cache = False
    with open_engine(path, policy, prefill="whole") as engine:
        assert engine.read(tokens[:n]) == n
        assert np.abs(engine.context.logits()[-1] - expected).max() < LOGIT_TOLERANCE
        assert_continues_as_defined(engine, stream, tokens[n:], evict)


@every_kind
def test_restored_engine_continues_bit_for_bit(path):
    tokens, policy = random_tokens(200), policies.fit("h2o", 48, 16)
    with open_engine(path, policy) as engine:
        perplexity.stream(engine, tokens[:101])
        saved = {name: array.copy() for name, array in engine.save()}
        expected = perplexity.stream(engine, tokens[101:])
        assert engine.n_restart
    with open_engine(path, policy) as engine:
        # fill the cache with another text. restore() must replace it
        perplexity.stream(engine, tokens[20:60])
        engine.restore(saved)
        np.testing.assert_array_equal(perplexity.stream(engine, tokens[101:]), expected)


@pytest.mark.parametrize(
    ("arch", "shape", "policy", "budget", "reason"),
    [
        ("deepseek2", {}, "weightedkv", 48, r"\(MLA\)"),
        ("refact", {}, "recall", 48, r"\(ALiBi\)"),
        (
            "deepseek32",
            {"top_k": 300},
            "h2o",
            400,
            r"attends only to 300 cells that its index chooses.*--budget, --batch-size ",
        ),
    ],
)
def test_models_refuse_unsupported_policies_with_one_line(tiny_model, arch, shape, policy, budget, reason):
    path, policy = tiny_model(arch, **shape), policies.fit(policy, budget, 16)
    with pytest.raises(KvtoolError, match=rf"^.*{reason}.*$") as error, open_engine(path, policy) as engine:
        engine.read(random_tokens(100))
    assert "\n" not in str(error.value)


def test_more_cells_than_an_index_chooses_are_refused(tiny_model):
    with open_engine(tiny_model("deepseek32", top_k=300), policies.fit("h2o", 200, 16)) as engine:
        perplexity.stream(engine, random_tokens(300))
        assert engine.n_evicted
        engine.cache.resize(np.full(2, 512))
        with pytest.raises(KvtoolError, match=r"300 cells, not 512"):
            engine.step(random_tokens(1))


def test_cache_bytes_include_the_keys_of_an_index(tiny_model):
    path, policy = tiny_model("deepseek32", n_index=128), policies.fit("full", 256, None)
    with open_engine(path, policy, type_k="f16", type_v="f16") as engine:
        layers = engine.model.layers
        assert layers.kinds == ["latent attention (MLA)", "an index"]
        assert layers.cell_bytes() == 2 * 2 * (128 + 128)
        assert engine.context.cache_bytes == 256 * layers.cell_bytes()


def test_undone_turn_restores_the_state_and_gets_the_same_reply_again(path):
    with open_engine(path, policies.fit("h2o", 64, 8), n_batch=32) as engine:
        template = Template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", "", "")
        talk = Conversation(Writer(engine, Sampler(engine.model, seed=1)), template, None)
        talk.undoable = True
        try:
            "".join(talk.reply("one two three", 40))
            before = {name: array.copy() for name, array in engine.save()}
            replies = []
            for _ in range(2):
                replies.append("".join(talk.reply("four five six", 60)))
                assert engine.n_evicted
                assert talk.undo()
                after = dict(engine.save())
                for name, array in before.items():
                    np.testing.assert_array_equal(after[name], array, err_msg=name)
            assert replies[0] == replies[1]
        finally:
            talk.close()
