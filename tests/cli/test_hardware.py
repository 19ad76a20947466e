"""Options about weights: their place in memory, and LoRA adapters."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.chats import session
from kvtool.chats.session_meta import difference
from kvtool.config import drafting
from kvtool.config import model as config_model
from kvtool.config.run import ALL_LAYERS, ScoreOptions, WriteOptions
from kvtool.engine import loop
from kvtool.errors import OutOfMemory
from kvtool.llama.libllama import devices
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.loaded import model as llama_model
from kvtool.llama.loaded.model import Model
from kvtool.measure import grid
from kvtool.models.download import sha256
from kvtool.models.header import read
from tests import tiny
from tests.cli.in_process_command import assert_one_line, drop_cut_lines, run_kvtool

pytestmark = pytest.mark.skipif(has_gpu(), reason="the expected lines are those of a machine without a GPU")


@pytest.fixture
def lora(talker, tmp_path):
    tiny.write_lora(tmp_path / "[red].gguf", talker)
    return tmp_path / "[red].gguf"


def generate(*options):
    return drop_cut_lines(run_kvtool("generate", "Hi", "-n", 8, "-t", 1, "--temp", 0, *options))


def test_gpu_options_without_a_gpu_do_nothing_and_are_reported(default_talker, tmp_path):
    plain = generate()
    assert plain.stderr == ""
    # without a GPU, all weights are in host memory, so these options change nothing
    overrides = generate("-ot", "attn_[kq]=CPU,.*=CPU", "-ncmoe", 0)
    assert (overrides.stdout, overrides.stderr) == (plain.stdout, "")
    for options, flag in ((["-ncmoe", 2], "--n-cpu-moe 2"), (["-ncmoe", 2, "-cmoe"], "--cpu-moe")):
        moe = generate(*options)
        assert (moe.stdout, moe.stderr) == (plain.stdout, f"{flag} does nothing: the model has no experts\n")
    typo = generate("-ot", "attn_kv=CPU,[red]$=CPU,attn_q=CPU,blk.[[:digit:]].attn_q=CPU,[a[:digit:]]_q=CPU")
    line = "--override-tensor: no tensor of the model matches '{}'\n"
    assert (typo.stdout, typo.stderr) == (plain.stdout, line.format("attn_kv") + line.format("[red]$"))
    end = "nothing: kvtool finds no GPU (`kvtool doctor` lists the devices)\n"
    one = generate("-ts", "3,1")
    assert (one.stdout, one.stderr) == (plain.stdout, f"--tensor-split 3,1 does {end}")
    assert generate("-ngl", "all").stderr == f"--gpu-layers all does {end}"
    several = generate("-mg", 1, "-sm", "none", "-ngl", 9)
    assert several.stdout == plain.stdout
    assert several.stderr == f"--gpu-layers 9, --main-gpu 1, --split-mode none do {end}"


def test_a_session_keeps_its_adapters(talker, lora, tmp_path):
    path = tmp_path / "chat.kvs"

    def chat(*options):
        words = ("-m", talker, "-n", 4, "-t", 1, "--temp", 0, "--policy", "h2o", "--budget", 64)
        return run_kvtool("chat", *words, "--session", path, *options, stdin="tide\n")

    assert chat("--lora", f"{lora}:0.5").returncode == 0
    meta = session.read_meta(path)
    assert meta["options"]["lora"] == [f"{lora}:0.5"]
    assert meta["fixed"]["lora"] == [f"{sha256(lora)}:0.5"]
    assert chat().returncode == 0
    assert session.read_meta(path)["n_turn"] == 2
    moved = lora.rename(tmp_path / "moved.gguf")
    # the file has a new name, but the same bytes
    assert chat("--lora", f"{moved}:0.5").returncode == 0
    short = sha256(moved)[:12]
    assert_one_line(
        chat("--lora", moved), 9, f"with --lora {short}:0.5; it cannot continue with --lora {short}:1.0"
    )
    path.unlink()
    chat()
    assert "lora" not in session.read_meta(path)["fixed"]
    assert_one_line(
        chat("--lora", moved), 9, f"with --lora nothing; it cannot continue with --lora {short}:1.0"
    )


def test_a_session_with_adapters_does_not_continue_in_a_chat_without_them():
    plain = {"parameters": {}, "model_sha256": "1"}
    adapted = plain | {"lora": [f"{'0' * 64}:0.5", f"{'1' * 64}:1.0"]}
    models = Path("a.gguf"), Path("a.gguf")
    lora = "--lora 000000000000:0.5, 111111111111:1.0"
    assert difference(adapted, plain, *models) == (
        f"was started with {lora}; it cannot continue with --lora nothing; "
    )
    assert difference(plain, plain, *models) is None


def test_records_name_the_adapters(default_talker, lora, tmp_path):
    record = json.loads(generate("--json", "--lora", f"{lora}:-2").stdout)
    assert record["lora"] == [f"{lora}:-2.0"]
    assert record["text"] != json.loads(generate("--json").stdout)["text"]
    file, records = tmp_path / "text", tmp_path / "records"
    file.write_text("The tide came in. " * 9)
    words = ("compare", file, "-t", 1, "--policies", "full,local", "--budgets", 16, "--records", records)
    assert run_kvtool(*words).returncode == 0
    for scale in (1, 1, 2):
        assert run_kvtool(*words, "--resume", "--lora", f"{lora}:{scale}").returncode == 0
    of = [json.loads(line) for line in records.read_text().splitlines()]
    scales = [record["lora"] and record["lora"][0]["scale"] for record in of]
    assert sorted(scales, key=str) == [1.0, 1.0, 2.0, 2.0, None, None]
    assert len({record["nll"] for record in of}) == 6
    # the reference of the KL is the full cache with the same adapters
    assert all(record["kl"] < 1e-9 for record in of if record["policy"] == "full")


def test_reference_predictions_depend_on_the_adapters():
    names = ("model_sha256", "text_sha256", "kvtool", "llama_cpp_python", "patch")
    what = dict.fromkeys(names, "1")
    common = grid.Common(what | {"lora": None}, ScoreOptions(n_ctx=512, n_batch=64), 9)
    adapted = replace(common, what=what | {"lora": [{"file": "a", "sha256": "1", "scale": 1.0}]})
    assert len({grid.reference(each) for each in (common, replace(common, what=what), adapted)}) == 2


def test_errors_about_a_draft_model_name_the_option(default_talker, tmp_path):
    assert_one_line(
        generate("--draft", "mamba"), 3, "--draft mamba: unknown model 'mamba' (and no such file)"
    )
    (tmp_path / "text").write_text("text")
    assert_one_line(
        generate("--draft", tmp_path / "text"), 3, f"--draft {tmp_path}/text: {tmp_path}/text is not a GGUF"
    )
    assert_one_line(generate("--draft", ""), 2, "--draft is empty; give lookup, mtp, off or a model")


def test_draft_model_gets_no_adapters_and_no_tensor_overrides(talker, lora):
    run = WriteOptions(draft=str(talker), lora=(str(lora),), override_tensor=(".*=CPU",), cpu_moe=True)
    with closing(Model(talker, adapters=run.adapters)) as model, drafting.opened(run, model) as drafts:
        assert drafts._draft_model.adapters == ()
        assert drafts._draft_model._placement.overrides == ()


def fake_gpu(monkeypatch, path, n_layer, *, n_expert=0, n_cell=0):
    """Let kvtool see a made-up GPU that has room for a part of a model.

    This part has the output, the last n_layer layers with n_cell cells each, and the experts of n_expert
    layers.
    """
    info = read(path)
    weights, cache_bytes = info.weights, info.plain_layers.cell_bytes() * n_cell
    n_bytes = weights.output + sum(weights.dense[weights.n_layer - n_layer :])
    n_bytes += n_layer * (cache_bytes // weights.n_layer)
    n_bytes += sum(weights.experts[-n_expert:]) if n_expert else 0
    monkeypatch.setattr(devices, "gpus", lambda: [{"name": "Fake0", "type": "gpu"}])
    memory = config_model._MARGIN + n_bytes
    monkeypatch.setattr(devices, "memory_of", lambda device: (memory, memory))


@pytest.mark.parametrize(
    ("n_layer", "n_expert", "gpu_layers", "n_cpu_moe", "cpu_moe", "line"),
    [
        (2, 0, 3, None, True, "room for 3 of 5 layers, without their experts; the rest"),
        (4, 0, None, 4, False, "room for all but the experts of 4 of 4 layers"),
        (4, 3, None, 1, False, "room for all but the experts of 1 of 4 layers"),
        (4, 4, None, None, False, ""),
    ],
)
def test_gpu_gets_as_many_weights_as_fit(
    tiny_model, monkeypatch, n_layer, n_expert, gpu_layers, n_cpu_moe, cpu_moe, line
):
    path = tiny_model("gpt_oss", n_layer=4)
    fake_gpu(monkeypatch, path, n_layer, n_expert=n_expert, n_cell=512)
    run, note = config_model._fitted_to_gpu(WriteOptions(), read(path), 512)
    assert (run.gpu_layers, run.n_cpu_moe, run.cpu_moe) == (gpu_layers, n_cpu_moe, cpu_moe)
    assert bool(note) == bool(line)
    assert line in note


def test_mtp_layer_counts_as_a_gpu_layer(tiny_model, monkeypatch):
    path = tiny_model("qwen35")
    fake_gpu(monkeypatch, path, 0)
    # an MTP layer counts as a layer, even if it is not loaded and needs no room
    for draft, n in ("lookup", 2), ("mtp", 1):
        done = generate("--raw", "-m", path, "--draft", draft)
        assert f"the GPU has room for {n} of 6 layers; the rest" in done.stderr


def test_a_gpu_with_less_memory_than_it_reports_gets_fewer_layers(default_talker, monkeypatch):
    class Full(Model):
        most, tried = 1, []

        def __init__(self, path, *, n_gpu_layers=None, **options):
            self.tried.append(n_gpu_layers)
            if n_gpu_layers is None or n_gpu_layers > self.most:
                raise OutOfMemory("the GPU is full")
            super().__init__(path, n_gpu_layers=n_gpu_layers, **options)

    fake_gpu(monkeypatch, default_talker, 2, n_cell=1000)
    monkeypatch.setattr(llama_model, "Model", Full)
    done = generate("--raw")
    assert done.returncode == 0
    assert Full.tried == [None, 0]
    assert "the GPU has room for 0 of 3 layers" in done.stderr
    # now the second try also fails, although it puts no layers on the GPU
    Full.most = -1
    assert_one_line(generate("--raw"), 8, "the GPU is full")
    assert Full.tried[2:] == [None, 0]
    # if the user chose the layers, kvtool does not try again
    assert_one_line(generate("--raw", "-ngl", 2), 8, "the GPU is full")
    assert Full.tried[4:] == [2]


def test_resident_tokens_leave_less_gpu_memory_for_layers(default_talker, monkeypatch):
    fake_gpu(monkeypatch, default_talker, 2, n_cell=1000)
    assert "room" not in generate("--raw").stderr
    # With --resident 1024, each row has cells for 1,024 resident tokens, 384 tokens that have no cluster yet,
    # 256 means of clusters, and one more cell. The sum is rounded up to 1,792, a multiple of 256.
    fake_gpu(monkeypatch, default_talker, 1, n_cell=1000 + 1792)
    assert "room for 1 of 3 layers" not in generate("--raw").stderr
    assert "room for 1 of 3 layers" in generate("--raw", "--resident", 1024, "-fa", "on").stderr


def test_a_gpu_without_memory_for_the_cache_gets_fewer_layers(default_talker, monkeypatch):
    open_context, models = loop.open_context, []

    def crowded(model, *arguments):
        models.append(model)
        if model._n_gpu_layers != 0:
            raise OutOfMemory("no memory for a cache", on_gpu=model.uses_gpu)
        return open_context(model, *arguments)

    monkeypatch.setattr(loop, "open_context", crowded)
    monkeypatch.setattr(llama_model, "has_gpu", lambda: True)
    fake_gpu(monkeypatch, default_talker, 1, n_cell=1000)
    done = generate("--raw")
    assert done.returncode == 0
    assert [model._n_gpu_layers for model in models] == [2, 0]
    assert not any(model.is_open for model in models)
    assert [line for line in done.stderr.splitlines() if "room" in line] == [
        "the GPU has room for 0 of 3 layers; the rest is in host memory (--gpu-layers sets another number)"
    ]
    line = "choose a smaller --budget, --batch-size or --ctx-size, fewer --gpu-layers, or a smaller model"
    assert_one_line(generate("--raw", "-ngl", 2), 8, line)
    assert len(models) == 3


@pytest.mark.parametrize(
    "options", [{"gpu_layers": 1}, {"gpu_layers": ALL_LAYERS}, {"cpu_moe": True}, {"rpc": "there:50052"}]
)
def test_placement_chosen_by_the_user_is_not_changed(talker, monkeypatch, options):
    fake_gpu(monkeypatch, talker, 1)
    run = WriteOptions(**options)
    assert config_model._fitted_to_gpu(run, read(talker), 512) == (run, "")


def test_command_says_how_many_layers_are_in_host_memory(default_talker, monkeypatch):
    fake_gpu(monkeypatch, default_talker, 1, n_cell=1000)
    line = "the GPU has room for 2 of 3 layers; the rest is in host memory (--gpu-layers sets another number)"
    assert line in generate("--raw").stderr.splitlines()
    for n in ("all", -2, 1):
        assert line not in generate("--raw", "-ngl", n).stderr
    assert line in generate("--raw", "-ngl", "auto").stderr
    assert_one_line(
        generate("-ngl", "some"), 2, "--gpu-layers must be a whole number or auto or all, got 'some'"
    )
    assert_one_line(generate("-ngl", "-3"), 2, "--gpu-layers must be at least -2, got -3")
