"""The reference transformer has the properties of any correct transformer. kvtool's engine is not used."""

from functools import partial

import gguf
import numpy as np
import pytest
import tiny
from reference.transformer import Llama, Row, Stream, run

N_CTX_TRAIN = 96
GROUPS = {1: 4, 2: 2, 4: 1}
"""{number of KV heads: number of query heads per KV head}. The model has 4 query heads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def write(folder, **params):
    path = folder / ("-".join(f"{key}={value}" for key, value in params.items()) + ".gguf")
    tiny.write_llama(path, n_ctx_train=N_CTX_TRAIN, **params)
    return Llama(path)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda group: f"group={group}")
def model(request, folder):
    return write(folder, n_head_kv=GROUPS[request.param])


@pytest.fixture(scope="module")
def one_layer(folder):
    """A model of a single layer, in which a token's key and value depend only on that token."""
    return write(folder, n_layer=1)


def text(n, seed=1):
    return np.random.default_rng(seed).integers(tiny.N_SPECIAL, 320, n).tolist()


def keep_ends(rows, *, next, pinned, budget, slack, sinks=4):
    """Keep the first and the newest tokens, as StreamingLLM does."""
    n_keep = budget - slack
    return [[e["pos"] for e in row[:sinks] + row[len(row) - (n_keep - sinks) :]] for row in rows]


def keep_heavy(rows, *, next, pinned, budget, slack, window=8):
    def kept(row):
        heavy = sorted(row[:-window], key=lambda entry: entry["mass"])[-(budget - slack - window) :]
        return sorted(entry["pos"] for entry in heavy + row[-window:])

    return [kept(row) for row in rows]


# results differ because F32 numbers are added up in another order
close = {"rtol": 0, "atol": 1e-4}


@pytest.mark.parametrize("rope", tiny.ROPE_ARCH)
def test_logits_equal_plain_loops_over_heads_and_tokens(folder, rope):
    """Compare logits with float64 loops over heads, tokens and past tokens that rotate by cosine and sine."""
    model = write(folder, rope=rope)
    tokens = text(12)

    def normed(x, weight):
        return x * weight / np.sqrt((x**2).mean() + model.eps)

    def rotated(x, pos):
        half = len(x) // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = pos * 10000.0 ** (-2 * i / len(x))
            a, b = (i, i + half) if rope == "neox" else (2 * i, 2 * i + 1)
            out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
            out[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
        return out

    xs = [model.embd[token].astype(np.float64) for token in tokens]
    for layer in model.layers:
        w = {name: weight.astype(np.float64) for name, weight in layer.items()}
        hs = [normed(x, w["attn_norm"]) for x in xs]
        q = [(w["attn_q"] @ h).reshape(4, 32) for h in hs]
        k = [(w["attn_k"] @ h).reshape(2, 32) for h in hs]
        v = [(w["attn_v"] @ h).reshape(2, 32) for h in hs]
        for t in range(len(tokens)):
            heads = []
            for head in range(4):
                query = rotated(q[t][head], t)
                scores = [query @ rotated(k[j][head // 2], j) / np.sqrt(32) for j in range(t + 1)]
                attn = np.exp(scores) / np.exp(scores).sum()
                heads.append(sum(attn[j] * v[j][head // 2] for j in range(t + 1)))
            xs[t] = xs[t] + w["attn_output"] @ np.concatenate(heads)
            h = normed(xs[t], w["ffn_norm"])
            gate = w["ffn_gate"] @ h
            xs[t] = xs[t] + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ h))
    logits = np.array([model.output.astype(np.float64) @ normed(x, model.output_norm) for x in xs])

    result = run(model, tokens, logits=True)
    np.testing.assert_allclose(result.logits, logits, **close)
    total = np.log(np.exp(logits).sum(axis=-1))
    expected = [total[i] - logits[i, tokens[i + 1]] for i in range(len(tokens) - 1)]
    np.testing.assert_allclose(result.nll, expected, **close)


def test_one_batch_equals_token_by_token(model):
    tokens = text(40)
    at_once, singly = (run(model, tokens, slack=slack, logits=True) for slack in (None, 1))
    np.testing.assert_allclose(at_once.logits, singly.logits, **close)
    np.testing.assert_allclose(at_once.nll, singly.nll, **close)
    for rows, others in zip(at_once.stream.rows, singly.stream.rows, strict=True):
        for row, other in zip(rows, others, strict=True):
            np.testing.assert_allclose(row.mass, other.mass, **close)
            np.testing.assert_allclose(row.last, other.last, **close)


def test_mass_and_last_sum_up_to_the_queries_of_the_group(model):
    stream = run(model, text(40), slack=7).stream
    group = model.n_head // model.n_head_kv
    for row in (row for rows in stream.rows for row in rows):
        assert row.mass.sum() == pytest.approx(40 * group)
        assert row.last.sum() == pytest.approx(group)


def test_a_row_is_read_by_its_own_group_of_query_heads(folder):
    model = write(folder, n_head_kv=2, seed=5)
    tokens = text(20)
    before = run(model, tokens).stream.rows[0]
    # the queries of the second group become 0, so only the second row may change
    model.layers[0]["attn_q"] = model.layers[0]["attn_q"] * np.repeat(np.float32([1, 0]), 64)[:, None]
    after = run(model, tokens).stream.rows[0]
    np.testing.assert_array_equal(after[0].mass, before[0].mass)
    np.testing.assert_allclose(after[1].last, 2 / 20)


def test_evicting_nothing_equals_full(model):
    def keep_all(rows, **_):
        return [[entry["pos"] for entry in row] for row in rows]

    tokens = text(40)
    full = run(model, tokens, slack=8)
    for positions in ("original", "in-cache"):
        stream = Stream(model, positions=positions)
        logits = []
        for at in range(0, 40, 8):
            logits.append(stream.decode(tokens[at : at + 8]))
            stream.evict(keep_all, pinned=0, budget=0, slack=0)
        total = np.log(np.exp(np.concatenate(logits)).sum(axis=-1))
        nll = total[:-1] - np.concatenate(logits)[np.arange(39), tokens[1:]]
        np.testing.assert_allclose(nll, full.nll, rtol=0, atol=1e-12)


def test_evictions_change_the_logits(model):
    tokens = text(90)
    full = run(model, tokens, slack=4)
    heavy = run(model, tokens, budget=32, slack=4, keep=keep_heavy)
    assert np.abs(heavy.nll - full.nll)[:31].max() < 1e-4
    assert np.abs(heavy.nll - full.nll)[32:].mean() > 0.1


def test_shifting_all_positions_by_a_constant_changes_nothing(model):
    tokens = text(60)
    for params in ({}, {"budget": 32, "slack": 4, "keep": keep_heavy}):
        here, there = (run(model, tokens, counter=counter, **params) for counter in (0, 1000))
        assert there.stream.rows[0][0].rot[-1] == 1059
        np.testing.assert_allclose(there.nll, here.nll, **close)


def test_in_cache_positions_without_an_eviction_equal_original_ones(model):
    tokens = text(60)
    original = run(model, tokens, slack=10)
    # positions begin at 50, so they reach the trained context (96) and are numbered again from 0
    in_cache = run(model, tokens, slack=10, positions="in-cache", counter=50)
    assert in_cache.stream.counter == 60
    np.testing.assert_allclose(in_cache.nll, original.nll, **close)


def test_in_cache_positions_leave_no_gaps(one_layer):
    tokens = text(33)
    evicted = run(one_layer, tokens, budget=32, slack=12, keep=keep_ends, positions="in-cache", logits=True)
    remaining = tokens[:4] + tokens[16:]
    np.testing.assert_allclose(evicted.logits[-1], run(one_layer, remaining, logits=True).logits[-1], **close)


def test_original_positions_leave_gaps(one_layer):
    tokens = text(33)
    evicted = run(one_layer, tokens, budget=32, slack=12, keep=keep_ends, logits=True)
    closed = run(one_layer, tokens[:4] + tokens[16:], logits=True)
    assert np.abs(evicted.logits[-1] - closed.logits[-1]).max() > 0.1
    no_sinks = partial(keep_ends, sinks=0)
    oldest_gone = run(one_layer, tokens, budget=32, slack=12, keep=no_sinks, logits=True)
    newest = run(one_layer, tokens[12:], logits=True)
    np.testing.assert_allclose(oldest_gone.logits[-1], newest.logits[-1], **close)


def test_auto_positions_close_gaps_only_when_the_context_is_full(one_layer):
    tokens = text(300)
    original, in_cache, auto = (
        run(one_layer, tokens, budget=40, slack=8, keep=keep_ends, positions=positions)
        for positions in ("original", "in-cache", "auto")
    )
    # nll[i] is computed from the logits of token i, but it belongs to token i + 1
    np.testing.assert_array_equal(auto.nll[:N_CTX_TRAIN], original.nll[:N_CTX_TRAIN])
    # all gaps are closed at the end of the context. The next eviction leaves new gaps
    np.testing.assert_allclose(auto.nll[N_CTX_TRAIN], in_cache.nll[N_CTX_TRAIN], **close)
    assert np.abs(auto.nll - in_cache.nll)[N_CTX_TRAIN + 8 :].max() > 0.1
    assert np.abs(original.nll - in_cache.nll)[40:N_CTX_TRAIN].max() > 0.1
    assert np.abs(original.nll - in_cache.nll)[N_CTX_TRAIN:].max() > 0.1
    assert auto.stream.counter <= N_CTX_TRAIN


def test_auto_positions_close_the_gaps_in_order_of_the_stream(model):
    stream = run(model, text(96), budget=40, slack=8, keep=keep_heavy, positions="auto").stream
    n = stream.n
    assert stream.counter == 96
    assert all((row.rot == row.pos).all() for rows in stream.rows for row in rows)
    stream.decode(text(8))
    assert stream.counter == n + 8
    assert all(row.rot.tolist() == list(range(n + 8)) for rows in stream.rows for row in rows)
    assert all(row.pos[-8:].tolist() == list(range(96, 104)) for rows in stream.rows for row in rows)


def test_refuses_more_entries_than_the_trained_context(model):
    with pytest.raises(ValueError, match="do not fit into a context of 96"):
        run(model, text(100), slack=10, positions="auto")


def test_evicts_whenever_the_budget_is_full(model):
    calls = []

    def keep(rows, *, next, pinned, budget, slack):
        calls.append((next, pinned, budget, slack))
        assert [len(row) for row in rows] == [20] * model.n_head_kv
        assert all(row[-1]["pos"] == next - 1 for row in rows)
        return keep_ends(rows, next=next, pinned=pinned, budget=budget, slack=slack)

    stream = run(model, text(40), budget=20, slack=8, keep=keep, pinned=2).stream
    assert calls == [(n, 2, 20, 8) for n in (20, 20, 28, 28, 36, 36)]
    assert stream.n == 12 + 4
    assert [row.pos.tolist() for row in stream.rows[1]] == [[0, 1, 2, 3, *range(28, 40)]] * model.n_head_kv


def test_evictions_remove_only_the_evicted_entries(model):
    tokens = text(30)
    kept = [0, 3, *range(10, 30)]
    seen = run(model, tokens).stream
    stream = run(model, tokens, budget=30, slack=8, keep=lambda rows, **_: [kept] * len(rows)).stream
    for row, before in zip(stream.rows[0], seen.rows[0], strict=True):
        np.testing.assert_array_equal(row.pos, kept)
        for name in ("key", "value", "mass", "last"):
            np.testing.assert_allclose(getattr(row, name), getattr(before, name)[kept], **close)


def test_a_record_keeps_what_the_policy_writes_into_it(model):
    seen = []

    def keep(rows, *, next, **_):
        seen.append([[entry["old"] for entry in row] for row in rows])
        for row in rows:
            row[1]["old"] = next
        return [[entry["pos"] for entry in row[1:]] for row in rows]

    run(model, text(5), budget=4, slack=1, keep=keep)
    fresh, again = [False] * 4, [4, False, False, False]
    assert seen[: model.n_layer] == [[fresh] * model.n_head_kv] * model.n_layer
    assert seen[model.n_layer :] == [[again] * model.n_head_kv] * model.n_layer


def test_rows_are_numbered_through_all_layers(model):
    numbers = []

    def keep(rows, **_):
        numbers.extend(row[0]["row"] for row in rows)
        return [[0]] * len(rows)

    run(model, text(4), budget=4, slack=3, keep=keep)
    assert numbers == list(range(model.n_layer * model.n_head_kv))


def test_rows_of_different_lengths_are_refused(folder):
    model = write(folder)
    with pytest.raises(ValueError, match="the same number of entries"):
        run(model, text(5), budget=4, slack=2, keep=lambda rows, **_: [[0], [0, 1]])


@pytest.mark.parametrize(("kept", "match"), [([1, 0], "sorted"), ([1, 1], "sorted"), ([1, 9], "in the row")])
def test_invalid_kept_positions_are_refused(model, kept, match):
    with pytest.raises(ValueError, match=match):
        run(model, text(5), budget=4, slack=2, keep=lambda rows, **_: [kept] * len(rows))


def test_merging_a_value_into_itself_changes_nothing(model):
    def keep_and_merge(rows, **params):
        kept = keep_heavy(rows, **params)
        return kept, [{pos: [(pos, 1.0)] for pos in positions} for positions in kept]

    tokens = text(60)
    plain, merged = (
        run(model, tokens, budget=32, slack=4, keep=keep) for keep in (keep_heavy, keep_and_merge)
    )
    np.testing.assert_array_equal(merged.nll, plain.nll)


def test_a_merged_value_is_the_weighted_sum_of_values_before_any_merge():
    row = Row(0, 2, 2)
    row.append(np.arange(3), np.arange(3), np.zeros((3, 1)), np.array([[1.0, 0], [0, 1], [5, 5]]))
    row.keep([0, 1, 2])
    row.merge({0: [(0, 0.25), (1, 0.75)], 1: [(0, 2.0), (2, 1.0)]})
    np.testing.assert_array_equal(row.value, [[0.25, 0.75], [7, 5], [5, 5]])


def test_merge_uses_the_values_of_evicted_entries(one_layer):
    def keep(rows, **_):
        return [[0, 1, 3]] * len(rows), [{1: [(2, 1.0)]}] * len(rows)

    stream = run(one_layer, text(4), budget=4, slack=1, keep=keep).stream
    untouched = run(one_layer, text(4)).stream
    for row, before in zip(stream.rows[0], untouched.rows[0], strict=True):
        np.testing.assert_allclose(row.value, before.value[[0, 2, 3]], **close)
        np.testing.assert_allclose(row.key, before.key[[0, 1, 3]], **close)


def test_dequantize_gives_every_tensor_as_f32_with_its_metadata(folder):
    path = folder / "mixed.gguf"
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

    tiny.dequantize(path, folder / "f32.gguf")
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(folder / "f32.gguf")
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


def test_refuses_a_quantized_model(folder):
    path = folder / "f16.gguf"
    tiny.write_llama(path)
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[0].field.parts[4][0] = gguf.GGMLQuantizationType.I32
    reader.data.flush()
    with pytest.raises(ValueError, match="must be F32, got I32"):
        Llama(path)
