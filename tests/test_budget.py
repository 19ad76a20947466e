"""Budgets as people write them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from kvtool.errors import UsageError
from kvtool.models import budget
from kvtool.models.header import read


@pytest.fixture(scope="module")
def info(tiny_model):
    """A trained context of 1000 tokens; a cell takes 512 bytes."""
    return read(tiny_model(n_ctx_train=1000))


@pytest.mark.parametrize(
    ("text", "n"),
    [("512", 512), (" 12 ", 12), ("10%", 100), ("0.19%", 1), ("99.99%", 999), ("100%", 1000)],
)
def test_a_budget_is_tokens_or_a_share_rounded_down(info, text, n):
    assert budget.parse(text, info, 64) == (n, False)


@pytest.mark.parametrize("text", ["32.3%", "64.1%", "64.6%", "65.1%"])
def test_a_share_is_exact_where_binary_fractions_are_not(info, text):
    assert budget.parse(text, info, 64) == (int(text.replace(".", "").rstrip("%")), False)


def test_a_share_of_a_prompt_never_exceeds_it():
    assert [budget.share(Decimal(50), n) for n in range(200)] == [n // 2 for n in range(200)]


def test_bytes_give_whole_steps_of_256_cells_and_at_most_the_trained_context(info):
    assert info.cell_bytes() == 512
    assert budget.parse("255KiB", info, 64) == (256, True)
    assert budget.parse("1GiB", info, 64) == (1000, True)


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
        ("1KiB", "too small for .*: the smallest cache .256 tokens. takes 128.0 KiB"),
    ],
)
def test_what_is_no_budget_is_refused(info, text, words):
    with pytest.raises(UsageError, match=words):
        budget.parse(text, info, 64)
