"""Bytes of the cache of a model's layers, computed by hand and as allocated by a context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtool.errors import ModelError, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.loaded.model import Model
from kvtool.models.header import read
from kvtool.models.layers import PAD, Kind, Layer, Layers
from kvtool.units import CACHE_TYPES
from tests import tiny, tiny_kinds

ROWS, SLIDING, RECURRENT, _ = Kind


def layers_of(path):
    """Load a file's metadata in llama.cpp, without its weights."""
    model = Model(path, no_weights=True)
    try:
        return model.layers
    finally:
        model.close()


# bytes computed from a list of layers

MIXED = Layers(
    (
        Layer(0, ROWS, 0, 1, 64, 32, 0),
        Layer(3, ROWS, 3, 4, 32, 64, 0),
        # layer 5 reads the cells of layer 3
        Layer(5, ROWS, 3, 4, 32, 64, 0),
        Layer(1, SLIDING, 1, 2, 128, 96, 0),
        # layer 4 reads the cells of layer 1
        Layer(4, SLIDING, 1, 2, 128, 96, 0),
        Layer(2, RECURRENT, 2, 0, 0, 0, 1000),
        # layer 3 is listed twice: it has cells (above) and a recurrent state
        Layer(3, RECURRENT, 3, 0, 0, 0, 1),
    ),
    n_swa=100,
)


def test_rows_are_the_kv_heads_of_layers_with_their_own_cells():
    assert MIXED.n_row == 1 + 4
    assert MIXED.n_shared == 2
    assert [layer.number for layer in MIXED.of(ROWS)] == [0, 3, 5]
    assert [layer.number for layer in MIXED.of(SLIDING)] == [1, 4]
    assert [layer.number for layer in MIXED.of(RECURRENT)] == [2, 3]
    assert [layer.number for layer in MIXED.all if not layer.is_owner] == [5, 4]


def test_cell_bytes_sum_all_rows_with_their_own_head_sizes():
    assert MIXED.cell_bytes() == (64 + 32) * 2 + 4 * (32 + 64) * 2
    assert MIXED.cell_bytes("f32", "bf16") == 64 * 4 + 32 * 2 + 4 * (32 * 4 + 64 * 2)
    # 32 numbers take 34 bytes in q8_0, 18 in q4_0, 20 in q4_1, 22 in q5_0, 24 in q5_1
    assert MIXED.cell_bytes("q8_0", "q4_0") == 68 + 18 + 4 * (34 + 36)
    assert MIXED.cell_bytes("q4_1", "q5_0") == 40 + 22 + 4 * (20 + 44)
    assert MIXED.cell_bytes("q5_1", "f16") == 48 + 64 + 4 * (24 + 128)


@pytest.mark.parametrize(
    ("n_batch", "n_cell"), [(1, 256), (156, 256), (157, 512), (256, 512), (412, 512), (413, 768)]
)
def test_sliding_layers_have_window_plus_batch_cells_in_steps_of_256(n_batch, n_cell):
    assert MIXED.swa_bytes(n_batch) == n_cell * 2 * (128 + 96) * 2
    assert MIXED.swa_bytes(n_batch, "q8_0", "f32") == n_cell * 2 * (4 * 34 + 96 * 4)
    assert MIXED.fixed_bytes(n_batch) == MIXED.swa_bytes(n_batch) + 1001
    assert n_cell % PAD == 0


def test_cells_that_fit_leaves_room_for_the_fixed_bytes():
    fixed, cell = MIXED.fixed_bytes(256), MIXED.cell_bytes()
    assert MIXED.recurrent_bytes == 1001
    for n in (0, 1, 7):
        assert MIXED.cells_that_fit(fixed + n * cell, 256) == n
        assert MIXED.cells_that_fit(fixed + n * cell + cell - 1, 256) == n
    assert MIXED.cells_that_fit(fixed - 1, 256) == MIXED.cells_that_fit(0, 256) == 0
    fixed, cell = MIXED.fixed_bytes(256, "q8_0", "f32"), MIXED.cell_bytes("q8_0", "f32")
    assert MIXED.cells_that_fit(fixed + 5 * cell, 256, "q8_0", "f32") == 5


def test_latent_attention_takes_no_bytes_for_values():
    latent = Layers(tuple(Layer(i, ROWS, i, 1, 576, 0, 0) for i in range(3)))
    assert latent.cell_bytes() == 3 * 576 * 2
    assert latent.cell_bytes("q8_0", "q8_0") == 3 * 576 // 32 * 34
    for type_v in set(CACHE_TYPES) - {"q8_0"}:
        with pytest.raises(
            UsageError,
            match=f"^--cache-type-k and --cache-type-v must be the same, not q8_0 and {type_v}: .*MLA",
        ):
            latent.cell_bytes("q8_0", type_v)
    assert latent.kinds == ["latent attention (MLA)"]
    assert (latent.n_row, latent.fixed_bytes(256)) == (3, 0)


def test_kinds_lists_everything_except_plain_attention():
    plain = Layer(0, ROWS, 0, 2, 32, 32, 0)
    by_kinds = {
        (): plain,
        ("sliding windows",): Layer(1, SLIDING, 1, 2, 32, 32, 0),
        ("shared layers",): plain._replace(number=1),
        ("recurrent layers",): Layer(1, RECURRENT, 1, 0, 0, 0, 8),
        ("latent attention (MLA)",): plain._replace(head_size_v=0),
    }
    for kinds, layer in by_kinds.items():
        assert Layers((plain, layer)).kinds == list(kinds)
    assert MIXED.kinds == ["sliding windows", "shared layers", "recurrent layers"]
    turned = replace(MIXED, rope="interleaved M-RoPE")
    assert turned.kinds == [*MIXED.kinds, "interleaved M-RoPE"]
    # layers with values of size 0 are called latent, except recurrent layers, which have no cells at all
    assert "latent" not in str(Layers((plain, by_kinds["recurrent layers",])).kinds)


def test_model_without_rows_has_no_cells():
    nothing = Layers((Layer(0, RECURRENT, 0, 0, 0, 0, 8),))
    assert (nothing.n_row, nothing.cell_bytes(), nothing.cells_that_fit(2**30, 256)) == (0, 0, 0)


def test_cache_types_that_do_not_fit_the_head_size_are_refused():
    small = Layers((Layer(0, ROWS, 0, 2, 32, 16, 0), Layer(1, SLIDING, 1, 2, 80, 16, 0)), n_swa=8)
    assert small.cell_bytes("q8_0") == 2 * (34 + 32)
    with pytest.raises(
        UsageError, match="^V cannot be q8_0: the model's head size of 16 is not a multiple of 32$"
    ):
        small.cell_bytes("f16", "q8_0")
    with pytest.raises(UsageError, match=r"^K cannot be q4_0: .* 80 is not a multiple of 32$"):
        small.fixed_bytes(256, "q4_0")
    with pytest.raises(UsageError, match="^unknown cache type 'q9' for V; choose one of f32, f16"):
        small.cell_bytes("f16", "q9")
    with pytest.raises(UsageError, match="^unknown cache type 'q9' for K"):
        small.cells_that_fit(2**20, 256, "q9")


# layers as llama.cpp describes them


@pytest.mark.parametrize(("pattern", "slides"), [(2, "101010"), (3, "110110"), (4, "111011")])
def test_sliding_layers_are_read_from_llama_cpp(tiny_model, pattern, slides):
    layers = layers_of(tiny_model("gemma3", n_layer=6, n_head_kv=1, window=100, pattern=pattern))
    for kind, which in ((ROWS, "0"), (SLIDING, "1")):
        assert [layer.number for layer in layers.of(kind)] == [i for i in range(6) if slides[i] == which]
    assert layers.n_swa == 100
    assert all(layer[2:] == (layer.number, 1, 32, 32, 0) for layer in layers.all)
    assert (layers.n_row, layers.n_shared, layers.recurrent_bytes) == (slides.count("0"), 0, 0)


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q4_0"), ("f32", "bf16")])
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {}),
        ("llama", {"n_head": 3, "n_head_kv": 3, "n_layer": 3, "head_dim": 64}),
        ("deci", {"n_layer": 3, "n_head_kv": [1, 2, 4]}),
        ("gemma3", {"window": 300, "n_layer": 5, "pattern": 3}),
        ("lfm2", {}),
        ("lfm2", {"n_head_kv": (4, 0, 0, 1, 2), "n_conv": 5}),
    ],
    ids=str,
)
def test_computed_bytes_equal_the_cache_of_a_context(tiny_model, arch, shape, type_k, type_v):
    path = tiny_model(arch, **shape)
    layers = layers_of(path)
    model = Model(path)
    # a model with its weights has the same layers
    assert model.layers == layers
    for n_cell, n_batch in ((256, 64), (1024, 64), (512, 512)):
        context = Context(model, n_cell, n_batch, type_k=type_k, type_v=type_v, flash="on")
        fixed = layers.fixed_bytes(n_batch, type_k, type_v)
        assert context.cache_bytes == n_cell * layers.cell_bytes(type_k, type_v) + fixed
        assert context.n_row == layers.n_row
        rows = [layer.number for layer in layers.of(ROWS) for _ in range(layer.n_head_kv)]
        assert context.row_layers.tolist() == rows
        context.close()
    model.close()


@pytest.mark.parametrize(
    "shape", [{}, {"rope": "neox"}, {"arch": "deci", "n_layer": 3, "n_head_kv": [1, 2, 4]}], ids=str
)
def test_header_and_llama_cpp_agree_on_the_layers_of_plain_models(tiny_model, shape):
    path = tiny_model(**shape)
    assert layers_of(path) == read(path).plain_layers
    assert layers_of(path).kinds == []


def test_recurrent_layers_have_states_and_other_layers_have_rows(tiny_model):
    layers = layers_of(tiny_model("lfm2", n_head_kv=(0, 2, 0, 4), n_conv=4))
    # a state is the 3 newest vectors of 128 float32
    assert layers.all == (
        Layer(1, ROWS, 1, 2, 32, 32, 0),
        Layer(3, ROWS, 3, 4, 32, 32, 0),
        Layer(0, RECURRENT, 0, 0, 0, 0, 3 * 128 * 4),
        Layer(2, RECURRENT, 2, 0, 0, 0, 3 * 128 * 4),
    )
    assert (layers.kinds, layers.n_swa) == (["recurrent layers"], 0)


def test_m_rope_is_reported(tiny_model):
    path = tiny_model("qwen2vl")
    assert (layers_of(path).rope, layers_of(path).kinds) == ("M-RoPE", ["M-RoPE"])


def test_window_of_zero_tokens_is_an_error_if_layers_slide(tmp_path):
    path = tmp_path / "tiny.gguf"
    # if the window is 0, no layer of Gemma 3 is a sliding layer. Most architectures behave in this way, but
    # gpt-oss does not
    tiny.write_gemma3(path, n_layer=6, n_head_kv=1, window=0)
    layers = layers_of(path)
    assert (len(layers.of(ROWS)), layers.kinds, layers.n_swa) == (6, [], 0)
    tiny_kinds.write_gpt_oss(path, window=0)
    with pytest.raises(ModelError) as error:
        layers_of(path)
    assert str(error.value) == f"{path} is damaged: its sliding layers see 0 tokens; download it again"


def test_layers_of_a_closed_model_raise_usage_error(tiny_model):
    model = Model(tiny_model(), no_weights=True)
    model.close()
    with pytest.raises(UsageError, match="this model is closed"):
        _ = model.layers


def test_header_layers_count_latent_values_only_for_older_files(tiny_model):
    info = read(tiny_model())
    metadata = info.metadata | {"deepseek2.attention.key_length_mla": 192}
    latent = replace(info, architecture="deepseek2", head_size_k=576, head_size_v=512, metadata=metadata)
    assert latent.plain_layers.cell_bytes() == 4 * 576 * 2
    # files without key_length_mla are older. Their values take memory in addition to the keys
    older = replace(latent, metadata=info.metadata | {"deepseek2.attention.kv_lora_rank": 512})
    assert older.plain_layers.cell_bytes() == 4 * (576 + 512) * 2
