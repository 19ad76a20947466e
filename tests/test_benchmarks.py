"""Each benchmark starts and says what it is for; the random model runs; one merge is the definition's."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.llama.observe import What
from kvtool.measure import perplexity
from tests import tiny, tiny_kinds
from tests.reference import models
from tests.running import open_engine, text
from tests.test_maps import Watched

FOLDER = Path(__file__).parents[1] / "benchmarks"
# modules that the benchmarks import
PARTS = tuple(
    f"{name}.py" for name in ("commands", "common", "index", "places", "samples", "tables", "verdicts")
)


@pytest.mark.parametrize(
    "path", [p for p in sorted(FOLDER.glob("*.py")) if p.name not in PARTS], ids=lambda p: p.stem
)
def test_a_benchmark_says_what_it_is_for(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGPIPE) == before
    assert path.read_text().split('"""')[1].split("\n")[0] in capsys.readouterr().out


def test_a_plan_may_be_read_in_part():
    command = [sys.executable, str(FOLDER / "papers.py"), "plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 0


@pytest.mark.engine
def test_the_random_model_reads_texts_and_expects_nothing(monkeypatch, tmp_path, smollm2):
    path = tmp_path / "random.gguf"
    shape = {"layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 32, "ff": 64, "n-ctx": 512}
    given = [part for name, size in shape.items() for part in (f"--{name}", str(size))]
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["random_model.py", str(path), "-m", str(smollm2), *given])
    runpy.run_path(str(FOLDER / "random_model.py"), run_name="__main__")
    with open_engine(path, policies.fit("h2o", 32)) as engine:
        tokens = engine.model.tokenize(Path(__file__).read_text())[:400]
        nll = perplexity.stream(engine, tokens)
        assert engine.model.n_vocab == 49152
    # logits have a deviation of 1: half a nat more than if all tokens were equally likely
    assert np.mean(nll) == pytest.approx(np.log(49152) + 0.5, abs=0.3)


@pytest.mark.engine
@pytest.mark.parametrize("write", [tiny.write_llama, tiny_kinds.write_qwen2vl], ids=["llama", "biases"])
def test_a_model_without_groups_is_the_same_function_with_more_rows(monkeypatch, tmp_path, write):
    grouped, path = tmp_path / "grouped.gguf", tmp_path / "ungrouped.gguf"
    write(grouped)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["ungroup.py", str(grouped), str(path)])
    runpy.run_path(str(FOLDER / "ungroup.py"), run_name="__main__")
    nll, rows = [], []
    for each in (grouped, path):
        with open_engine(each, policies.fit("full", 64)) as engine:
            nll.append(perplexity.stream(engine, text(60)))
            rows.append(len(engine.context.row_layers))
    assert rows[1] == rows[0] * 2
    assert nll[1] == pytest.approx(nll[0], abs=1e-5)


def test_a_model_whose_keys_have_no_tensor_of_their_own_is_not_written(monkeypatch, tmp_path):
    tiny_kinds.write_gpt2(tmp_path / "gpt2.gguf")
    monkeypatch.syspath_prepend(str(FOLDER))
    ungroup = runpy.run_path(str(FOLDER / "ungroup.py"))["ungroup"]
    with pytest.raises(ValueError, match="no attn_k and attn_v"):
        ungroup(tmp_path / "gpt2.gguf", tmp_path / "out.gguf")


@pytest.mark.engine
@pytest.mark.parametrize("change", ["merge", "evict"])
def test_attention_after_one_merge_is_that_of_the_definition(monkeypatch, tiny_model, change):
    monkeypatch.syspath_prepend(str(FOLDER))
    rows = runpy.run_path(str(FOLDER / "one_merge.py"))["rows"]
    tokens, at = text(70), 40
    stream = Watched(models.load(tiny_model()))
    stream.decode(tokens[:at])
    victims = []
    for row in (row for of_layer in stream.rows for row in of_layer):
        average = row.mass / np.arange(at, 0, -1)
        gone = int(average[:-1].argmin())
        share = average[gone] / (average[gone] + average[gone + 1])
        if change == "merge":
            row.merge({gone + 1: [(gone, share), (gone + 1, 1 - share)]})
        row.keep(np.delete(row.pos, gone))
        victims.append(gone)
    stream.decode(tokens[at:])
    want = [stream.found[What.ATTENTION][layer] for layer in range(2)]
    found = list(rows(models.load(tiny_model()), tokens, at, change))
    for i, ((attention, *_), gone) in enumerate(zip(found, victims, strict=True)):
        assert not attention[:, at:, gone].any()
        layer, head = divmod(i, 2)
        later = np.delete(attention[:, at:], gone, axis=2)
        assert np.abs(later - want[layer][2 * head : 2 * head + 2]).max() < 1e-5
