"""Options of weights on the command line: where they lie."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvtool.config import drafting
from kvtool.config.run import WriteOptions
from kvtool.llama.devices import has_gpu
from kvtool.llama.model import Model
from tests.cli.called import called, one_line

pytestmark = pytest.mark.skipif(has_gpu(), reason="the expected lines are those of a machine without a GPU")


def generate(*options):
    return called("generate", "Hi", "-n", 8, "-t", 1, "--temp", 0, *options)


def test_without_a_gpu_options_of_gpus_do_nothing_and_are_told(default_talker, tmp_path):
    plain = generate()
    assert plain.stderr == ""
    # all is in host memory anyway
    moe = generate("--n-cpu-moe", 2, "--cpu-moe", "-ot", "attn_[kq]=CPU,.*=CPU", "-ncmoe", 0)
    assert (moe.stdout, moe.stderr) == (plain.stdout, "")
    end = "nothing: kvtool finds no GPU (`kvtool doctor` lists the devices)\n"
    one = generate("-ts", "3,1")
    assert (one.stdout, one.stderr) == (plain.stdout, f"--tensor-split 3,1 does {end}")
    several = generate("-mg", 1, "-sm", "none", "-ngl", 9)
    assert several.stdout == plain.stdout
    assert several.stderr == f"--gpu-layers 9, --main-gpu 1, --split-mode none do {end}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-ot", "[red](=CPU"], "--override-tensor: '[red](' is not a regular expression"),
        (["-ot", "[red]=GPU0"], "--override-tensor: there is no buffer 'GPU0'; there are: CPU"),
        (["-ot", "[red]"], "--override-tensor takes PATTERN=BUFFER, such as ffn_down=CPU, got '[red]'"),
        (["-ts", "0,0"], "--tensor-split needs a share above 0, got '0,0'"),
        (["-sm", "tensor"], "--split-mode must be none, layer or row, got 'tensor'"),
        (["-mg", "-1"], "--main-gpu must be at least 0, got -1"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "compare"])
def test_bad_input_is_one_line(default_talker, tmp_path, command, options, words):
    (tmp_path / "text").write_text("The tide came in. " * 9)
    argument = "Hi" if command == "generate" else tmp_path / "text"
    one_line(called(command, argument, "-t", 1, *options), 2, words)


def test_a_draft_model_gets_no_places(talker):
    run = WriteOptions(draft=str(talker), override_tensor=(".*=CPU",), cpu_moe=True)
    with closing(Model(talker)) as model, drafting.opened(run, model) as drafts:
        assert drafts._draft_model._placement.overrides == ()
