"""Gain of rows that share a budget, in equal cells and in equal bytes."""

from __future__ import annotations

import numpy as np
import pytest

from lab.papers import sharing


def line(label, of, budget, scores, sizes, question="after"):
    return {
        "label": label,
        "task": question,
        "of": of,
        "budget": budget,
        "scores": {"string_match": scores, "device": sizes},
    }


SNAPKV, SHARED = "snapkv", "snapkv:heads=adaptive"
LINES = [
    line("full", "vt", None, [1.0, 1.0], [100, 110]),
    line(SNAPKV, "vt", "50 % removed", [0.5, 0.0], [50, 50]),
    line(SNAPKV, "vt", "75 % removed", [0.0, 0.0], [25, 25]),
    line(SHARED, "vt", "50 % removed", [1.0, 0.5], [75, 80]),
    line(SHARED, "vt", "75 % removed", [0.2, 0.0], [30, 25]),
    line("full", "cwe", None, [0.6], [100]),
    line(SNAPKV, "cwe", "50 % removed", [0.4], [50]),
    line(SHARED, "cwe", "50 % removed", [0.4], [60]),
    # three lines of qa_2, a task that is not counted, and three lines of the other protocol
    line("full", "qa_2", None, [1.0], [100]),
    line(SNAPKV, "qa_2", "50 % removed", [0.0], [50]),
    line(SHARED, "qa_2", "50 % removed", [1.0], [60]),
    line("full", "cwe", None, [0.6], [100], "known"),
    line(SNAPKV, "cwe", "50 % removed", [0.4], [50], "known"),
    line(SHARED, "cwe", "50 % removed", [0.2], [50], "known"),
]


def test_in_equal_cells_a_share_is_compared_with_the_same_share():
    gains = sharing.gains(LINES, "heads", ("after",), in_bytes=False)
    assert gains == pytest.approx([(0.5 + 0.1) / 2, 0.0])
    assert sharing.gains(LINES, "heads", ("known",), in_bytes=False) == pytest.approx([-0.2])
    both = sharing.gains(LINES, "heads", ("after", "known"), in_bytes=False)
    assert both == pytest.approx([0.3, -0.1])


def test_layers_that_share_are_compared_apart_from_rows_that_do():
    layered = line("snapkv:layers=adaptive", "vt", "50 % removed", [0.75, 0.75], [50, 50])
    lines = [*LINES, layered]
    assert sharing.gains(lines, "layers", ("after",), in_bytes=False) == pytest.approx([0.5])
    assert len(sharing.gains(lines, "heads", ("after",), in_bytes=False)) == 2


def test_in_equal_bytes_equal_rows_are_interpolated_between_the_shares_and_full():
    # gain of each item: its score, minus the score of equal rows with the same bytes (in parentheses). In vt
    # with half removed: 1 - 0.75 (75 bytes) and 0.5 - 0.5 (80 bytes). In vt with 75 % removed: 0.2 - 0.1 (30
    # bytes) and 0 - 0 (25 bytes). In cwe: 0.4 - 0.44 (60 bytes)
    halves, quarters = np.array([0.25, 0.0]), np.array([0.1, 0.0])
    gains = sharing.gains(LINES[::-1], "heads", ("after",), in_bytes=True)
    assert sorted(gains) == pytest.approx(sorted([(halves.mean() + quarters.mean()) / 2, -0.04]))
