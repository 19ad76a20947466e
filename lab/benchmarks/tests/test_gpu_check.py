"""The programs of gpu_check.py compute the right results, and report parts that crash or hang."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from lab.benchmarks import ggml_micro as micro
from lab.benchmarks import gpu_check as check
from lab.benchmarks import gpu_rows, random_model


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("form", ["one", "ne3", "ne3 in order", "calls"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_attention_equals_the_definition_in_each_layout(kind, form, n):
    if form == "ne3 in order" and n == 1:
        pytest.skip("one token is in order")
    ggml, rng, n_kv = micro.Ggml(), np.random.default_rng(0), 256
    backend, number = ggml.backend(), micro.TYPES[kind]
    caches = micro.Work(ggml, backend)
    pair = micro.cells(caches, number, n_kv), micro.cells(caches, number, n_kv)
    caches.alloc()
    plain = []
    for tensor in pair:
        raw = ggml.quantized(rng.standard_normal((n_kv, micro.D * micro.N_KV_HEAD), np.float32), number)
        caches.set(tensor, raw)
        plain.append(micro.dequantized(raw, number).reshape(n_kv, micro.N_KV_HEAD, micro.D))
    row = micro._attention(ggml, rng, backend, [pair], plain, number, n, n_kv, form)
    caches.free()
    assert row["supported"]
    assert row["error"] < 0.01


def test_attention_to_wrong_keys_has_a_large_error():
    ggml, rng, n_kv = micro.Ggml(), np.random.default_rng(0), 256
    backend = ggml.backend()
    caches = micro.Work(ggml, backend)
    pair = micro.cells(caches, micro.F16, n_kv), micro.cells(caches, micro.F16, n_kv)
    caches.alloc()
    values = rng.standard_normal((n_kv, micro.N_KV_HEAD, micro.D)).astype(np.float16)
    for tensor in pair:
        caches.set(tensor, values)
    other = [values[:, ::-1].astype(np.float32), values[:, ::-1].astype(np.float32)]
    row = micro._attention(ggml, rng, backend, [pair], other, micro.F16, 2, n_kv, "ne3")
    caches.free()
    assert row["error"] > 0.1


LOG = """
## SPLIT #0: CPU # 0 inputs
node #  0 (  GET_ROWS): embd (  16K) [  CPU         ] use=1,c=1:

## SPLIT #1: CUDA0 # 2 inputs: [embd (  16K)] [pos (   0K)]
node #  2 (   MUL_MAT): Qcur-0 (  16K) [CUDA0         ] use=1,c=1:
node #  3 (FLASH_ATTN): kqv-0 (  16K) [CUDA0         ] use=1,c=1:

## SPLIT #0: CUDA0 # 0 inputs
node #  0 (       CPY): edit (  16K) [CUDA0         ] use=1,c=1:
"""


def test_splits_of_each_graph_are_read_from_the_log():
    first, second = gpu_rows.graphs_of(LOG)
    assert (first[0], dict(first[1]), dict(first[2])) == (
        2,
        {"GET_ROWS": 1, "MUL_MAT": 1, "FLASH_ATTN": 1},
        {"GET_ROWS": 1},
    )
    assert (second[0], dict(second[1]), dict(second[2])) == (1, {"CPY": 1}, {})


def test_pytest_output_gives_counts_and_names_of_failed_tests():
    lines = [
        "tests/test_a.py::test_one[x] ",
        "[gw0] [ 33%] PASSED tests/test_a.py::test_one[x] ",
        "[gw1] [ 66%] FAILED tests/test_a.py::test_two ",
        "[gw1] [100%] SKIPPED tests/test_a.py::test_three ",
        "FAILED tests/test_a.py::test_two - assert 1 == 2",
        "=== 1 failed, 1 passed, 1 skipped in 3.20s ===",
    ]
    rows = list(check.tests_of(lines))
    assert [row["what"] for row in rows if row.get("outcome") == "failed"] == ["tests/test_a.py::test_two "]
    assert any("assert 1 == 2" in row["what"] for row in rows)
    assert rows[-1] == {
        "what": "all",
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "summary": "1 failed, 1 passed, 1 skipped in 3.20s",
    }


@pytest.mark.parametrize(
    ("program", "is_late", "code"),
    [
        ("print('{}')", False, 0),
        ("print('{}', flush=True); import os; os.abort()", False, -6),
        ("print('{}', flush=True); import time; time.sleep(600)", True, -9),
    ],
)
def test_rows_of_a_crashed_program_are_kept_and_a_hung_one_is_killed(tmp_path, program, is_late, code):
    with (tmp_path / "log").open("wb") as errors:
        # the program that hangs is killed after 2 seconds. The other programs may take a minute
        lines = check.Lines([sys.executable, "-c", program], dict(os.environ), errors, 2 if is_late else 60)
        rows = list(check.rows_of(lines))
    assert (lines.is_late, lines.code) == (is_late, code)
    assert is_late or rows == [{}]


def test_table_has_a_column_per_form_and_lists_failures():
    case = {"part": "2a", "type": "f16", "n": 1, "n_kv": 1024, "supported": True}
    rows = [
        case | {"what": "one", "us": 1.5, "error": 0.001},
        case | {"what": "ne3", "us": 2.5, "error": float("nan")},
        {"part": "3", "what": "bench --way full", "why": "exit status -6: aborted"},
    ]
    text = list(check.table(rows))
    line = next(line for line in text if line.split()[:3] == ["f16", "1", "1024"])
    assert line.split()[3:] == ["1.5", "2.5"]
    assert any("wrong results" in line and "nan" in line and "'one'" not in line for line in text)
    assert "bench --way full: exit status -6: aborted" in text


def test_repeated_weights_have_the_shape_of_fully_random_weights():
    whole = random_model.quantized(np.random.default_rng(0), 10, 64)
    some = random_model.quantized(np.random.default_rng(0), 10, 64, 4)
    assert some.shape == whole.shape
    assert (some[4:8] == some[:4]).all()
    assert not (whole[4:8] == whole[:4]).all()
