"""Each benchmark can be started, and says what it is for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
# what others import
PARTS = ("common.py", "experiments.py")


@pytest.mark.parametrize(
    "path", [p for p in sorted(FOLDER.glob("*.py")) if p.name not in PARTS], ids=lambda p: p.stem
)
def test_a_benchmark_says_what_it_is_for(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert path.read_text().split('"""')[1].split("\n")[0] in capsys.readouterr().out
