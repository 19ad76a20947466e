"""Budgets in the forms in which people write them."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from kvtool.config import sizes
from kvtool.errors import UsageError
from kvtool.models.layers import Kind, Layer, Layers

N_CTX_TRAIN = 1000

PLAIN = Layers(tuple(Layer(i, Kind.ROWS, i, 2, 32, 32, 0) for i in range(2)))
"""Two layers with two KV heads. A cell takes 512 bytes: 32 + 32 numbers in f16 per head."""

HYBRID = Layers(
    (*PLAIN.all, Layer(2, Kind.SLIDING, 2, 2, 32, 32, 0), Layer(3, Kind.RECURRENT, 3, 0, 0, 0, 12345)),
    n_swa=200,
)
"""The layers of PLAIN, a layer with a sliding window, and a recurrent layer.

The window has 200 tokens, and each of its cells takes 256 bytes. The recurrent layer has a state of 12,345
bytes.
"""


def parse(text, layers=PLAIN, n_batch=64, **types):
    return sizes.parse(text, N_CTX_TRAIN).cells(layers, n_batch, **types)


@pytest.mark.parametrize(
    ("text", "n"), [("512", 512), (" 12 ", 12), ("10%", 100), ("0.19%", 1), ("99.99%", 999), ("100%", 1000)]
)
def test_a_budget_is_tokens_or_a_share_rounded_down(text, n):
    # tokens and shares do not depend on the model's layers
    for layers in (PLAIN, HYBRID):
        assert parse(text, layers) == (n, 64)
    assert not sizes.parse(text, N_CTX_TRAIN).in_bytes


@pytest.mark.parametrize("text", ["32.3%", "64.1%", "64.6%", "65.1%"])
def test_share_of_the_context_has_no_rounding_error(text):
    assert parse(text) == (int(text.replace(".", "").rstrip("%")), 64)


def test_share_of_a_prompt_is_rounded_down():
    assert [sizes.share(Decimal(50), n) for n in range(200)] == [n // 2 for n in range(200)]


def test_byte_budget_gives_multiples_of_256_cells_up_to_the_context():
    assert PLAIN.cell_bytes() == 512
    assert parse("255KiB") == (256, 64)
    assert parse(f"{2 * 256 * 512 - 1}B") == (256, 64)
    assert parse(f"{2 * 256 * 512}B") == (512, 64)
    assert parse("1GiB") == (1000, 64)
    # a batch has at most a quarter of the cache's cells
    assert [parse(text, n_batch=256) for text in ("255KiB", "256KiB", "1GiB")] == [
        (256, 64),
        (512, 128),
        (1000, 250),
    ]


def test_byte_budget_includes_sliding_windows_and_recurrent_states():
    # a sliding layer has cells for its window of 200 tokens and for a batch, rounded up to a multiple of 256.
    # It has 512 cells if a batch has 64 tokens, and 256 cells if a batch has 30
    for n_batch, n_cell in ((64, 512), (30, 256)):
        fixed = n_cell * 256 + 12345
        assert parse(f"{fixed + 512 * 512}B", HYBRID, n_batch) == (512, n_batch)
        assert parse(f"{fixed + 512 * 512 - 1}B", HYBRID, n_batch) == (256, n_batch)


def test_batch_shrinks_if_window_and_batch_exceed_a_small_budget():
    # the window of 400 tokens takes 768 cells with a batch of 256 tokens, but only 512 cells with up to 112
    # tokens
    small = replace(HYBRID, n_swa=400)
    fixed = 512 * 256 + 12345
    assert small.swa_bytes(256) == 768 * 256
    assert parse(f"{fixed + 256 * 512}B", small, 256) == (256, 64)
    assert parse(f"{fixed + 512 * 512 - 1}B", small, 256) == (256, 64)
    # a batch of 64 tokens, a quarter of the cache, does not fit here. The largest batch that fits has 12
    # tokens
    tight = replace(HYBRID, n_swa=500)
    assert parse(f"{fixed + 256 * 512}B", tight, 256) == (256, 12)
    assert parse(f"{fixed + 256 * 512}B", tight, 8) == (256, 8)
    with pytest.raises(UsageError, match=r"its smallest cache \(256 tokens\) takes 268.1 KiB$"):
        parse(f"{fixed + 256 * 512 - 1}B", tight, 256)


def test_more_bytes_never_give_fewer_cells():
    for n_swa in (100, 255, 256, 400, 500):
        for n_batch in (1, 64, 256, 512):
            layers = replace(HYBRID, n_swa=n_swa)
            last = 0
            for n_bytes in range(layers.smallest_bytes(), 2**20, 999):
                n, batch = layers.cache_that_fits(n_bytes, N_CTX_TRAIN, n_batch)
                assert last <= n <= N_CTX_TRAIN
                assert 1 <= batch <= min(n_batch, n // 4)
                assert n * 512 + layers.fixed_bytes(batch) <= n_bytes
                last = n
            assert last == N_CTX_TRAIN


def test_byte_budget_depends_on_the_cache_types():
    # 32 numbers take 34 bytes in q8_0 and 128 bytes in f32
    assert parse(f"{512 * 4 * 2 * 34}B", type_k="q8_0", type_v="q8_0") == (512, 64)
    assert parse(f"{512 * 4 * 2 * 34 - 1}B", type_k="q8_0", type_v="q8_0") == (256, 64)
    assert parse(f"{512 * 4 * (128 + 34)}B", type_k="f32", type_v="q8_0") == (512, 64)
    with pytest.raises(UsageError, match="unknown cache type 'q9' for V"):
        parse("64MiB", type_v="q9")


def test_budget_below_the_smallest_cache_is_refused():
    # the window of 200 tokens and a batch of 56 tokens fit in 256 cells
    smallest = 256 * 512 + 256 * 256 + 12345
    assert parse(f"{smallest}B", HYBRID) == (256, 56)
    with pytest.raises(UsageError) as error:
        parse(f"{smallest - 1}B", HYBRID)
    assert str(error.value) == (
        f"{smallest - 1}B is too small for this model: its smallest cache (256 tokens) takes 204.1 KiB"
    )
    # 204.01 KiB are rounded up, because the size in the message must be accepted
    layers = replace(HYBRID, all=(*HYBRID.all[:-1], HYBRID.all[-1]._replace(recurrent_bytes=12300)))
    with pytest.raises(UsageError, match=r"takes 204\.1 KiB$"):
        parse("204.0KiB", layers)
    assert parse("204.1 KiB", layers)[0] == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0%", "above 0% and at most 100%"),
        ("101%", "above 0% and at most 100%"),
        ("nan%", "above 0% and at most 100%"),
        ("-5%", "above 0% and at most 100%"),
        ("0.05%", r"0.05% of the trained context \(1,000 tokens\) is less than 1 token"),
        ("12x", r"tokens \(512\), a share of the trained context \(10%\) or bytes \(64MiB\), got '12x'"),
        ("1.5", r"got '1.5'; or a unit is missing: 1\.5MiB$"),
        (".5", r"got '\.5'; or a unit is missing: 0\.5MiB$"),
        ("1KiB", "^1KiB is too small for this model: its smallest cache .256 tokens. takes 128.0 KiB$"),
    ],
)
def test_invalid_budgets_are_refused_in_one_line(text, words):
    with pytest.raises(UsageError, match=words) as error:
        parse(text)
    assert "\n" not in str(error.value)
