"""The reference transformer refuses impossible input, and tiny.dequantize keeps tensors and metadata.

tests/engine checks the transformer itself: kvtool's engine has to give the same scores.
"""

import gguf
import numpy as np
import pytest
import tiny
from reference.transformer import Llama, run

N_CTX_TRAIN = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    tiny.write_llama(path, n_ctx_train=N_CTX_TRAIN)
    return Llama(path)


def text(n):
    return np.random.default_rng(1).integers(tiny.N_SPECIAL, 320, n).tolist()


def test_refuses_more_entries_than_the_trained_context(model):
    with pytest.raises(ValueError, match="do not fit into a context of 96"):
        run(model, text(100), slack=10, positions="auto")


@pytest.mark.parametrize(
    ("positions", "match"), [([1, 0], "sorted"), ([1, 1], "sorted"), ([1, 9], "in the row")]
)
def test_invalid_kept_positions_are_refused(model, positions, match):
    with pytest.raises(ValueError, match=match):
        run(model, text(5), budget=4, slack=2, keep=lambda rows, **_: [positions] * len(rows))


def test_dequantize_gives_every_tensor_as_f32_with_its_metadata(tmp_path):
    path = tmp_path / "mixed.gguf"
    rng = np.random.default_rng(0)
    square = rng.standard_normal((8, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_rope_freq_base(5.0)
    writer.add_token_list(["a", "\u2581b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_token_types([1, 6])
    writer.add_key_value("narrow", [1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    writer.add_tensor("plain", square)
    writer.add_tensor("half", square.astype(np.float16))
    q8_0 = gguf.quants.quantize(square, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantized", q8_0, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tiny.dequantize(path, tmp_path / "f32.gguf")
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "f32.gguf")
    tensors = {tensor.name: tensor for tensor in after.tensors}
    assert {tensor.tensor_type for tensor in after.tensors} == {gguf.GGMLQuantizationType.F32}
    np.testing.assert_array_equal(tensors["plain"].data, square)
    np.testing.assert_array_equal(tensors["half"].data, square.astype(np.float16))
    np.testing.assert_allclose(tensors["quantized"].data, square, rtol=0, atol=0.02)
    assert after.fields["general.file_type"].contents() == 0
    same = before.fields.keys() - {"general.file_type"}
    assert after.fields.keys() == before.fields.keys()
    assert all(after.fields[key].contents() == before.fields[key].contents() for key in same)
    assert all(after.fields[key].types == before.fields[key].types for key in same)


def test_refuses_a_quantized_model(tmp_path):
    path = tmp_path / "f16.gguf"
    tiny.write_llama(path)
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[0].field.parts[4][0] = gguf.GGMLQuantizationType.I32
    reader.data.flush()
    with pytest.raises(ValueError, match="must be F32, got I32"):
        Llama(path)
