"""Each benchmark starts and says what it is for; the random model runs."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import perplexity
from tests.running import open_engine

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if path.name != "common.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_says_what_it_is_for(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGPIPE) == before
    assert path.read_text().split('"""')[1].split("\n")[0] in capsys.readouterr().out


@pytest.mark.engine
def test_the_random_model_reads_texts_and_expects_nothing(monkeypatch, tmp_path, smollm2, share_of):
    path = tmp_path / "random.gguf"
    shape = {"layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 32, "ff": 64, "n-ctx": 512}
    given = [part for name, size in shape.items() for part in (f"--{name}", str(size))]
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["random_model.py", str(path), "-m", str(smollm2), *given])
    runpy.run_path(str(FOLDER / "random_model.py"), run_name="__main__")
    with open_engine(path, policies.fit("h2o", 32)) as engine:
        tokens = engine.model.tokenize(Path(__file__).read_text())[: share_of(150, 400)]
        nll = perplexity.stream(engine, tokens)
        assert engine.model.n_vocab == 49152
    # logits have a deviation of 1: half a nat more than if all tokens were equally likely
    assert np.mean(nll) == pytest.approx(np.log(49152) + 0.5, abs=0.3)
