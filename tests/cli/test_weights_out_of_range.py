"""Models whose weights are NaN or very large: errors of one line, and JSON that every program reads."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import TEXT


@pytest.fixture(scope="module")
def scaled(talker, tmp_path_factory):
    """scaled(factor): copy `talker`, and multiply the output weights of tokens from 300 on by this factor."""
    folder = tmp_path_factory.mktemp("scaled")

    def make(factor):
        path = folder / f"{factor}.gguf"
        path.write_bytes(talker.read_bytes())
        reader = gguf.GGUFReader(path, "r+")
        (output,) = (tensor for tensor in reader.tensors if tensor.name == "output.weight")
        output.data[300:] *= np.float32(factor)
        reader.data.flush()
        return path

    return make


@pytest.mark.parametrize(
    "command",
    [
        ("perplexity", "text.txt"),
        ("perplexity", "text.txt", "--windows", 20),
        ("generate", "Hi", "-n", 2),
        ("generate", "Hi", "-n", 2, "--json", "--logprobs", 1),
        ("eval", "choice", "items.jsonl"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_logits_that_are_not_finite_get_one_line(scaled, tmp_path, command):
    (tmp_path / "text.txt").write_text(TEXT[:200])
    item = {
        "p": "It rains.",
        "asks-for": "cause",
        "a1": "One.",
        "a2": "Two.",
        "most-plausible-alternative": 1,
    }
    (tmp_path / "items.jsonl").write_text(json.dumps(item) + "\n")
    done = run_kvtool(*command, "-m", scaled("nan"), "-t", 1, cwd=tmp_path)
    assert_one_line(done, 3, "the model's logits are not finite; the model file may be damaged")


def test_perplexity_too_large_for_a_float_is_inf_and_null_in_json(scaled, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT[:200])
    words = ["text.txt", "-m", scaled("1e5"), "-t", 1]
    done = run_kvtool("perplexity", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "inf\n"), done.stderr
    done = run_kvtool("perplexity", *words, "--json", cwd=tmp_path)
    result = json.loads(done.stdout, parse_constant=pytest.fail)
    assert result["perplexity"] is None
    assert result["nll"] > 709
    done = run_kvtool("compare", *words, "--policies", "full,local", "--budgets", 16, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *_ = (json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines())
    assert (first["perplexity"], first["n_scored"]) == (None, result["tokens"])
