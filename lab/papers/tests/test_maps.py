"""Compare maps of a model's attention with their definitions and with the transformer in NumPy."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

import tests.tiny_kinds as tiny_kinds
from kvtool.errors import ModelError, UsageError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.models.layers import Kind
from lab.papers.maps import __main__ as command
from lab.papers.maps import measure as maps
from lab.papers.maps.observe import Observed, observe
from tests.engine.exact_engines import TOLERANCE, random_tokens
from tests.reference import models, transformer

N = 90


class Watched(transformer.Stream):
    """A stream that keeps what its layers computed: arrays[what][layer] is f64[head, n, ...]."""

    def __init__(self, model):
        super().__init__(model)
        self.arrays = {what: {} for what in Observed}

    def attend(self, layer, query, key=None, value=None):
        model, rot = self.model, self._batch.rot
        self._layer, self.attention = layer, []
        out = super().attend(layer, query, key, value)
        rows = self.all_rows[layer]
        self.arrays[Observed.QUERIES][layer] = model.rotate_query(query, rot, layer)
        self.arrays[Observed.KEYS][layer] = np.array([model.rotate(row.key, row.rot, layer) for row in rows])
        self.arrays[Observed.KEYS_BEFORE][layer] = np.array([row.key.view(np.float64) for row in rows])
        self.arrays[Observed.VALUES][layer] = np.array([row.value for row in rows])
        self.arrays[Observed.ATTENTION][layer] = np.concatenate(self.attention)
        return out

    def _note(self, row, attn, is_first):
        super()._note(row, attn, is_first)
        self.attention.append(attn.copy())


def of_twin(path, tokens):
    stream = Watched(models.load(path))
    stream.decode(tokens)
    return stream.arrays


def of_llama(path, tokens, wanted=tuple(Observed), kind=Kind.ROWS):
    """Return the same arrays as `of_twin`, but computed by llama.cpp. Also return the layers."""
    model, arrays = Model(path), {what: {} for what in Observed}

    def visit(what, layer, head, array):
        heads = arrays[what].setdefault(layer, [])
        assert head == len(heads)
        heads.append(array)

    layers = model.layers.of(kind)
    observe(model, tokens, wanted, [layer.number for layer in layers], visit, n_threads=1)
    model.close()
    return {what: {i: np.array(heads) for i, heads in of.items()} for what, of in arrays.items()}, layers


def products(what, vectors):
    """Return the dot products of all pairs of vectors, f64[head, n, n].

    The transformer in NumPy has another order of dimensions, which changes vectors but not dot products.
    Queries are normalised, because some architectures scale them before attention and others within it.
    """
    vectors = vectors.astype(np.float64)
    if what is Observed.QUERIES:
        vectors /= np.linalg.norm(vectors, axis=2).mean()
    return vectors @ vectors.swapaxes(1, 2)


WHOLE = (
    *("llama", "qwen2", "gemma3", "smollm3", "maincoder", "qwen2vl", "gpt_oss"),
    *("lfm2", "gemma4", "refact", "gpt2", "deepseek2"),
)


def tiny_path(name, folder):
    path = folder / f"{name}.gguf"
    if name in ("llama", "qwen2"):
        tiny_kinds.write("llama", path, rope={"llama": "norm", "qwen2": "neox"}[name])
    else:
        tiny_kinds.write(name, path)
    return path


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_observed_is_what_the_transformer_computes(name, tmp_path):
    path, tokens = tiny_path(name, tmp_path), random_tokens(N)
    want = of_twin(path, tokens)
    is_mla = name == "deepseek2"
    wanted = [Observed.ATTENTION] if is_mla else list(Observed)
    arrays, layers = of_llama(path, tokens, wanted)
    assert layers
    for layer in layers:
        attention = arrays[Observed.ATTENTION][layer.number]
        assert attention.shape[1:] == (N, N)
        assert np.abs(attention - want[Observed.ATTENTION][layer.number]).max() < TOLERANCE
        for what in set(wanted) - {Observed.ATTENTION}:
            if what is Observed.KEYS_BEFORE and not layer.is_owner:
                assert layer.number not in arrays[what]
                continue
            got, expected = (each[what][layer.number] for each in (arrays, want))
            if (name, what) == ("maincoder", Observed.KEYS_BEFORE):
                # llama.cpp applies maincoder's norm after RoPE, NumPy's transformer before RoPE
                got = got / np.sqrt(np.mean(got.astype(np.float64) ** 2, axis=2, keepdims=True) + 1e-5)
            got, expected = products(what, got), products(what, expected)
            assert got.shape == expected.shape
            assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max(), (what, layer.number)


def test_keys_before_rope_are_others_than_those_behind_it(tiny_model):
    arrays, _ = of_llama(tiny_model(), random_tokens(N))
    before, after = (arrays[what][1] for what in (Observed.KEYS_BEFORE, Observed.KEYS))
    # RoPE rotates position 0 by an angle of 0
    assert np.array_equal(before[:, 0], after[:, 0])
    assert np.abs(before[:, 1:] - after[:, 1:]).max() > 0.5


@pytest.mark.parametrize("error", [UsageError("enough"), KeyboardInterrupt()])
def test_what_a_visitor_raises_ends_the_reading(tiny_model, capfd, error):
    model, seen = Model(tiny_model()), []

    def visit(what, layer, head, array):
        seen.append((layer, head))
        raise error

    with pytest.raises(type(error)):
        observe(model, random_tokens(20), [Observed.ATTENTION], [0, 1], visit, 1)
    model.close()
    assert seen == [(0, 0)]
    assert capfd.readouterr().err == ""


def test_a_layer_that_llama_does_not_show_is_an_error(tiny_model):
    model = Model(tiny_model())
    with pytest.raises(ModelError, match="llama.cpp shows no attention of layer 7 of"):
        observe(model, random_tokens(20), [Observed.ATTENTION], [0, 7], lambda *arrays: None, 1)
    model.close()


def attention_of(n, seed=1):
    """f32[n, n], each query's attention to itself and earlier tokens, with many equal weights."""
    weights = np.tril(np.random.default_rng(seed).integers(1, 4, (n, n)).astype(np.float64))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def test_important_keys_are_those_of_the_definition():
    attention = attention_of(30)
    attention[7, :8] = 1 / 8
    mask = maps.important(attention)
    shares = []
    for query in range(30):
        keys = [key for key in range(query + 1) if attention[query, key] >= np.float32(1 / (query + 1))]
        assert np.flatnonzero(mask[query]).tolist() == keys
        shares.append(len(keys) / (query + 1))
    # a query that attends to all keys evenly finds all of them important
    assert mask[7].sum() == 8
    assert maps.share_of(mask) == pytest.approx(np.mean(shares))


def test_the_most_similar_earlier_query_is_the_newest_among_equals():
    queries = np.random.default_rng(2).integers(-1, 2, (40, 2)).astype(np.float32)
    cosine = maps.cosines(queries)
    arrays = maps.most_similar(cosine)
    for query in range(1, 40):
        best = max(range(query), key=lambda other: (cosine[query, other], other))
        assert arrays[query - 1] == best
        a, b = queries[query].astype(float), queries[best].astype(float)
        length = np.linalg.norm(a) * np.linalg.norm(b)
        assert cosine[query, best] == pytest.approx(a @ b / length if length else 0, abs=1e-6)


def test_an_overlap_is_of_the_keys_that_both_queries_have_seen():
    mask = maps.important(attention_of(30))
    earlier = np.random.default_rng(3).integers(np.arange(1, 30))
    both = either = 0
    for query in range(1, 30):
        for key in range(earlier[query - 1] + 1):
            a, b = mask[query, key], mask[earlier[query - 1], key]
            both, either = both + int(a and b), either + int(a or b)
    assert maps.overlap(mask, earlier) == pytest.approx(both / either)
    assert maps.overlap(np.zeros((5, 5), np.bool_), np.zeros(4, np.int64)) == 0


@pytest.mark.parametrize(
    ("singular", "rank"), [([3, 1], 1), ([3, 1.01], 2), ([1] * 10, 9), ([2], 1), ([0, 0], 0)]
)
def test_the_effective_rank_carries_90_percent(singular, rank):
    assert maps.effective_rank(np.array(singular, np.float64)) == rank


def test_chance_is_that_of_a_query_drawn_among_the_earlier_ones():
    n = 12
    arrays = maps.SimilarQueries(*(np.zeros(1),) * 2, np.arange(1, n)[None], np.zeros(1), {})
    for near in (1, 4, 100):
        want = np.mean(
            [sum(query - other <= near for other in range(query)) / query for query in range(1, n)]
        )
        assert arrays.chance(near) == pytest.approx(want)
        assert arrays.within(near).tolist() == [min(near, n - 1) / (n - 1)]


def test_the_maps_are_those_of_the_transformer(tiny_model):
    path, tokens = tiny_model(), random_tokens(N)
    want, model = of_twin(path, tokens), Model(path)
    reading = maps.Reading(model, tokens, 1)
    places = [(0, 3), (1, 0)]
    share, attention = maps.share(reading), maps.attention(reading, places)
    queries, values = maps.queries(reading, places), maps.values(reading)
    model.close()

    heads = [(layer, head) for layer in range(2) for head in range(4)]
    for arrays in (share, attention, queries):
        assert list(zip(arrays.layer.tolist(), arrays.head.tolist(), strict=True)) == heads
    assert (list(attention.maps), list(queries.maps)) == (places, places)
    for i, (layer, head) in enumerate(heads):
        expected_attention = want[Observed.ATTENTION][layer][head].astype(np.float32)
        mask = maps.important(expected_attention)
        assert share.share[i] == attention.share[i] == pytest.approx(maps.share_of(mask), abs=1e-3)
        cosine = maps.cosines(want[Observed.QUERIES][layer][head])
        nearest = maps.most_similar(cosine)
        assert attention.similar[i] == pytest.approx(maps.overlap(mask, nearest), abs=0.01)
        assert attention.previous[i] == pytest.approx(maps.overlap(mask, np.arange(N - 1)), abs=0.01)
        assert queries.cosine[i] == pytest.approx(cosine[np.arange(1, N), nearest].mean(), abs=1e-4)
        assert (queries.distance[i] == np.arange(1, N) - nearest).mean() > 0.97
        if (layer, head) in places:
            assert np.abs(queries.maps[layer, head] - cosine).max() < TOLERANCE
            assert np.abs(attention.maps[layer, head].attention - expected_attention).max() < TOLERANCE
    assert list(zip(values.layer.tolist(), values.head.tolist(), strict=True)) == heads[:2] + heads[4:6]
    for what, of_heads in values.singular.items():
        for (layer, head), singular in zip(heads[:2] + heads[4:6], of_heads, strict=True):
            expected = np.linalg.svd(want[what][layer][head], compute_uv=False)
            assert np.abs(singular - expected).max() < TOLERANCE * expected[0]
    normalised = values.normalised(Observed.VALUES)
    assert normalised[0] == 1
    assert normalised[-1] == pytest.approx(
        np.mean([each[-1] / each[0] for each in values.singular[Observed.VALUES]])
    )


def test_only_layers_that_attend_to_all_tokens_are_shown(tmp_path, capsys):
    for name, drawn in (("gemma3", [1, 3]), ("lfm2", [1, 3]), ("gemma4", [1, 3, 5, 6])):
        model = Model(tiny_path(name, tmp_path))
        assert command.drawn_layers(model, "share") == drawn
        rest = ", ".join(str(layer) for layer in range(len(model.layers.all)) if layer not in drawn)
        assert capsys.readouterr().err == f"layers {rest} are left out: they do not attend to all tokens\n"
        if name == "gemma4":
            # the last layers, 5 and 6, read the keys of earlier layers
            assert maps.drawn_layers(model, "values") == [1, 3]
        model.close()


@pytest.mark.parametrize(
    ("name", "kinds", "words"),
    [
        ("deepseek2", ("queries", "values"), r"keeps keys and values as one \(MLA\)"),
        ("deepseek32", command.MAPS, "chooses by an index which tokens a query sees"),
    ],
)
def test_a_model_without_such_a_map_is_refused(name, kinds, words, tmp_path):
    model = Model(tiny_path(name, tmp_path))
    for kind in command.MAPS:
        if kind in kinds:
            with pytest.raises(ModelError, match=words):
                maps.drawn_layers(model, kind)
        else:
            assert maps.drawn_layers(model, kind)
    model.close()


def pixels(figure):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return imread(io.BytesIO(out.getvalue()))[..., :3]


def test_important_keys_are_green_and_two_queries_are_framed():
    pytest.importorskip("matplotlib")
    from lab.papers.maps import plot

    n = 1000
    mask = np.zeros((n, n), np.bool_)
    mask[:, :250] = np.tri(n, 250, dtype=np.bool_)
    attention, similar = mask / n, np.arange(n - 1)
    similar[-1] = 500
    of = maps.AttentionMap(attention.astype(np.float32), mask, similar)
    ones = np.ones(1)
    arrays = maps.Attention(np.zeros(1, int), np.zeros(1, int), ones, ones, ones, ones, {(0, 0): of})
    figure = plot.attention(arrays, "x")
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert "a query and the earlier query most similar to it" in names
    assert legend.get_patches()[2].get_edgecolor()[:3] == pytest.approx((0.88, 0, 0), abs=0.01)
    picture = pixels(figure)
    green, red = (
        np.abs(picture - np.array(colour)).max(axis=2) < 0.02 for colour in ((0, 0.62, 0.25), (0.88, 0, 0))
    )
    # the green pixels are in the first quarter of the columns, below the diagonal
    columns = np.flatnonzero(green.sum(axis=0) > 100)
    rows = np.flatnonzero(red.mean(axis=1) > 0.3)
    assert len(columns) > 100
    assert green[:, columns].sum() / green.sum() > 0.9
    # the frames of queries 500 and 999 have a distance of half the map. The green area is a quarter as wide
    # as the map
    assert rows[-1] - rows[0] == pytest.approx(2 * (columns[-1] - columns[0]), rel=0.2)


@pytest.mark.parametrize("n", [5, 800, 801, 2000])
def test_a_pixel_is_the_mean_of_its_tokens(n):
    pytest.importorskip("matplotlib")
    from lab.papers.maps import plot

    array = np.random.default_rng(1).random((n, n))
    coarse = plot._coarse(array)
    assert len(coarse) == min(n, 800)
    if n <= 800:
        assert np.abs(coarse - array).max() < 1e-12
    else:
        edges = [i * n // 800 for i in range(801)]
        for i, j in ((0, 0), (3, 799), (799, 400)):
            part = array[edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
            assert coarse[i, j] == pytest.approx(part.mean())


COMMON = {"file", "text_sha256", "map", "tokens", "model", "layers", "layer", "head"}
NUMBERS = {
    "attention": {"share", "similar", "previous", "random", "mean"},
    "queries": {"cosine", "within_1", "within_16", "within_256", "chance", "mean"},
    "values": {"keys_before", "keys", "values"},
    "share": {"share", "mean"},
}


@pytest.fixture
def program(monkeypatch, capsys, tmp_path, tiny_model):
    """Run `python -m lab.papers.maps` on a text: its exit code or message, stdout and stderr."""

    def run(kind, *arguments, letters="the tide comes in. " * 20):
        path = tmp_path / "text"
        path.write_text(letters)
        words = ["maps", kind, path, "-m", tiny_model(), *arguments]
        monkeypatch.setattr("sys.argv", list(map(str, words)))
        code = 0
        try:
            command.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("kind", command.MAPS)
def test_a_map_is_json_a_table_and_a_picture(kind, program, tmp_path):
    pytest.importorskip("matplotlib")
    files = ("--json", tmp_path / "o.json", "--plot", tmp_path / "o.png")
    code, table, err = program(kind, "--max-tokens", 60, *files)
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "o.json").read_text())
    assert set(result) == COMMON | NUMBERS[kind] | set(records.versions())
    assert (result["map"], result["tokens"], result["layers"]) == (kind, 60, [0, 1])
    n_head = 4 if kind == "values" else 8
    assert len(result["layer"]) == len(result["head"]) == n_head
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"

    lines = table.splitlines()
    if kind == "values":
        assert [line.split("  ")[0] for line in lines[1:]] == ["keys before RoPE", "keys", "values"]
        assert f"{np.mean(result['keys']['rank']):.1f}" in lines[2]
    elif kind == "share":
        assert lines[-1].split()[:2] == ["all", f"{result['mean']['share']:.1%}"]
        assert lines[1].split()[1] == f"{np.mean(result['share'][:4]):.1%}"
    else:
        # by default the first, middle and last layers are shown. If there are two layers, the second layer is
        # both the middle and the last
        assert [line.split()[:2] for line in lines[1:5]] == [[a, b] for a in "01" for b in "02"]
        assert lines[5].split()[:3] == ["all", "8", "heads"]
        last = result["mean"]["random" if kind == "attention" else "within_256"]
        assert lines[5].split()[-1] == f"{last:.1%}"


def test_layers_and_heads_are_those_asked_for(program):
    chosen = ("--layer", 1, "--head", 3, "--head", 1, "--head", 3)
    _, table, _ = program("queries", "--max-tokens", 20, *chosen)
    assert [line.split()[:2] for line in table.splitlines()[1:3]] == [["1", "3"], ["1", "1"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layer", 2], "--layer must be one of 0, 1, got 2"),
        (["--head", 4], "--head must be one of 0 to 3, got 4"),
        (["--head", -1], "--head must be one of 0 to 3, got -1"),
        (["--max-tokens", 2000], "text is too short"),
    ],
)
def test_what_does_not_fit_the_model_gets_one_line(program, arguments, words):
    message, table, _ = program("attention", "--max-tokens", 40, *arguments)
    assert words in message
    assert table == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "cannot read {}: No such file or directory"),
        ("folder", "cannot read {}: Is a directory"),
        ("binary", "{} is binary; it must be a text"),
        ("model", "llama.cpp cannot load {}: "),
        ("--json", "cannot write {}: it must be a file in an existing folder"),
        ("--plot", "cannot write {}: it must be a file in an existing folder"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_line(monkeypatch, tmp_path, tiny_model, kind, words):
    text, path = tmp_path / "text", tmp_path / kind
    text.write_text("the tide comes in. " * 20)
    if kind == "folder":
        path.mkdir()
    elif kind in ("binary", "model"):
        path.write_bytes(bytes(100))
    file, model, more = path, tiny_model(), []
    if kind == "model":
        file, model = text, path
    elif kind.startswith("--"):
        path = tmp_path / "none" / "file"
        file, more = text, [kind, path]
    arguments = ["maps", "share", file, "-m", model, "--max-tokens", 20, *more]
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code.startswith(words.format(path))
    assert "\n" not in end.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["keys"], "invalid choice: 'keys'"),
        (["share", "--layer", 1], "share shows all layers and heads: leave out --layer and --head"),
        (["values", "--head", 1], "values shows all layers and heads: leave out --layer and --head"),
        (["share", "--max-tokens", 1], "--max-tokens must be at least 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(program, arguments, words):
    code, table, err = program(*arguments)
    assert (code, table) == (2, "")
    assert words in err
