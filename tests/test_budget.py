"""Budgets as people write them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from kvtool.errors import UsageError
from kvtool.models import budget
from kvtool.models.layers import Kind, Layer, Layers

N_CTX_TRAIN = 1000

PLAIN = Layers(tuple(Layer(i, Kind.ROWS, i, 2, 32, 32, 0) for i in range(2)))
"""A cell takes 512 bytes."""

HYBRID = Layers(
    (
        *PLAIN.all,
        Layer(2, Kind.SLIDING, 2, 2, 32, 32, 0),
        Layer(3, Kind.RECURRENT, 3, 0, 0, 0, 12345),
    ),
    n_swa=200,
)
"""The same, and beside it 200 tokens and a batch of 256 bytes each, and a state."""


def parse(text, layers=PLAIN, n_batch=64, **types):
    return budget.parse(text, N_CTX_TRAIN, layers, n_batch, **types)


@pytest.mark.parametrize(
    ("text", "n"),
    [("512", 512), (" 12 ", 12), ("10%", 100), ("0.19%", 1), ("99.99%", 999), ("100%", 1000)],
)
def test_a_budget_is_tokens_or_a_share_rounded_down(text, n):
    # of what the model keeps it needs to know nothing
    for layers in (PLAIN, HYBRID, None):
        assert parse(text, layers) == (n, False)


@pytest.mark.parametrize("text", ["32.3%", "64.1%", "64.6%", "65.1%"])
def test_a_share_is_exact_where_binary_fractions_are_not(text):
    assert parse(text) == (int(text.replace(".", "").rstrip("%")), False)


def test_a_share_of_a_prompt_never_exceeds_it():
    assert [budget.share(Decimal(50), n) for n in range(200)] == [n // 2 for n in range(200)]


def test_bytes_give_whole_steps_of_256_cells_and_at_most_the_trained_context():
    assert PLAIN.cell_bytes() == 512
    assert parse("255KiB") == (256, True)
    assert parse(f"{2 * 256 * 512 - 1}B") == (256, True)
    assert parse(f"{2 * 256 * 512}B") == (512, True)
    assert parse("1GiB") == (1000, True)


def test_bytes_hold_what_the_model_keeps_beside_its_rows():
    # 200 + 64 tokens in steps of 256 cells; 200 + 30 in one of them
    for n_batch, n_cell in ((64, 512), (30, 256)):
        beside = n_cell * 256 + 12345
        assert parse(f"{beside + 512 * 512}B", HYBRID, n_batch) == (512, True)
        assert parse(f"{beside + 512 * 512 - 1}B", HYBRID, n_batch) == (256, True)


def test_bytes_are_of_the_cache_types():
    # q8_0: 34 bytes for 32 numbers; f32: 128
    assert parse(f"{512 * 4 * 2 * 34}B", type_k="q8_0", type_v="q8_0") == (512, True)
    assert parse(f"{512 * 4 * 2 * 34 - 1}B", type_k="q8_0", type_v="q8_0") == (256, True)
    assert parse(f"{512 * 4 * (128 + 34)}B", type_k="f32", type_v="q8_0") == (512, True)
    with pytest.raises(UsageError, match="unknown cache type 'q9' for V"):
        parse("64MiB", type_v="q9")


def test_bytes_stand_for_the_trained_context_until_the_layers_are_known():
    for text in ("1KiB", "64MiB"):
        assert parse(text, None) == (N_CTX_TRAIN, True)


def test_the_smallest_cache_has_everything_in_it():
    smallest = 256 * 512 + 512 * 256 + 12345
    assert parse(f"{smallest}B", HYBRID) == (256, True)
    with pytest.raises(UsageError) as error:
        parse(f"{smallest - 1}B", HYBRID)
    assert str(error.value) == (
        f"{smallest - 1}B is too small for this model: its smallest cache (256 tokens) takes 268.1 KiB"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "a budget of 0 is too small; use at least 2 tokens"),
        ("0%", "above 0% and at most 100%"),
        ("101%", "above 0% and at most 100%"),
        ("nan%", "above 0% and at most 100%"),
        ("-5%", "above 0% and at most 100%"),
        ("0.05%", r"0.05% of the trained context \(1000 tokens\) is less than 1 token"),
        ("12x", r"tokens \(512\), a share of the trained context \(10%\) or bytes \(64MiB\), got '12x'"),
        ("1.5", r"got '1.5'"),
        ("1KiB", "^1KiB is too small for this model: its smallest cache .256 tokens. takes 128.0 KiB$"),
    ],
)
def test_what_is_no_budget_is_refused(text, words):
    with pytest.raises(UsageError, match=words) as error:
        parse(text)
    assert "\n" not in str(error.value)
