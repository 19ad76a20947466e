"""Placement of weights on a GPU without room for all: the last layers first, experts after other weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvtool.models.header import read
from kvtool.models.weights import PlacedWeights, Weights, place
from tests import tiny

DENSE = Weights((10, 10, 10, 10), (0, 0, 0, 0), 5)
EXPERTS = Weights((10, 10, 10, 10), (0, 100, 100, 100), 5)
CACHE = (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("free", "n_layer", "n_bytes"), [(4, 0, 0), (5, 1, 5), (16, 1, 5), (17, 2, 17), (52, 4, 41), (53, 5, 53)]
)
def test_layers_fill_a_gpu_beginning_with_the_last(free, n_layer, n_bytes):
    assert place(DENSE, CACHE, free) == PlacedWeights(n_layer, 0, n_bytes)


@pytest.mark.parametrize(
    ("free", "n_layer", "n_cpu_moe", "n_bytes"),
    [(41, 4, 4, 41), (53, 5, 4, 53), (152, 5, 4, 53), (153, 5, 3, 153), (253, 5, 2, 253), (353, 5, 0, 353)],
)
def test_experts_are_placed_after_all_other_weights(free, n_layer, n_cpu_moe, n_bytes):
    assert place(EXPERTS, CACHE, free) == PlacedWeights(n_layer, n_cpu_moe, n_bytes)


@pytest.mark.parametrize(
    ("arch", "shape"), [("llama", {}), ("llama", {"tied": True}), ("gpt_oss", {"n_expert": 4})]
)
def test_weights_are_summed_up_by_layer(tiny_model, arch, shape):
    path = tiny_model(arch, n_layer=4, **shape)
    weights = read(path).weights
    sizes = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors}
    layers = [sum(n for name, n in sizes.items() if name.startswith(f"blk.{i}.")) for i in range(4)]
    assert np.add(weights.dense, weights.experts).tolist() == layers
    has_experts = arch == "gpt_oss"
    assert all(bool(n) == has_experts for n in weights.experts)
    output = sum(n for name, n in sizes.items() if name.startswith("output"))
    is_tied = "output.weight" not in sizes
    assert is_tied == bool(shape.get("tied"))
    assert weights.output == output + is_tied * sizes["token_embd.weight"]


def test_mtp_layers_that_are_not_loaded_count_zero_bytes(tiny_model):
    weights, plain = (read(tiny_model("qwen35", mtp=mtp)).weights for mtp in (True, False))
    assert (weights.n_layer, weights.n_mtp, plain.n_layer, plain.n_mtp) == (5, 1, 4, 0)
    sizes = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(tiny_model("qwen35")).tensors}
    assert weights.dense[-1] == sum(n for name, n in sizes.items() if name.startswith("blk.4."))
    assert weights.without_mtp().dense == (*plain.dense, 0)
    assert plain.without_mtp() == plain
    # without its weights, the MTP layer takes 0 bytes, so it fits together with the output
    assert place(weights.without_mtp(), [0] * 5, weights.output).n_gpu_layers == 2
    assert place(weights, [0] * 5, weights.output).n_gpu_layers == 1


def test_weights_of_a_split_model_include_all_parts(tmp_path):
    path = tmp_path / "whole.gguf"
    tiny.write_llama(path)
    first = tiny.split(path, tmp_path / "part", 3)[0]
    assert read(first).weights == read(path).weights
