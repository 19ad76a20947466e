"""The shared library of kernels gives the same bytes as numba, without numba in the process."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from kvtool.build.kernels import modules
from kvtool.engine.moves import fill_holes
from kvtool.errors import LibraryError
from kvtool.kernels import load
from kvtool.kernels.kernel import kernel, of_module
from kvtool.kernels.link import link
from kvtool.kernels.selection import keep_highest
from kvtool.policies import bumblebee, knorm, weightedkv
from tests import fork_server


@kernel("i8(i4[:,::1], f8)")
def not_in_it(values: np.ndarray, x: float) -> int:
    return int(values[0, 0] + x)


def test_every_module_with_a_kernel_is_found():
    root = Path(load.__file__).parent.parent
    code = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    kernel_modules = [
        path.relative_to(root.parent).with_suffix("").parts
        for path, text in code.items()
        if "\n@kernel(" in text
    ]
    assert sorted(map(".".join, kernel_modules)) == sorted(modules())
    assert {"kvtool.kernels.selection", "kvtool.engine.moves", "kvtool.policies.buzz"} <= set(modules())


@pytest.mark.parametrize("module", modules())
def test_library_contains_each_kernel(module):
    """Kernels that return two values are left out: only other kernels call them."""
    for each in of_module(import_module(module)):
        if not each.signatures[0].startswith("Tuple"):
            assert load.find(each.name, each.signatures), f"{each.name} is not compiled: run make kernels"


def filled(kernel_, arguments):
    """Call the library's kernel and numba's kernel.

    Return [returned value, *arguments after the call] for each of the two.
    """
    results = []
    for call in (load.find(kernel_.name, kernel_.signatures), kernel_.compile()):
        copies = [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]
        results.append([call(*copies), *copies])
    return results


def ranked(n_row=90, n=512, n_keep=496):
    rng = np.random.default_rng(7)
    pos = rng.permuted(np.tile(np.arange(n, dtype=np.int32), (n_row, 1)), axis=1)
    score = rng.random((n_row, n), np.float32)
    keep = np.empty((n_row, n), np.bool_)
    keep_highest(pos, score, 4, n // 2, n_keep, keep)
    return pos, score, keep, n_keep


@pytest.mark.parametrize(
    "case", ["keep", "holes", "merges", "one of two types", "the other", "sums in float64", "nothing"]
)
def test_library_gives_the_same_bytes_as_numba(case):
    pos, score, keep, n_keep = ranked()
    n_row = len(pos)
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((3, 16, 8)).astype(np.float32)
    pairs = rng.integers(0, 999, (3, 16, 16))
    source = np.tile(np.array([0, 15, 2, 14], np.int32), (3, 1))
    terms = [np.full(2 * n_row * 16, -1, np.int32) for _ in range(3)]
    kernel_, arguments = {
        "keep": (keep_highest, (pos, score, 4, 256, n_keep, np.zeros_like(keep))),
        "holes": (fill_holes, (keep, keep.sum(1, dtype=np.int32), np.zeros((n_row, n_keep), np.int32))),
        "merges": (
            weightedkv._merge_right,
            (pos, score, keep, *terms, np.zeros(len(terms[0]), np.float32)),
        ),
        "one of two types": (bumblebee.move_pairs, (source, pairs.astype(np.int32))),
        "the other": (bumblebee.move_pairs, (source, pairs.astype(np.uint16))),
        "sums in float64": (
            knorm._shortness,
            (keys, np.full(3, 3), np.zeros((3, 32), np.float32)),
        ),
        "nothing": (keep_highest, (pos[:0], score[:0], 4, 256, n_keep, keep[:0])),
    }[case]
    results, numbas = filled(kernel_, arguments)
    for a, b in zip(results, numbas, strict=True):
        assert np.array_equal(a, b), case
    assert case in ("nothing", "holes") or any(
        not np.array_equal(a, b) for a, b in zip(results[1:], arguments, strict=True)
    )


@pytest.mark.parametrize("wrong", ["type", "dimensions", "order", "read-only", "number"])
def test_wrong_arguments_are_refused(wrong):
    """Kernels do not check their arguments. With wrong arguments they would access foreign memory."""
    pos, score, keep, n_keep = ranked(2, 8, 6)
    call = load.find(keep_highest.name, keep_highest.signatures)
    call(pos, score, 0, 4, n_keep, keep)
    frozen = keep.copy()
    frozen.flags.writeable = False
    arguments = {
        "type": (pos.astype(np.int64), score, 0, 4, n_keep, keep),
        "dimensions": (pos[0], score, 0, 4, n_keep, keep),
        "order": (pos[:, ::2], score, 0, 4, n_keep, keep),
        "read-only": (pos, score, 0, 4, n_keep, frozen),
        "number": (pos, score, 0, 4, n_keep),
    }[wrong]
    with pytest.raises(TypeError, match="keep_highest does not take"):
        call(*arguments)


def test_kernel_missing_from_the_library_runs_with_numba():
    assert load.find(not_in_it.name, not_in_it.signatures) is None
    assert not_in_it(np.full((1, 1), 3, np.int32), 4.0) == 7


SUM = """
from kvtool.kernels.kernel import kernel

@kernel("i8(i8, i8)")
def total(a, b):
    return a + b
"""


@pytest.mark.parametrize("writable", [True, False])
def test_without_a_writable_cache_folder_kernels_run_and_are_not_stored(tmp_path, writable):
    (tmp_path / "sums.py").write_text(SUM)
    (tmp_path / "file").touch()
    cache = tmp_path / ("cache" if writable else "file/cache")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from sums import total; print(total(2, 3))"
    done = fork_server.run_python("-c", code, env=os.environ | {"KVTOOL_CACHE": str(cache)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    stored = [*tmp_path.rglob("*.nbi")]
    assert stored and all(cache in path.parents for path in stored) if writable else not stored


@pytest.mark.skipif(os.name != "posix", reason="limits of Unix")
@pytest.mark.parametrize("n_bytes", [0, 9])
def test_on_a_full_disk_kernels_run_and_are_not_stored(tmp_path, n_bytes):
    """A disk has room for n_bytes: for nothing, or for the first bytes of a file."""
    double = '@kernel("i8(i8)")\ndef double(a):\n    return total(a, a)\n'
    (tmp_path / "sums.py").write_text(f"{SUM}\n\n{double}")
    code = (
        f"import resource, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True; "
        f"from sums import double; resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, -1)); "
        "print(double(4))"
    )
    done = fork_server.run_python("-c", code, env=os.environ | {"KVTOOL_CACHE": str(tmp_path / "cache")})
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")
    assert not [*tmp_path.rglob("*.nb?")]


def test_missing_or_damaged_library_provides_no_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "LIBRARY", tmp_path / "kernels.so")
    monkeypatch.setattr(load, "_opened", load._opened.__wrapped__)
    assert load.find(keep_highest.name, keep_highest.signatures) is None
    (tmp_path / "kernels.so").write_bytes(b"cut off")
    assert load.find(keep_highest.name, keep_highest.signatures) is None


def test_library_is_not_built_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(LibraryError, match="no C\\+\\+ compiler no-such-compiler"):
        link([keep_highest], tmp_path / "kernels.so")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(LibraryError, match="false does not link the kernels: exit status 1"):
        link([keep_highest], tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["h2o", "weightedkv", "bumblebee", "corm"])
def test_stream_does_not_import_numba(policy, tiny_model):
    code = (
        "import sys, numpy as np\n"
        "from kvtool import Engine, load_model, load_policy\n"
        f"engine = Engine(load_model({str(tiny_model())!r}), load_policy({policy!r}, budget=64))\n"
        "engine.read(np.arange(200, dtype=np.int32) % 90 + 3)\n"
        "assert engine.n_evicted, engine.rows.live\n"
        "print([name for name in ('numba', 'llvmlite') if name in sys.modules])\n"
    )
    done = fork_server.run_python("-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
