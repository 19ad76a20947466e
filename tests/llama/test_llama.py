"""The patched library, used through `Context`: edits and signals match their definitions."""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvtool.errors import InputError, LibraryError, OutOfMemory, UsageError
from kvtool.llama.cache import decoder
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama import library, log
from kvtool.llama.libllama.devices import has_gpu, library_info
from kvtool.llama.libllama.library import ABI, ENDS, api, check_library
from kvtool.llama.loaded import model as llama_model
from kvtool.llama.loaded.model import Model
from kvtool.policy import Merge, Signal, SignalRequest
from tests.engine import saved_state
from tests.engine.exact_engines import ON_CUDA, TOLERANCE
from tests.reference import transformer

SHAPE = {"n_layer": 2, "n_head": 4, "n_head_kv": 2, "head_dim": 64}
N_ROW = 4
BOTH = Signal.ATTENTION | Signal.LAST
NO_MOVES = np.empty((0, 4), np.int32)

# without flash attention V is stored transposed, and cannot be quantized
CACHES = [
    ("f32", "f32", "off"),
    ("f32", "f32", "on"),
    ("f16", "f16", "off"),
    ("f16", "f16", "on"),
    ("q8_0", "f16", "off"),
    ("q8_0", "q8_0", "on"),
]
every_cache = pytest.mark.parametrize(("type_k", "type_v", "flash"), CACHES)
either_path = pytest.mark.parametrize("force_graph", [False, True], ids=["host", "graph"])


@contextmanager
def start_context(path, n_cell=256, n_batch=64, signals=Signal.NONE, n_query=0, **options):
    exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_output": 1}
    request = SignalRequest(signals, n_query)
    with (
        closing(Model(path)) as model,
        closing(Context(model, n_cell, n_batch, request, **(exact | options))) as context,
    ):
        yield context


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, 259, n).astype(np.int32)


def fill(context, n, pos_0=0, seed=0):
    text = tokens(n, seed)
    for begin in range(0, n, context.n_batch):
        context.decode(text[begin : begin + context.n_batch], pos_0 + begin, 1)


def look(context):
    return saved_state.parse(context.state())


def moves_of(source, delta=None):
    """Return moves i32[n_move, 4] that copy cell source[row, i] to cell i of the row, for each row and i."""
    n_row, n = source.shape
    row, dst = np.divmod(np.arange(n_row * n), n)
    delta = np.zeros(n_row * n) if delta is None else delta.ravel()
    return np.stack([row, dst, source.ravel(), delta], axis=1).astype(np.int32)


def permutations(n, seed=0, n_row=N_ROW):
    return np.random.default_rng(seed).random((n_row, n)).argsort(axis=1)


def merge_of(terms):
    """Return a Merge. terms: [(row, dst, [(src, weight), ...]), ...]."""
    flat = [(row, dst, src, weight) for row, dst, sources in terms for src, weight in sources]
    row, dst, src, weight = zip(*flat, strict=True)
    i32 = (np.array(column, np.int32) for column in (row, dst, src))
    return Merge(*i32, np.array(weight, np.float32))


def by_row(state, tensor):
    """Return stored bytes u1[row, n, bytes of a head]."""
    return np.concatenate([state.rows(tensor, layer, 2).swapaxes(0, 1) for layer in range(2)])


def values_by_row(state):
    """Return f32[row, n, head_dim]."""
    return np.concatenate([state.values(layer, 2).swapaxes(0, 1) for layer in range(2)])


# moves


def test_exception_of_a_failed_allocation_is_reported_as_lack_of_memory(monkeypatch):
    monkeypatch.setattr(library, "error_text", lambda: "std::bad_alloc")
    with pytest.raises(OutOfMemory, match="^out of memory; choose a smaller --budget"):
        library.check(-1)
    monkeypatch.setattr(library, "error_text", lambda: "a reason")
    with pytest.raises(LibraryError, match="^llama.cpp refused: a reason$"):
        library.check(-1)


@every_cache
@either_path
def test_permutation_and_its_inverse_restore_every_byte(tiny_model, type_k, type_v, flash, force_graph):
    n = 37
    with start_context(tiny_model(**SHAPE), type_k=type_k, type_v=type_v, flash=flash) as context:
        fill(context, n)
        before = context.state()
        source = permutations(n)
        context.apply(moves_of(source), n, 0, force_graph=force_graph)
        was, now = saved_state.parse(before), look(context)
        assert now.v_is_transposed == (flash == "off")
        for tensor in ("k", "v"):
            expected = np.take_along_axis(by_row(was, tensor), source[:, :, None], axis=1)
            assert (expected != by_row(was, tensor)).any()
            assert (by_row(now, tensor) == expected).all()
        context.apply(moves_of(source.argsort(axis=1)), n, 0, force_graph=force_graph)
        assert context.state() == before


@pytest.mark.parametrize("flash", ["off", "on"])
@either_path
def test_a_permutation_alone_does_not_change_the_next_logits(tiny_model, flash, force_graph):
    n = 50

    def next_logits(*moves):
        with start_context(tiny_model(**SHAPE), flash=flash) as context:
            fill(context, n)
            for move in moves:
                context.apply(move, n, 0, force_graph=force_graph)
            context.decode(tokens(1, seed=9), n, 1)
            return context.logits().copy()

    # flash attention adds up in f16, whatever the type of the cache is
    tolerance = 1e-4 if flash == "off" else 2e-2
    plain = next_logits()
    assert np.abs(next_logits(moves_of(permutations(n))) - plain).max() < tolerance
    # for comparison: if the older half of each row overwrites the newer half, logits change far more
    wrong = moves_of(np.arange(n) % (n // 2) + np.zeros((N_ROW, 1), np.int64))
    assert np.abs(next_logits(wrong) - plain).max() > 0.5


def assert_before_the_next(pos, n, next_pos):
    assert len(pos) == n
    assert pos[-1] == next_pos - 1
    assert (pos[:-1] < pos[-1]).all()


@every_cache
def test_edits_in_host_memory_leave_the_same_bytes_as_the_graph(tiny_model, type_k, type_v, flash):
    n, n_keep = 60, 41
    rng = np.random.default_rng(3)
    keep = np.sort(rng.random((N_ROW, n)).argsort(axis=1)[:, :n_keep], axis=1)
    states = []
    for force_graph in (False, True):
        with start_context(tiny_model(**SHAPE), type_k=type_k, type_v=type_v, flash=flash) as context:
            fill(context, n)
            source = np.empty((N_ROW, n_keep), np.int64)
            for row, cells in enumerate(keep):
                low, tail = cells[cells < n_keep], cells[cells >= n_keep]
                source[row, low] = low
                source[row, np.setdiff1d(np.arange(n_keep), low)] = tail
            context.apply(moves_of(source), n_keep, n - n_keep, force_graph=force_graph)
            states.append(context.state())
    assert len(states[0]) > 0
    assert states[0] == states[1]
    assert_before_the_next(saved_state.parse(states[0]).pos, n_keep, n)


@either_path
def test_cells_past_the_kept_ones_are_free_again(tiny_model, force_graph):
    with start_context(tiny_model(**SHAPE), n_batch=64) as context:
        for _ in range(8):  # 512 tokens in all, twice the number of cells
            fill(context, 64, pos_0=len(look(context).pos) and 100)
            context.apply(NO_MOVES, 40, 60, force_graph=force_graph)
            assert_before_the_next(look(context).pos, 40, 100)


# merges


def expected_values(values, terms):
    """Return the values after merging by the definition: all sources are read before any value is written."""
    merged = values.copy()
    for row, dst, sources in terms:
        merged[row, dst] = sum(np.float32(weight) * values[row, src] for src, weight in sources)
    return merged


def random_terms(rng, n, counts):
    """Return terms of random merges: in each row, one merge for each number of source cells in `counts`.

    A source of one merge may be the destination of another.
    """
    terms = []
    for row in range(N_ROW):
        for dst, count in zip(rng.permutation(n), counts, strict=False):
            sources = rng.permutation(n)[:count]
            terms.append((row, int(dst), [(int(src), float(rng.normal())) for src in sources]))
    return terms


MERGES = {
    "one term": [1, 1],
    "two terms": [2] * 5,
    "three terms": [3, 3, 3],
    "five terms": [5],
    "a mixture": [1, 5, 2, 3, 2, 4],
    "every cell": [3] * 30,
}
VALUE_CACHES = [("f32", "off"), ("f32", "on"), ("f16", "off"), ("f16", "on"), ("q8_0", "on")]


def close(actual, expected, kind):
    """Return True if each head's values f32[..., head_dim] are `expected`, rounded once as the cache is."""
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    # q8_0 rounds twice: numbers to multiples of the scale, which is 1 / 127 of the largest number, and the
    # scale to f16
    rounding = {"f32": 0, "f16": 2**-11 * np.abs(expected), "q8_0": (1 / 254 + 2**-11) * largest}[kind]
    return (np.abs(actual - expected) <= rounding + 3e-6 * (1 + largest)).all()


@pytest.mark.parametrize("counts", MERGES.values(), ids=MERGES.keys())
@pytest.mark.parametrize(("type_v", "flash"), VALUE_CACHES)
@either_path
def test_merged_values_are_the_weighted_sums(tiny_model, counts, type_v, flash, force_graph):
    n = 30
    terms = random_terms(np.random.default_rng(len(counts)), n, counts)
    with start_context(tiny_model(**SHAPE), type_v=type_v, flash=flash) as context:
        fill(context, n)
        was = look(context)
        context.apply(NO_MOVES, n, 0, merge_of(terms), force_graph=force_graph)
        now = look(context)
    expected = expected_values(values_by_row(was), terms)
    assert (by_row(now, "k") == by_row(was, "k")).all()
    untouched = np.ones((N_ROW, n), np.bool_)
    for row, dst, _ in terms:
        untouched[row, dst] = False
    assert (by_row(now, "v")[untouched] == by_row(was, "v")[untouched]).all()
    assert close(values_by_row(now)[~untouched], expected[~untouched], type_v)
    assert (values_by_row(now)[~untouched] != values_by_row(was)[~untouched]).any()


@pytest.mark.parametrize("flash", ["off", "on"])
@pytest.mark.parametrize("delta", [0, -3], ids=["stays", "turns"])
@either_path
def test_a_merged_value_moves_with_its_cell_in_the_same_edit(tiny_model, flash, delta, force_graph):
    n, n_keep = 30, 20
    rng = np.random.default_rng(5)
    # evicted cells 25 and 3 are merged into cells 26 and 7. Then cell 26 moves into the hole at cell 3. Cell
    # 7 does not move
    terms = [(row, 26, [(26, 0.25), (25, 0.75)]) for row in range(N_ROW)]
    terms += [(row, 7, [(3, float(rng.normal())), (7, 1.0)]) for row in range(N_ROW)]
    moves = np.array([(row, 3, 26, delta) for row in range(N_ROW)], np.int32)
    with start_context(tiny_model(**SHAPE), flash=flash) as context:
        fill(context, n)
        was = look(context)
        context.apply(moves, n_keep, 10, merge_of(terms), force_graph=force_graph)
        now = look(context)
    expected = expected_values(values_by_row(was), terms)
    expected[:, 3] = expected[:, 26]
    assert np.abs(values_by_row(now) - expected[:, :n_keep]).max() < 1e-5
    keys = by_row(was, "k")[:, :n_keep].copy()
    if delta == 0:
        keys[:, 3] = by_row(was, "k")[:, 26]
        assert (by_row(now, "k") == keys).all()
    else:
        is_other = np.arange(n_keep) != 3
        assert (by_row(now, "k")[:, is_other] == keys[:, is_other]).all()


# rotation


# the tolerances allow for rounding to f16 or q8_0. A rotated key is rounded twice, but the expected key only
# once
@pytest.mark.parametrize("rope", ["norm", "neox"])
@pytest.mark.parametrize(
    ("type_k", "flash", "tolerance"),
    [("f32", "off", 1e-5), ("f32", "on", 1e-5), ("f16", "off", 1e-3), ("f16", "on", 1e-3)]
    + [("q8_0", "off", 0.02), ("q8_0", "on", 0.02)],
)
def test_rotated_key_equals_the_key_at_the_shifted_position(tiny_model, rope, type_k, flash, tolerance):
    n, start, shifts = 40, 100, [0, 1, -7, 300, -100]
    rng = np.random.default_rng(2)
    choice = rng.integers(0, len(shifts), (N_ROW, n))
    source = permutations(n, 4)
    keys = []
    for shift in shifts:
        # only the first layer is compared, because its keys depend only on the token and its position
        with start_context(tiny_model(rope=rope, **SHAPE), type_k=type_k, flash=flash) as context:
            fill(context, n, pos_0=start + shift)
            keys.append(look(context).keys(0, 2).swapaxes(0, 1))
    with start_context(tiny_model(rope=rope, **SHAPE), type_k=type_k, flash=flash) as context:
        fill(context, n, pos_0=start)
        context.apply(moves_of(source, np.array(shifts)[choice]), n, start)
        actual = look(context).keys(0, 2).swapaxes(0, 1)
    row = np.arange(2)[:, None]
    expected = np.stack(keys)[choice[:2], row, source[:2]]
    size = np.sqrt((expected**2).mean(axis=-1))
    error = np.sqrt(((actual - expected) ** 2).mean(axis=-1)) / size
    assert error.max() < tolerance
    # without the shift, keys differ far more
    assert (np.sqrt(((keys[0][row, source[:2]] - expected) ** 2).mean(axis=-1)) / size).max() > 0.5


@pytest.mark.parametrize("rope", ["norm", "neox"])
@pytest.mark.parametrize("yarn", [None, 4.0])
def test_rotated_key_matches_the_shift_of_llama_cpp(tiny_model, rope, yarn):
    shape = SHAPE | ({"yarn": yarn} if yarn else {})
    n, start, delta = 40, 100, 37
    with start_context(tiny_model(rope=rope, **shape)) as context:
        fill(context, n, pos_0=start)
        plain = look(context)
        memory = api.llama_get_memory(context._context)
        api.llama_memory_seq_add(memory, 0, 0, -1, delta)
        # the shift is only applied by the next decode
        fill(context, 1, pos_0=start + n + delta)
        expected = look(context)
    with start_context(tiny_model(rope=rope, **shape)) as context:
        fill(context, n, pos_0=start)
        stays = np.tile(np.arange(n), (N_ROW, 1))
        context.apply(moves_of(stays, np.full_like(stays, delta)), n, start + delta)
        actual = look(context)
    for layer in range(2):
        turned, shifted = actual.keys(layer, 2), expected.keys(layer, 2)[:n]
        # llama.cpp's own shift multiplies keys by YaRN's magnitude a second time. kvtool's shift does not
        yarn_scale = 1 + 0.1 * np.log(yarn) if yarn else 1
        assert np.abs(turned - shifted / yarn_scale).max() < 1e-4
        size = np.linalg.norm(plain.keys(layer, 2), axis=-1)
        assert np.abs(np.linalg.norm(turned, axis=-1) / size - 1).max() < 1e-4
        assert np.abs(turned - plain.keys(layer, 2)).max() > 0.5
    assert (by_row(actual, "v") == by_row(plain, "v")).all()


# signals

FIRST_LAYER = slice(0, 2)
# tolerance of sums of attention. The sums are up to 20, and flash attention rounds the inputs of the next
# layer to f16
F16_ROUNDING = 1e-2
# largest share of (row, cell) pairs that may differ: near the threshold of a hit, rounding decides
AT_THE_EDGE = 0.02


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize("flash", ["off", "on"])
@pytest.mark.parametrize("batches", [[1], [2], [3, 1], [7, 64, 1, 1], [64] * 6], ids=str)
def test_attention_sums_to_one_per_query_and_head(tiny_model, n_head_kv, flash, batches):
    path = tiny_model(**(SHAPE | {"n_head_kv": n_head_kv}))
    with start_context(path, n_cell=512, signals=BOTH, flash=flash) as context:
        begin, text = 0, tokens(sum(batches))
        for n in batches:  # with [64] * 6, attention has to cover more than 256 cells
            context.decode(text[begin : begin + n], begin, 1)
            begin += n
        attn, last = context.read(Signal.ATTENTION, 512), context.read(Signal.LAST, 512)
    group = 4 // n_head_kv
    assert attn.shape == (2 * n_head_kv, 512)
    assert np.abs(attn.sum(axis=1) / (group * begin) - 1).max() < 1e-4
    assert np.abs(last.sum(axis=1) / group - 1).max() < 1e-4
    assert (attn[:, begin:] == 0).all()
    assert (last[:, begin:] == 0).all()
    assert (attn[:, :begin] > 0).all()


@pytest.mark.parametrize("rope", ["norm", "neox"])
@pytest.mark.parametrize("flash", ["off", "on"])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_signals_match_the_definition_after_each_step(tiny_model, rope, flash, kind):
    path = tiny_model(rope=rope, **SHAPE)
    stream = transformer.Stream(transformer.load(path))
    with start_context(path, signals=BOTH, flash=flash, type_k=kind, type_v=kind) as context:
        for part in np.split(tokens(40), [23, 24, 25]):
            context.decode(part, stream.next, 1)
            stream.decode(part)
            rows = [row for rows in stream.rows for row in rows]
            for signal, name in ((Signal.ATTENTION, "mass"), (Signal.LAST, "last")):
                expected = np.stack([getattr(row, name) for row in rows])
                error = np.abs(context.read(signal, stream.next) - expected)
                assert error[FIRST_LAYER].max() < (TOLERANCE if kind == "f32" else F16_ROUNDING)
                assert error.max() < (TOLERANCE if (flash, kind) == ("off", "f32") else F16_ROUNDING)


@pytest.mark.parametrize("n_keep", [0, 5])
def test_an_edit_clears_the_signals(tiny_model, n_keep):
    with start_context(tiny_model(**SHAPE), signals=BOTH) as context:
        for read_before in (True, False):  # with and without a copy of the signals in host memory
            fill(context, 9)
            if read_before:
                assert context.read(Signal.ATTENTION, 9).any()
            context.apply(NO_MOVES, n_keep, 9 - n_keep)
            assert not context.read(Signal.ATTENTION, 256).any()
            assert not context.read(Signal.LAST, 256).any()
            context.apply(NO_MOVES, 0, 0)


@pytest.mark.parametrize("read_before", [True, False])
def test_clear_signals_keeps_cells_and_recent_attention(tiny_model, read_before):
    all_signals = Signal.RECENT | Signal.SQUARES | Signal.HITS | Signal.IMPORTANT | BOTH
    values = []
    for clear in (lambda c: c.clear_signals(), lambda c: c.apply(NO_MOVES, 40, 0)):
        with start_context(tiny_model(**SHAPE), signals=all_signals, n_query=9) as context:
            fill(context, 40)
            cells, recent = context.state(), context.history(Signal.RECENT, 40)
            if read_before:
                assert all(context.read(signal, 40).any() for signal in Signal if signal & all_signals)
            clear(context)
            assert context.state() == cells
            assert (context.history(Signal.RECENT, 40) == recent).all()
            assert not any(
                context.read(each, 256).any() for each in Signal if each & all_signals & ~Signal.RECENT
            )
            fill(context, 7, 40, seed=1)
            values.append([context.read(each, 47) for each in Signal if each & all_signals])
    np.testing.assert_allclose(*values, rtol=0, atol=1e-2 if ON_CUDA else 0)


def queries_ago(stream, since):
    """Return IMPORTANT by the definition, i64[row, cell]: how many queries ago the key was last important.

    The value is 1 if the key was important to the newest query. It is 0 if the key was important to no query
    with an index of at least `since`.
    """
    rows = [row for rows in stream.rows for row in rows]
    ago = np.zeros((len(rows), stream.next), np.int64)
    for number, row in enumerate(rows):
        for cell, steps in enumerate(row.seen):
            hits = [query for query, (t, heads) in enumerate(steps, cell) if max(heads) * t >= 1]
            if hits and hits[-1] >= since:
                ago[number, cell] = stream.next - hits[-1]
    return ago


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_important_counts_back_from_the_last_query(tiny_model, flash, every):
    # the signal is read after every batch or after every third batch
    stream, since = transformer.Stream(transformer.load(tiny_model(**SHAPE))), 0
    with start_context(tiny_model(**SHAPE), signals=Signal.IMPORTANT, flash=flash) as context:
        for number, n in enumerate([17, 1, 5, 1, 1, 30, 2, 1, 1, 7, 1, 1], 1):
            part = tokens(n, seed=number)
            context.decode(part, stream.next, 1)
            stream.decode(part)
            if number % every == 0:
                actual, expected = context.read(Signal.IMPORTANT, 256), queries_ago(stream, since)
                assert (actual[:, : stream.next] != expected).mean() < AT_THE_EDGE
                assert not actual[:, stream.next :].any()
            if number in (5, 7):
                # an edit clears IMPORTANT
                context.apply(NO_MOVES, stream.next, 0)
                since = stream.next
                assert not context.read(Signal.IMPORTANT, 256).any()


def test_important_continues_from_written_values(tiny_model):
    # written values are at least 100. Fewer than 100 queries are decoded below, so a value of 100 or more
    # comes from the write
    values = 100 + np.arange(N_ROW * 30).reshape(N_ROW, 30)
    values[:, ::7] = 0
    stream = transformer.Stream(transformer.load(tiny_model(**SHAPE)))
    stream.decode(tokens(30))
    with start_context(tiny_model(**SHAPE), signals=BOTH | Signal.IMPORTANT) as context:
        fill(context, 30)
        context.apply(NO_MOVES, 30, 0)
        # these two queries do not count, because the write below replaces all values
        context.decode(tokens(2), 30, 1)
        stream.decode(tokens(2))
        context.write(Signal.IMPORTANT, np.pad(values, ((0, 0), (0, 2))))
        n = 0
        for n_batch, reads in ((1, True), (4, False), (1, True), (1, False), (3, True)):
            part = tokens(n_batch, seed=n)
            context.decode(part, stream.next, 1)
            stream.decode(part)
            n += n_batch
            if reads:
                actual, expected = context.read(Signal.IMPORTANT, 30), queries_ago(stream, 32)[:, :30]
                assert (expected == 0).any()
                before = np.where(values > 0, values + n, 0)
                assert (actual != np.where(expected > 0, expected, before)).mean() < AT_THE_EDGE


def last_queries(context, n_query, n):
    """Return the reference's attention f32[query, row, n] of the last n_query queries.

    All n tokens are decoded at once.
    """
    model = transformer.load(context.model.path)
    stream = transformer.Stream(model)
    stream.decode(tokens(n))
    recent = np.zeros((n_query, N_ROW, n))
    for number, row in enumerate(row for rows in stream.rows for row in rows):
        for cell, steps in enumerate(row.seen):
            for query, (_, heads) in enumerate(steps, cell - (n - n_query)):
                if query >= 0:
                    recent[query, number, cell] = sum(heads)
    return recent


@pytest.mark.parametrize("batches", [[40], [33, 7], [39, 1], [3] * 13 + [1]])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_recent_attention_is_stored_per_query(tiny_model, batches, flash):
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=9, flash=flash) as context:
        begin = 0
        for n in batches:
            context.decode(tokens(40)[begin : begin + n], begin, 1)
            begin += n
        history = context.history(Signal.RECENT, 40)
        expected = last_queries(context, 9, 40)
        tolerance = TOLERANCE if flash == "off" else 2e-2
        np.testing.assert_allclose(history, expected, atol=tolerance)
        np.testing.assert_allclose(context.read(Signal.RECENT, 40), history.sum(axis=0), atol=1e-6)


@either_path
@pytest.mark.parametrize("ragged", [False, True])
def test_edit_moves_recent_attention_with_its_cells(tiny_model, ragged, force_graph):
    n, n_keep = 30, np.array([11, 11, 11, 11] if not ragged else [11, 3, 0, 8])
    rows = n_keep if ragged else None
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=7, ragged=ragged) as context:
        fill(context, n)
        before = context.history(Signal.RECENT, n)
        assert (before.sum(axis=(0, 2)) > 6).all()
        # the edit also merges values and rotates some of the moved keys. Neither changes recent attention
        source = permutations(n)[:, :11]
        delta = np.random.default_rng(3).integers(0, 3, source.shape)
        merge = merge_of([(0, 2, [(5, 0.5), (2, 0.5)]), (3, 1, [(1, 0.5), (20, 0.5)])])
        context.apply(moves_of(source, delta), 11, n - 11, merge, n_keep_row=rows, force_graph=force_graph)
        expected = np.take_along_axis(before, source[None], axis=2)
        expected[:, np.arange(11) >= n_keep[:, None]] = 0
        np.testing.assert_array_equal(context.history(Signal.RECENT, n)[..., :11], expected)
        assert not context.history(Signal.RECENT, n)[..., 11:].any()
        # new queries replace the oldest queries, and a new cell has no attention from earlier queries
        context.decode(tokens(2, seed=1), n, 1)
        after = context.history(Signal.RECENT, 13)
        np.testing.assert_array_equal(after[:5, :, :11], expected[2:])
        for row, end in enumerate(n_keep):
            assert not after[:5, row, end:].any()
            assert (after[5:, row, end] > 0).all()
            assert after[5:, row, : end + 2].sum() == pytest.approx(2 * 2, abs=TOLERANCE)


def test_hidden_cells_leave_recent_attention_empty(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=7) as context:
        fill(context, 30)
        context.hide(30)
        assert not context.history(Signal.RECENT, 30).any()
        context.decode(tokens(3), 0, 1)
        # the three new tokens only see each other
        assert context.read(Signal.RECENT, 33)[:, 30:].sum(axis=1) == pytest.approx(3 * 2, abs=TOLERANCE)


def test_recent_attention_continues_from_written_values(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=7) as context:
        fill(context, 30)
        cells = [context.cells(layer, 30) for layer in range(2)]
        history = context.history(Signal.RECENT, 30)
        context.decode(tokens(3), 30, 1)
        expected = context.read(Signal.RECENT, 33)
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=7) as context:
        # decode 45 tokens, not 30 as above, so that the oldest query is at another index of the ring buffer
        fill(context, 45, seed=5)
        for layer in range(2):
            context.set_cells(layer, 30, cells[layer])
        context.apply(NO_MOVES, 30, 0)
        context.write(Signal.RECENT, history)
        np.testing.assert_array_equal(context.history(Signal.RECENT, 30), history)
        context.decode(tokens(3), 30, 1)
        np.testing.assert_array_equal(context.read(Signal.RECENT, 33), expected)


def test_recent_attention_of_another_number_of_queries_is_refused(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.RECENT, n_query=7) as context:
        with pytest.raises(LibraryError, match="n_query must be 7, got 8"):
            context.write(Signal.RECENT, np.zeros((8, N_ROW, 5)))
        with pytest.raises(LibraryError, match=r"n_row must be 4 and n_cell in 0\.\.256, got 3 and 5"):
            context.write(Signal.RECENT, np.zeros((7, 3, 5)))
    refusal = pytest.raises(LibraryError, match="signal 4 is not enabled")
    with start_context(tiny_model(**SHAPE), signals=BOTH) as context, refusal:
        context.history(Signal.RECENT, 5)


def test_reading_a_signal_that_is_not_enabled_is_refused(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.LAST) as context:
        fill(context, 5)
        assert context.read(Signal.LAST, 5).any()
        with pytest.raises(LibraryError, match="signal 1 is not enabled"):
            context.read(Signal.ATTENTION, 5)
        with pytest.raises(LibraryError, match="signal 3 is not enabled"):
            context.read(BOTH, 5)
    with start_context(tiny_model(**SHAPE)) as context:
        fill(context, 5)
        with pytest.raises(LibraryError, match="not enabled"):
            context.read(Signal.LAST, 5)


# refused calls


N_CELL = 256
GOOD_MOVE = (0, 1, 2, 0)
GOOD_TERM = (0, 1, [(2, 0.5), (3, 0.5)])
BAD_MOVES = {
    "row negative": [(-1, 1, 2, 0)],
    "row too large": [(N_ROW, 1, 2, 0)],
    "row far too large": [(2**31 - 1, 1, 2, 0)],
    "dst negative": [(0, -1, 2, 0)],
    "dst too large": [(0, N_CELL, 2, 0)],
    "src negative": [(0, 1, -1, 5)],
    "src too large": [(0, 1, N_CELL, 0)],
    "src far too large": [(0, 1, -(2**31), 0)],
    "dst twice": [(1, 7, 2, 0), (1, 8, 2, 0), (1, 7, 3, 0)],
    "dst twice, once turned": [(1, 7, 2, 0), (1, 7, 3, 4)],
    "bad after good": [GOOD_MOVE, (0, 2, N_CELL, 0)],
}
BAD_TERMS = {
    "row negative": [(-1, 1, [(2, 1.0)])],
    "row too large": [(N_ROW, 1, [(2, 1.0)])],
    "dst negative": [(0, -1, [(2, 1.0)])],
    "dst too large": [(0, N_CELL, [(2, 1.0)])],
    "src negative": [(0, 1, [(-1, 1.0)])],
    "src too large": [(0, 1, [(N_CELL, 1.0)])],
    "weight NaN": [(0, 1, [(2, float("nan"))])],
    "weight infinite": [(0, 1, [(2, float("inf"))])],
    "weight minus infinite": [GOOD_TERM, (1, 1, [(2, -float("inf"))])],
    "terms of a destination apart": [(0, 1, [(2, 0.5)]), (0, 4, [(5, 1.0)]), (0, 1, [(3, 0.5)])],
}
BAD_RANGES = {
    "n_keep negative": (-1, 0),
    "n_keep too large": (N_CELL + 1, 0),
    "pos_0 negative": (10, -1),
    "pos_0 too large": (10, 2**31 - 1),
}


@contextmanager
def assert_refused(context):
    """Assert that the edit inside raises LibraryError and does not change any byte of the cache."""
    before = context.state()
    with pytest.raises(LibraryError, match="llama.cpp refused: .+"):
        yield
    assert context.state() == before
    assert len(before) > 1000


@pytest.fixture
def filled_context(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.ATTENTION) as context:
        fill(context, 20)
        yield context


@pytest.mark.parametrize("moves", BAD_MOVES.values(), ids=BAD_MOVES.keys())
@either_path
def test_invalid_moves_are_refused(filled_context, moves, force_graph):
    moves = np.array(moves, np.int64).astype(np.int32)
    with assert_refused(filled_context):
        filled_context.apply(moves, 20, 0, force_graph=force_graph)


@pytest.mark.parametrize("terms", BAD_TERMS.values(), ids=BAD_TERMS.keys())
@either_path
def test_invalid_merges_are_refused(filled_context, terms, force_graph):
    with assert_refused(filled_context):
        filled_context.apply(np.array([GOOD_MOVE]), 20, 0, merge_of(terms), force_graph=force_graph)


@pytest.mark.parametrize(("n_keep", "pos_0"), BAD_RANGES.values(), ids=BAD_RANGES.keys())
def test_invalid_cell_counts_and_positions_are_refused(filled_context, n_keep, pos_0):
    with assert_refused(filled_context):
        filled_context.apply(np.array([GOOD_MOVE]), n_keep, pos_0)


def test_a_refused_edit_keeps_the_signals(filled_context):
    before = filled_context.read(Signal.ATTENTION, 20)
    with assert_refused(filled_context):
        filled_context.apply(NO_MOVES, -1, 0)
    assert (filled_context.read(Signal.ATTENTION, 20) == before).all()


def test_reading_more_cells_than_there_are_is_refused(filled_context):
    with pytest.raises(LibraryError, match="n_row must be 4 and n_cell in 0..256, got 4 and 257"):
        filled_context.read(Signal.ATTENTION, 257)


# sizes, hidden cells, keys, ragged rows


@every_cache
def test_resizing_the_cache_keeps_every_byte_and_the_logits(tiny_model, type_k, type_v, flash):
    caches = {"type_k": type_k, "type_v": type_v, "flash": flash}
    options = {"signals": BOTH | Signal.RECENT, "n_query": 7}
    with start_context(tiny_model(**SHAPE), **options, **caches) as context:
        fill(context, 70)
        small, before = context.cache_bytes, context.state()
        attention, recent = context.read(Signal.ATTENTION, 70), context.history(Signal.RECENT, 256)
        for n_cell in (1024, 512, 256):
            context.resize(np.full(2, n_cell))
            assert context.cache_bytes == small * n_cell // 256
            assert context.state() == before
            assert (context.read(Signal.ATTENTION, 70) == attention).all()
            history = context.history(Signal.RECENT, n_cell)
            assert (history[..., :256] == recent).all()
            assert not history[..., 256:].any()
        context.decode(tokens(3), 70, 1)
        after = context.logits().copy(), context.state()
    with start_context(tiny_model(**SHAPE), **options, **caches) as context:
        fill(context, 70)
        context.decode(tokens(3), 70, 1)
        assert (context.logits() == after[0]).all()
        assert context.state() == after[1]


def test_no_memory_tolerates_lines_logged_by_another_thread(monkeypatch):
    class Line(str):
        def __contains__(self, word):
            log.log_tail.append("another error")
            return False

    monkeypatch.setattr(log, "log_tail", deque([Line("an error")] * 2, 8))
    assert not log.no_memory()


def test_a_larger_cache_holds_more_tokens(tiny_model):
    with start_context(tiny_model(**SHAPE)) as context:
        fill(context, 256)
        with pytest.raises(LibraryError, match=r"cannot decode \(status 1\)"):
            context.decode(tokens(1), 256, 1)
        context.resize(np.full(2, 512))
        fill(context, 256, 256)
        assert len(look(context).pos) == 512


def test_step_without_memory_suggests_a_smaller_budget(tiny_model, monkeypatch):
    def decode(*_):
        log.log_tail.append("ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 8")
        return -2

    with start_context(tiny_model(**SHAPE)) as context:
        monkeypatch.setattr(decoder.api, "llama_decode", decode)
        with pytest.raises(OutOfMemory, match="for a step of 3 tokens: .*; choose a smaller --budget"):
            context.decode(tokens(3), 0, 1)
        monkeypatch.undo()
        context.decode(tokens(3), 0, 1)


@pytest.mark.parametrize(
    ("n_cell", "complaint"),
    [
        ([256], "n_layer must be 2, got 1"),
        ([256, 256, 256], "n_layer must be 2, got 3"),
        ([19, 19], "layer 0: 19 cells cannot hold its 20 tokens"),
        ([-1, -1], "layer 0: -1 cells"),
        ([256, 512], "only ragged rows may differ"),
    ],
)
def test_invalid_cache_sizes_are_refused(filled_context, n_cell, complaint):
    before = filled_context.state()
    with pytest.raises(LibraryError, match=complaint):
        filled_context.resize(np.array(n_cell))
    assert filled_context.state() == before
    assert filled_context.n_cell == 256


def test_hidden_cells_stay_and_get_no_attention(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.ATTENTION) as context:
        fill(context, 30)
        before = values_by_row(look(context))
        context.hide(30)
        fill(context, 9, seed=1)
        expected = context.logits().copy()
        assert not context.read(Signal.ATTENTION, 39)[:, :30].any()
        context.apply(NO_MOVES, 39, 0)
        assert (values_by_row(look(context))[:, :30] == before).all()
        context.apply(NO_MOVES, 0, 0)
        fill(context, 9, seed=1)
        assert np.abs(context.logits() - expected).max() < 1e-5


def test_hidden_cells_stay_hidden_when_the_cache_grows(tiny_model):
    with start_context(tiny_model(**SHAPE), signals=Signal.ATTENTION) as context:
        fill(context, 30)
        context.hide(30)
        context.resize(np.full(2, 512))
        # new tokens may have the positions of hidden cells, because no query sees hidden cells
        fill(context, 9, seed=1)
        context.resize(np.full(2, 1024))
        context.decode(tokens(1), 9, 1)
        assert not context.read(Signal.ATTENTION, 40)[:, :30].any()
        assert look(context).pos.tolist() == list(range(10))


def test_failed_resize_leaves_the_cache_unchanged(tiny_model):
    with start_context(tiny_model(**SHAPE), ragged=True, signals=Signal.ATTENTION) as context:
        fill(context, 12)
        n_bytes = context.cache_bytes
        with pytest.raises(LibraryError, match="no memory for the cache"):
            context.resize(np.array([300, 2**31 - 1]))
        assert context.cache_bytes == n_bytes
        assert context.read(Signal.ATTENTION, 12).any()
        context.decode(tokens(3), 12, 1)


class BufferType(ctypes.Structure):
    """The first fields of ggml_backend_buffer_type_i."""

    _fields_ = [("get_name", ctypes.c_void_p), ("alloc_buffer", ctypes.c_void_p)]


@contextmanager
def failing_caches(*fails):
    """Let allocation n of cache tensors in host memory fail if fails[n]. Yield the unused part of `fails`."""
    get = library.lib.ggml_backend_cpu_buffer_type
    get.restype = ctypes.POINTER(BufferType)
    kind, unused = get().contents, list(fails)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    address = kind.alloc_buffer
    real = function(address)

    @function
    def alloc(buffer_type, size):
        is_cache = size > 100_000
        return None if is_cache and unused and unused.pop(0) else real(buffer_type, size)

    kind.alloc_buffer = ctypes.cast(alloc, ctypes.c_void_p).value
    try:
        yield unused
    finally:
        kind.alloc_buffer = address


in_host_memory = pytest.mark.skipif(has_gpu(), reason="the cache is not in host memory")


def test_model_without_memory_suggests_a_smaller_model(tiny_model, monkeypatch):
    monkeypatch.setattr(api, "llama_model_load_from_file", lambda path, params: None)
    monkeypatch.setattr(llama_model, "no_memory", lambda: True)
    monkeypatch.setattr(llama_model, "has_gpu", lambda: False)
    with pytest.raises(OutOfMemory, match="^no memory for .*; choose a smaller model$"):
        Model(tiny_model(**SHAPE))
    monkeypatch.setattr(llama_model, "has_gpu", lambda: True)
    with pytest.raises(OutOfMemory, match="; choose fewer --gpu-layers, or a smaller model$"):
        Model(tiny_model(**SHAPE))


@in_host_memory
@pytest.mark.parametrize(
    ("signals", "before"),
    # `before` allocations succeed, and the next two fail. Without RECENT, the order is: cells, compute
    # buffers, compute buffers again. With RECENT it is: cells, compute buffers, recent attention, compute
    # buffers again
    [(Signal.NONE, 0), (Signal.NONE, 1), (Signal.NONE, 2), (Signal.RECENT, 2), (Signal.RECENT, 3)],
)
def test_failed_allocation_of_a_cache_raises_out_of_memory(tiny_model, signals, before):
    path = tiny_model(**SHAPE)
    with failing_caches(*[False] * before, True, True) as unused:
        refusal = pytest.raises(
            OutOfMemory,
            match=r"^no memory for a cache of 512 cells and batches of \d+ tokens: .*; choose a smaller",
        )
        with refusal, start_context(path, 512, signals=signals, n_query=30 if signals else 0):
            pass
    assert len(unused) < 2


@in_host_memory
@pytest.mark.parametrize(
    ("signals", "fails"),
    # True means that an allocation fails. With NONE, the second layer gets no cells. With RECENT, both layers
    # get cells. Then the memory for recent attention is refused on the device, and again in host memory
    [(Signal.NONE, [False, True]), (Signal.RECENT, [False, False, True, True])],
    ids=["second layer", "recent attention"],
)
def test_a_resize_without_memory_is_undone(tiny_model, signals, fails):
    with start_context(tiny_model(**SHAPE), signals=signals, n_query=30 if signals else 0) as context:
        fill(context, 12)
        before = context.state(), signals and context.history(signals, 256).tobytes()
        refusal = pytest.raises(LibraryError, match="no memory for the cache$")
        with failing_caches(*fails) as unused, refusal:
            context.resize(np.full(2, 512))
        assert not unused
        assert (context.state(), signals and context.history(signals, 256).tobytes()) == before
        context.decode(tokens(3), 12, 1)
        assert np.isfinite(context.logits()).all()


@in_host_memory
@pytest.mark.parametrize("n_cell", [(512, 1024), (512, 256)], ids=["growing", "shrinking"])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_failed_undo_of_a_resize_makes_the_context_unusable(tiny_model, flash, n_cell):
    with start_context(tiny_model(**SHAPE), n_cell[0], signals=BOTH, flash=flash) as context:
        fill(context, 12)
        message = "no memory to resize the cache, nor to undo it; close this context and open a new one"
        with failing_caches(False, True, True) as unused, pytest.raises(LibraryError, match=message):
            context.resize(np.full(2, n_cell[1]))
        assert not unused
        for use in (
            lambda: context.decode(tokens(3), 12, 1),
            lambda: context.apply(NO_MOVES, 12, 0),
            lambda: context.read(Signal.ATTENTION, 12),
            lambda: context.cells(0, 12),
            lambda: context.resize(np.full(2, n_cell[0])),
            lambda: context.read_keys(np.zeros(N_ROW), np.zeros((N_ROW, 1))),
        ):
            with pytest.raises(LibraryError, match=message):
                use()


def test_decode_without_room_in_ragged_rows_changes_nothing(tiny_model):
    with start_context(tiny_model(**SHAPE), ragged=True) as context:
        fill(context, 12)
        context.resize(np.array([16, 14]))
        with pytest.raises(LibraryError, match=r"layer 1: 14 cells cannot hold 12 \+ 3 tokens"):
            context.decode(tokens(3), 12, 1)
        context.decode(tokens(2), 12, 1)
        assert np.isfinite(context.logits()).all()


def test_reading_keys_of_missing_cells_is_refused(filled_context):
    with pytest.raises(LibraryError, match="row 2 has 256 cells, of which cells 255..257 were asked for"):
        filled_context.read_keys(np.array([0, 0, 255, 0]), np.zeros((4, 3)))
    with pytest.raises(LibraryError, match="row 0 has 256 cells, of which cells -1..1 were"):
        filled_context.read_keys(np.array([-1, 0, 0, 0]), np.zeros((4, 3)))
    with pytest.raises(LibraryError, match="n_row must be 4"):
        filled_context.read_keys(np.zeros(3), np.zeros((3, 3)))
    assert filled_context.read_keys(np.zeros(4), np.zeros((4, 0))).shape == (4, 0, 64)


@pytest.mark.parametrize("type_k", ["f32", "f16", "q8_0"])
def test_read_keys_returns_stored_keys_with_the_requested_rotation(tiny_model, type_k):
    with start_context(tiny_model(**SHAPE), type_k=type_k, type_v="f16") as context:
        fill(context, 12)
        first = np.array([0, 3, 5, 1])
        keys = context.read_keys(first, np.zeros((4, 7)))
        stored_cells = look(context)
        stored_cells = np.concatenate([stored_cells.keys(layer, 2).swapaxes(0, 1) for layer in range(2)])
        for row in range(N_ROW):
            expected = stored_cells[row, first[row] : first[row] + 7]
            # quantized keys are stored after a Hadamard rotation, so only products of keys are compared
            assert np.abs(keys[row] @ keys[row].T - expected @ expected.T).max() < 1e-2
        turned = context.read_keys(first, np.full((4, 7), 9))
        assert np.abs(turned - keys).max() > 0.1
        assert np.abs(np.linalg.norm(turned, axis=2) - np.linalg.norm(keys, axis=2)).max() < 1e-2


@pytest.mark.parametrize(("type_v", "flash"), VALUE_CACHES)
def test_ragged_rows_are_edited_and_resized_independently(tiny_model, type_v, flash):
    if type_v == "q8_0" and has_gpu():
        pytest.skip("refused there")
    counts = np.array([3, 9, 1, 5])
    with start_context(tiny_model(**SHAPE), ragged=True, type_v=type_v, type_k="f32", flash=flash) as context:
        fill(context, 12)
        context.apply(NO_MOVES, 9, 3, n_keep_row=counts)
        keys = [context.read_keys(np.zeros(4), np.zeros((4, 1)))]
        context.resize(np.array([16, 8]))
        keys.append(context.read_keys(np.zeros(4), np.zeros((4, 1))))
        assert (keys[0] == keys[1]).all()
        assert context.layer_cells.tolist() == [16, 8]
        # a new token is stored at the end of each row
        context.decode(tokens(2), 12, 1)
        with pytest.raises(LibraryError, match="layer 1: 6 cells cannot hold its 7 tokens"):
            context.resize(np.array([16, 6]))
        with pytest.raises(LibraryError, match="row 3 has 8 cells, of which cells 5..8 were"):
            context.read_keys(counts, np.zeros((4, 4)))
        assert np.isfinite(context.logits()).all()


@pytest.mark.parametrize(
    ("n_keep", "n_keep_row", "complaint"),
    [
        (9, None, "n_keep_row must not be null"),
        (9, [3, 10, 1, 5], "row 1: n_keep must be in 0..9, got 10"),
        (9, [3, 9, -1, 5], "row 2: n_keep must be in 0..9, got -1"),
    ],
)
def test_invalid_cell_counts_of_ragged_rows_are_refused(tiny_model, n_keep, n_keep_row, complaint):
    with start_context(tiny_model(**SHAPE), ragged=True) as context:
        fill(context, 12)
        rows = None if n_keep_row is None else np.array(n_keep_row)
        with pytest.raises(LibraryError, match=complaint):
            context.apply(NO_MOVES, n_keep, 0, n_keep_row=rows)
        with pytest.raises(LibraryError, match="rows hold different numbers of cells"):
            context.state()


def test_cell_counts_per_row_are_refused_without_ragged_rows(filled_context):
    with assert_refused(filled_context):
        filled_context.apply(NO_MOVES, 5, 0, n_keep_row=np.full(4, 5))


def test_properties_of_all_tokens_are_those_of_each_token(smol, tiny_model):
    for path in (smol, tiny_model()):
        with closing(Model(path, vocab_only=True)) as model:
            every = range(model.n_vocab)
            assert model.pieces() == [model.piece(token, special=True) for token in every]
            assert model.ends == tuple(filter(model.ends_turn, every)) != ()
            attrs = [api.llama_vocab_get_attr(model.vocab, token) for token in every]
            assert (model.token_attrs & ~ENDS).tolist() == attrs
            assert len(set(attrs)) > 1


@pytest.mark.parametrize("token", [-1, 320, 10**6])
def test_piece_of_an_unknown_token_is_refused(tiny_model, token):
    message = rf"token {token} is not in the vocabulary, which is 0\.\.319"
    with closing(Model(tiny_model(**SHAPE))) as model, pytest.raises(UsageError, match=message):
        model.piece(token)


def test_text_with_half_a_surrogate_pair_is_refused(tiny_model):
    message = "the text is not Unicode: character 3 is half of a pair"
    with closing(Model(tiny_model(**SHAPE))) as model, pytest.raises(InputError, match=message):
        model.tokenize("caf\udce9")


# unusable libraries and settings


def test_library_of_another_abi_is_refused_with_build_advice(monkeypatch):
    monkeypatch.setattr(library, "ABI", ABI + 1)
    with pytest.raises(LibraryError) as caught:
        check_library()
    message = str(caught.value)
    assert "\n" not in message
    assert f"ABI {ABI}," in message
    assert f"ABI {ABI + 1};" in message
    assert "make setup" in message


def test_loaded_library_has_the_right_abi():
    check_library()
    info = library_info()
    assert info["abi"] == info["abi_wanted"]


def test_a_quantized_v_cache_without_flash_attention_is_a_usage_error(tiny_model):
    with (
        pytest.raises(UsageError, match="needs flash attention"),
        start_context(tiny_model(**SHAPE), type_v="q8_0", flash="off"),
    ):
        pass
