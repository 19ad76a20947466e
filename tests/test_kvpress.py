"""What stays of a prompt is what kvpress keeps, on the same weights.

KVPRESS_PYTHON names a Python that has kvpress, torch and gguf; without it these tests are skipped.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from tests.running import open_engine

PYTHON = os.environ.get("KVPRESS_PYTHON")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="KVPRESS_PYTHON names no Python that has kvpress"),
]

N = 200


def kept_by_kvpress(path, tokens, press, options, n_keep, folder):
    """The positions that stay in each row; the newest is one of them."""
    np.save(folder / "tokens.npy", tokens)
    script = Path(__file__).parent / "kvpress_scores.py"
    files = path, folder / "tokens.npy", folder / "scores.npy"
    subprocess.run([PYTHON, script, press, *files, *options], check=True)
    scores = np.load(folder / "scores.npy")
    scores[:, -1] = np.inf
    return [sorted(row.tolist()) for row in np.argsort(scores, axis=1)[:, -n_keep:]]


EXPECTED = ["window=1", f"queries={N}"]


@pytest.mark.parametrize(
    ("name", "options", "press", "theirs"),
    [
        ("expected", [*EXPECTED, "epsilon=0"], "ExpectedAttentionPress", []),
        ("expected", EXPECTED, "ExpectedAttentionPress", ["epsilon=0.02"]),
        (
            "expected",
            [*EXPECTED, "sinks=6", "ahead=33", "covariance=false", "lengths=false"],
            "ExpectedAttentionPress",
            ["n_sink=6", "n_future_positions=33", "use_covariance=false", "use_vnorm=false"],
        ),
        ("knorm", ["sinks=0", "window=1"], "KnormPress", []),
        ("snapkv", ["window=16", "kernel=5"], "SnapKVPress", ["window_size=16", "kernel_size=5"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
def test_a_prompt_is_compressed_to_the_tokens_that_kvpress_keeps(
    tmp_path, tiny_model, n_head_kv, name, options, press, theirs
):
    # no token twice: the lengths of its keys would differ by rounding alone
    tokens = np.random.default_rng(1).permutation(np.arange(3, 259))[:N].astype(np.int32)
    path = tiny_model(rope="neox", n_head_kv=n_head_kv)
    policy = policies.fit(name, 80, 10, options)
    with open_engine(path, policy, prefill="whole") as engine:
        engine.read(tokens)
        kept = np.sort(engine.rows.pos[:, : engine.n_kv], axis=1).tolist()
    assert kept == kept_by_kvpress(path, tokens, press, theirs, policy.n_keep, tmp_path)
    assert len(set(map(tuple, kept))) > 1
