"""LoRA adapters: a model with adapters computes the same as a model with the adapters in its weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import ModelError, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.loaded.adapters import Adapter, adapter_texts, identities
from kvtool.llama.loaded.model import Model
from kvtool.models.download import sha256
from tests import tiny
from tests.engine.exact_engines import LOGIT_TOLERANCE, random_tokens
from tests.engine.test_joint import Counting, run_streams

SCALES = 1.0, -0.5


@pytest.fixture(scope="module")
def merged(tiny_model, tmp_path_factory):
    """Return (model, two adapters, model with both merged)."""
    folder, model = tmp_path_factory.mktemp("lora"), tiny_model(n_ctx_train=400)
    adapters = tuple(Adapter(folder / f"{i}.gguf", scale) for i, scale in enumerate(SCALES))
    for i, adapter in enumerate(adapters):
        tiny.write_lora(adapter.path, model, seed=i)
    tiny.merge(model, folder / "merged.gguf", adapters)
    return model, adapters, folder / "merged.gguf"


def logits(path, adapters=()):
    exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_output": 48}
    with (
        closing(Model(path, adapters=adapters)) as model,
        closing(Context(model, 256, 64, **exact)) as context,
    ):
        context.decode(random_tokens(48), 0, 48)
        return context.logits().copy()


def test_several_adapters_add_their_scaled_weights(merged):
    model, adapters, path = merged
    expected = logits(path)
    assert np.abs(logits(model, adapters) - expected).max() < LOGIT_TOLERANCE
    for fewer in ((), adapters[:1], adapters[1:], (adapters[0], adapters[1]._replace(scale=0.5))):
        assert np.abs(logits(model, fewer) - expected).max() > 0.1


@pytest.mark.parametrize("name", ["h2o", "recall"])
def test_all_streams_and_joint_steps_use_the_adapters(merged, name):
    model, adapters, path = merged
    policy, tokens, n_steps = policies.fit(name, 48), [random_tokens(120, seed=i) for i in range(2)], (40, 40)
    batchers = []

    def joint(lock):
        batchers.append(Counting(lock, 2))
        return batchers[0]

    with closing(Model(model, adapters=adapters)) as adapted, closing(Model(path)) as whole:
        together = run_streams(adapted, policy, tokens, n_steps, make_batcher=joint)
        single = run_streams(whole, policy, tokens, n_steps)
    assert batchers[0].sizes == [2] * 40
    for one, other in zip(together, single, strict=True):
        assert np.array_equal(one.pos, other.pos)
        assert np.abs(one.logits - other.logits).max() < LOGIT_TOLERANCE


def cut(path, model):
    tiny.write_lora(path, model)
    path.write_bytes(path.read_bytes()[:-100])


def only_half(path, model):
    """Write an adapter that lacks the second matrix of a pair."""
    tiny.write_lora(path, model)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight.lora_b", b"blk.1.ffn_up.weight.lora_c"))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path, model: None, "there is no adapter "),
        (lambda path, model: path.write_text("words"), " is not a GGUF file"),
        (lambda path, model: path.write_bytes(b""), " is empty; download it again"),
        (
            lambda path, model: path.write_bytes(model.read_bytes()),
            " is not a LoRA adapter; llama.cpp's convert",
        ),
        (lambda path, model: tiny.write_lora(path, model, arch="qwen2"), " is for qwen2 models, and "),
        (cut, " is truncated: "),
        (only_half, " is no adapter for "),
    ],
    ids=["missing", "text", "empty", "model", "architecture", "cut", "half"],
)
def test_invalid_adapters_are_refused_with_one_line(tiny_model, tmp_path, write, words):
    model, path = tiny_model(n_ctx_train=400), tmp_path / "bad.gguf"
    write(path, model)
    with pytest.raises(ModelError) as caught:
        Model(model, adapters=(Adapter(path),))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_size_is_refused(merged, tiny_model):
    _, adapters, _ = merged
    other = tiny_model(n_ff=96)
    with pytest.raises(ModelError, match=rf"0.gguf is no adapter for {other.name}: .*incorrect shape"):
        Model(other, adapters=adapters)


def test_adapter_that_needs_invocation_tokens_is_refused(tiny_model, tmp_path, monkeypatch):
    def add(writer, key, value):
        writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, [1, 2])

    model, path = tiny_model(n_ctx_train=400), tmp_path / "a.gguf"
    monkeypatch.setattr(gguf.GGUFWriter, "add_float32", add)
    tiny.write_lora(path, model)
    with pytest.raises(ModelError, match=r"acts only after certain tokens \(aLoRA\)"):
        Model(model, adapters=(Adapter(path),))


@pytest.mark.parametrize(
    ("typed", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.25", "a.gguf", 0.25),
        ("b:c.gguf", "b:c.gguf", 1.0),
        ("b:c.gguf:-2", "b:c.gguf", -2.0),
        ("./7:1", "7", 1.0),
        ("a.gguf:half", "a.gguf:half", 1.0),
        ("[red]a.gguf:1e-3", "[red]a.gguf", 0.001),
    ],
)
def test_a_number_after_the_last_colon_is_the_scale(typed, path, scale):
    parsed = Adapter.parse(typed)
    assert parsed == (Path(path).absolute(), scale)
    # a session stores the adapter as this text
    assert Adapter.parse(str(parsed)) == parsed


@pytest.mark.parametrize("typed", ["", "a.gguf:nan", "a.gguf:inf"])
def test_missing_files_and_non_finite_scales_are_refused(typed):
    with pytest.raises(UsageError, match="--lora takes a file, or FILE:SCALE with a number, got "):
        adapter_texts([typed], "--lora")


def test_adapter_records_have_file_digest_and_scale(merged):
    _, adapters, _ = merged
    assert identities(()) is None
    assert identities(adapters[1:]) == [{"file": "1.gguf", "sha256": sha256(adapters[1].path), "scale": -0.5}]
