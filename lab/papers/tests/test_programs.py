"""Each program says what it is for; one without groups is the same model; one merge is the definition's."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import perplexity
from lab.papers import ungroup
from lab.papers.maps.observe import What
from lab.papers.one_merge import rows
from lab.papers.tests.test_maps import Watched
from tests import tiny, tiny_kinds
from tests.engine.running import open_engine, text
from tests.reference import models

FOLDER = Path(__file__).parents[1]
PROGRAMS = [
    path.stem for path in sorted(FOLDER.glob("*.py")) if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_is_for(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"lab.papers.{name}", raising=False)
    # a module that is imported already is not run anew without a warning
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"lab.papers.{name}", run_name="__main__")
    assert end.value.code == 0
    about = FOLDER / f"{'runner' if name == '__main__' else name}.py"
    assert about.read_text().split('"""')[1].split("\n")[0] in capsys.readouterr().out


def test_a_plan_may_be_read_in_part():
    command = [sys.executable, "-m", "lab.papers", "plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 0


@pytest.mark.parametrize("write", [tiny.write_llama, tiny_kinds.write_qwen2vl], ids=["llama", "biases"])
def test_a_model_without_groups_is_the_same_function_with_more_rows(monkeypatch, tmp_path, write):
    grouped, path = tmp_path / "grouped.gguf", tmp_path / "ungrouped.gguf"
    write(grouped)
    monkeypatch.setattr(sys, "argv", ["ungroup", str(grouped), str(path)])
    ungroup.main()
    nll, rows = [], []
    for each in (grouped, path):
        with open_engine(each, policies.fit("full", 64)) as engine:
            nll.append(perplexity.stream(engine, text(60)))
            rows.append(len(engine.context.row_layers))
    assert rows[1] == rows[0] * 2
    assert nll[1] == pytest.approx(nll[0], abs=1e-5)


def test_a_model_whose_keys_have_no_tensor_of_their_own_is_not_written(tmp_path):
    tiny_kinds.write_gpt2(tmp_path / "gpt2.gguf")
    with pytest.raises(ValueError, match="no attn_k and attn_v"):
        ungroup.ungroup(tmp_path / "gpt2.gguf", tmp_path / "out.gguf")


@pytest.mark.parametrize("change", ["merge", "evict"])
def test_attention_after_one_merge_is_that_of_the_definition(tiny_model, change):
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
