"""kvtool keeps the same tokens of a prompt as kvpress, on the same weights.

KVPRESS_PYTHON names a Python that has kvpress, torch and gguf. Without it, these tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from tests.engine.running import distinct, live, open_engine

PYTHON = os.environ.get("KVPRESS_PYTHON")

pytestmark = pytest.mark.skipif(not PYTHON, reason="KVPRESS_PYTHON names no Python that has kvpress")

N = 200

ALL_QUERIES = ["window=1", f"queries={N}"]

SAME = [
    ("expected", [*ALL_QUERIES, "epsilon=0"], "ExpectedAttentionPress", {}),
    ("expected", [*ALL_QUERIES, "epsilon=0.02"], "ExpectedAttentionPress", {"epsilon": 0.02}),
    (
        "expected",
        [*ALL_QUERIES, "sinks=6", "ahead=33", "covariance=false", "lengths=false"],
        "ExpectedAttentionPress",
        {"n_sink": 6, "n_future_positions": 33, "use_covariance": False, "use_vnorm": False},
    ),
    ("knorm", ["sinks=0", "window=1"], "KnormPress", {}),
    ("snapkv", ["window=16", "kernel=5"], "SnapKVPress", {"window_size": 16, "kernel_size": 5}),
]
"""(policy, its options, the press of kvpress that gives the same scores, its parameters)."""

SHARED = [
    ("expected", [*ALL_QUERIES, "epsilon=0"], "ExpectedAttentionPress", {}, 0.2),
    ("expected", [*ALL_QUERIES, "epsilon=0.02"], "ExpectedAttentionPress", {"epsilon": 0.02}, 0.5),
    ("snapkv", ["window=16"], "SnapKVPress", {"window_size": 16}, 0.2),
    ("snapkv", ["window=16"], "SnapKVPress", {"window_size": 16}, 0.6),
]
"""Cases like those in SAME, with rows that share a budget.

The last field is `floor`: the smallest share of its budget that a row keeps.
"""


def scores_of(path, tokens, presses, folder):
    """Return scores f32[press, row, n]."""
    np.save(folder / "tokens.npy", tokens)
    (folder / "presses.json").write_text(json.dumps(presses))
    script = Path(__file__).parent / "kvpress_scores.py"
    files = path, *(folder / name for name in ("tokens.npy", "scores.npy", "presses.json"))
    subprocess.run([PYTHON, script, *files], check=True)
    return np.load(folder / "scores.npy")


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
def test_prompt_keeps_the_same_tokens_as_kvpress(tmp_path, tiny_model, n_head_kv):
    path, tokens = tiny_model(rope="neox", n_head_kv=n_head_kv), distinct(N)
    scores = scores_of(path, tokens, [each[2:] for each in SAME], tmp_path)
    # unlike kvpress, kvtool's policies always keep the newest token
    scores[..., -1] = np.inf
    for (name, options, *_), press_scores in zip(SAME, scores, strict=True):
        policy = policies.fit(name, 80, 10, options)
        with open_engine(path, policy, prefill="whole") as engine:
            engine.read(tokens)
            kept = live(engine)
        best = np.argsort(press_scores, axis=1)[:, -policy.n_keep :]
        assert kept == np.sort(best, axis=1).tolist(), (name, options)


@pytest.mark.parametrize("n_head_kv", [2, 4])
def test_rows_that_share_a_budget_keep_the_same_tokens_as_ada_kv(tmp_path, tiny_model, n_head_kv):
    path, tokens = tiny_model(rope="neox", n_head_kv=n_head_kv), distinct(N, seed=2)
    presses = [
        (press, params | {"keep": 70, "alpha_safeguard": floor}) for _, _, press, params, floor in SHARED
    ]
    differ = False
    for (name, options, _, _, floor), stays in zip(
        SHARED, scores_of(path, tokens, presses, tmp_path), strict=True
    ):
        policy = policies.fit(name, 80, 10, [*options, "heads=adaptive", f"floor={floor}"])
        assert policy.n_keep == 70
        with open_engine(path, policy, prefill="whole") as engine:
            engine.read(tokens)
            kept = live(engine)
        assert kept == [np.flatnonzero(row).tolist() for row in stays], (name, floor)
        differ |= len({len(row) for row in kept}) > 1
    assert differ
