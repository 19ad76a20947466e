"""Placement of weights: experts and single tensors in host memory, layers shared among devices.

The devices are the library's GPU if there is one (`make check-vulkan`), else two of ggml's RPC servers on
loopback. The tests run this file as a module in another process, because devices are registered for a whole
process.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvtool.config import drafting
from kvtool.config import model as config_model
from kvtool.config.run import RunOptions, WriteOptions
from kvtool.errors import ModelError, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama import devices
from kvtool.llama.libllama.devices import buffers, gpus, has_gpu
from kvtool.llama.libllama.log import set_verbose
from kvtool.llama.libllama.workers import add_rpc
from kvtool.llama.loaded import placement
from kvtool.llama.loaded.model import Model
from kvtool.llama.loaded.placement import Placement, parse_overrides, parse_shares
from kvtool.models.header import read
from tests.engine import rpc_server
from tests.engine.exact_engines import LOGIT_TOLERANCE, random_tokens

# every layer has six tensors of experts: three matrices with a bias each
N_LAYER, N_EXPERTS, N_CELL = 4, 6, 256
N_MTP_CELL = 512

OF_ONE = {
    "plain": {},
    "cpu-moe": {"cpu_moe": True},
    "n-cpu-moe 2": {"n_cpu_moe": 2},
    "n-cpu-moe 99999999": {"n_cpu_moe": 99_999_999},
    "override": {"override_tensor": (r"blk\.[0-9]{1,2}\.ffn_up_exps=CPU,attn_k\.=CPU",)},
    # of several patterns that match, the first is used
    "before": {"override_tensor": (r"blk\.1\.=GPU",), "cpu_moe": True},
}
OF_TWO = {
    "tensor-split 0,1": {"tensor_split": "0,1"},
    "tensor-split 1,4": {"tensor_split": "1,4"},
    "split-mode none": {"split_mode": "none", "main_gpu": 1},
}
# runs with --gpu-layers auto. Each value is a share: the devices have room for this share of the model's
# weights and cache
LIMITED = {"room for 0.3": 0.3, "room for 0.8": 0.8}
# the same for a model with an MTP layer. Each value is (True if the MTP layer is loaded, share)
MTP = {f"MTP {on}, room for {share}": (on == "on", share) for on in ("on", "off") for share in (0.3, 0.9, 1)}
WRONG = {
    "buffer": {"override_tensor": ("exps=CUDA7",)},
    "shares": {"tensor_split": "1,1,1"},
    "main": {"main_gpu": 2},
    "row": {"split_mode": "row"},
}


def all_mib(path, mtp=False):
    """Return the size in MiB of the F16 caches and of all weights that can be on a GPU."""
    info = read(Path(path))
    weights = info.weights if mtp else info.weights.without_mtp()
    cell_bytes = info.plain_layers.cell_bytes()
    cache = cell_bytes * N_CELL + mtp * cell_bytes // N_LAYER * N_MTP_CELL
    return (sum(weights.dense) + sum(weights.experts) + weights.output + cache) / 2**20


def client(path, path_mtp, *endpoints):
    """Print the results of all runs as JSON. llama.cpp's log goes to stderr."""
    set_verbose(True)
    if endpoints:
        add_rpc(*endpoints)
    names, results = [device["name"] for device in gpus()], []
    (first, *_) = on_gpu = [name for name in buffers() if name != "CPU"]
    if endpoints:
        sys.stderr.write("\nrun draft\n")
        run = WriteOptions(draft=path, rpc=",".join(endpoints), split_mode="none", main_gpu=1, verbose=2)
        with closing(Model(path, vocab_only=True)) as model, drafting.opened(run, model) as drafts:
            results.append(drafts._draft_model._placement == Placement())
    for name, options in {**OF_ONE, **LIMITED, **MTP, **(OF_TWO if endpoints else {}), **WRONG}.items():
        sys.stderr.write(f"\nrun {name}\n")
        mtp, file = False, path
        if is_limited := name in LIMITED or name in MTP:
            mtp, share = MTP.get(name, (False, options))
            file, options = path_mtp if name in MTP else path, {}
            free = config_model._MARGIN * len(names) + int(share * 2**20 * all_mib(file, mtp))
            devices.gpu_free_bytes = lambda n=free: n
        overrides = tuple(each.replace("GPU", first) for each in options.get("override_tensor", ()))
        run = RunOptions(**(options | {"override_tensor": overrides}))
        if is_limited:
            run, line = config_model._fitted_to_gpu(run, read(Path(file)), N_CELL, mtp=mtp)
            sys.stderr.write(line)
        exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_output": 32}
        try:
            with (
                closing(Model(file, n_gpu_layers=run.gpu_layers, placement=run.placement, mtp=mtp)) as model,
                ExitStack() as stack,
            ):
                context = stack.enter_context(closing(Context(model, N_CELL, 32, **exact)))
                context.decode(random_tokens(32), 0, 32)
                results.append([model.is_on_gpu, model.only_gpu, context.logits().tolist()])
        except UsageError as error:
            results.append(str(error))
    print(json.dumps([names, on_gpu, results]))


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(arch="gpt_oss", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def path_mtp(tiny_model):
    return tiny_model(arch="qwen35", n_layer=N_LAYER)


@pytest.fixture(scope="module")
def placement_runs(path, path_mtp):
    """Return (names of the devices, names of their buffers, result of each run, log of each run)."""
    with ExitStack() as stack:
        endpoints = [] if has_gpu() else [stack.enter_context(rpc_server.running()) for _ in range(2)]
        paths = str(path), str(path_mtp)
        (*names, results), logs = rpc_server.client("tests.llama.test_placement", *paths, *endpoints)
    draft, of_two = (["draft"], OF_TWO) if endpoints else ([], {})
    runs = [*draft, *OF_ONE, *LIMITED, *MTP, *of_two, *WRONG]
    return *names, dict(zip(runs, results, strict=True)), dict(zip(runs, logs[1:], strict=True))


def moved(log):
    """Return {buffer: names of the tensors that an override moved to it}."""
    by_buffer = {}
    for name, buffer in re.findall(r"tensor (\S+) \(.*\) buffer type overridden to (\S+)", log):
        by_buffer.setdefault(buffer, []).append(name)
    return by_buffer


def device_mib(log, buffers):
    sizes = re.findall(r"(\S+) model buffer size = +([0-9.]+) MiB", log)
    return sum(float(size) for buffer, size in sizes if buffer in buffers)


def experts(n_layer, but=()):
    parts = [f"ffn_{part}_exps.{end}" for part in ("gate", "up", "down") for end in ("weight", "bias")]
    return {f"blk.{i}.{part}" for i in range(n_layer) if i not in but for part in parts}


@pytest.mark.parametrize("run", OF_ONE)
def test_overrides_put_tensors_into_host_memory_and_change_no_logits(placement_runs, path, run):
    _, on_gpu, results, logs = placement_runs
    tensors = moved(logs[run])
    assert len(experts(1)) == N_EXPERTS
    expected = {
        "cpu-moe": experts(N_LAYER),
        "n-cpu-moe 2": experts(2),
        "n-cpu-moe 99999999": experts(N_LAYER),
        "before": experts(N_LAYER, but=[1]),
        "plain": set(),
    }
    if run == "override":
        layers = range(N_LAYER)
        ups = {f"blk.{i}.ffn_up_exps.{end}" for i in layers for end in ("weight", "bias")}
        keys = {f"blk.{i}.attn_k.{end}" for i in layers for end in ("weight", "bias")}
        expected[run] = ups | keys
    # buffers that are not on a GPU are in host memory. Their names differ: for example, CUDA copies faster
    # from its own type of host memory, CUDA_Host
    assert {name for buffer in tensors if buffer not in on_gpu for name in tensors[buffer]} == expected[run]
    own_mib = device_mib(logs[run], on_gpu)
    assert own_mib < device_mib(logs["plain"], on_gpu) if expected[run] else own_mib > 0
    assert any(name.startswith("blk.1.attn") for name in tensors.get(on_gpu[0], ())) == (run == "before")
    # attention and cache stay on the devices
    is_on_gpu, _, logits = results[run]
    assert is_on_gpu
    assert not re.search(r"CPU KV buffer size", logs[run])
    assert np.abs(np.array(logits) - results["plain"][2]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("run", LIMITED)
def test_device_with_little_memory_gets_the_layers_that_fit(placement_runs, path, run):
    _, on_gpu, results, logs = placement_runs
    used, room = device_mib(logs[run], on_gpu), LIMITED[run] * all_mib(path)
    # less room is left than a layer takes. Otherwise the devices would get another layer
    assert room - all_mib(path) / N_LAYER < used <= room
    assert "the GPU has room for" in logs[run]
    assert np.abs(np.array(results[run][2]) - results["plain"][2]).max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("run", MTP)
def test_device_gets_the_layers_that_fit_with_an_mtp_layer(placement_runs, path_mtp, run):
    _, on_gpu, results, logs = placement_runs
    is_loaded, share = MTP[run]
    used, room = device_mib(logs[run], on_gpu), share * all_mib(path_mtp, is_loaded)
    assert room - all_mib(path_mtp, is_loaded) / N_LAYER < used <= room
    # the output and the MTP layer count as layers, even if the MTP layer is not loaded
    assert ("the GPU has room for" in logs[run]) == (share < 1)
    assert f" of {N_LAYER + 2} layers" in logs[run] or share == 1
    assert results[run][0] == (share == 1)


@pytest.mark.skipif(has_gpu(), reason="one device")
@pytest.mark.parametrize(
    ("run", "of_layers"),
    # each list has four layers and the output
    [
        ("tensor-split 0,1", [1, 1, 1, 1, 1]),
        ("tensor-split 1,4", [0, 1, 1, 1, 1]),
        ("split-mode none", [1] * 5),
    ],
)
def test_layers_are_divided_by_tensor_split_and_split_mode(placement_runs, run, of_layers):
    names, _, results, logs = placement_runs
    assert len(names) == 2
    assigned = re.findall(r"layer +\d+ assigned to device (\S+),", logs[run])
    assert assigned == [names[i] for i in of_layers]
    assert results[run][1] == (1 if run == "split-mode none" else None)
    assert np.abs(np.array(results[run][2]) - results["plain"][2]).max() < LOGIT_TOLERANCE


@pytest.mark.skipif(has_gpu(), reason="one device")
def test_a_draft_model_stays_on_this_machine(placement_runs):
    *_, results, logs = placement_runs
    # --main-gpu 1 puts a model on the second worker. A draft model must ignore this option, so that it stays
    # on this machine
    assert results["draft"]
    # N_LAYER layers, and the output, which llama.cpp counts as a layer
    assigned = re.findall(r"layer +\d+ assigned to device (\S+),", logs["draft"])
    assert assigned == ["CPU"] * (N_LAYER + 1)


def test_invalid_placements_are_refused_with_the_available_devices(placement_runs):
    names, on_gpu, results, _ = placement_runs
    listed = f"{', '.join(names)} ({len(names)})"
    assert results["buffer"].startswith("--override-tensor: there is no buffer 'CUDA7'; there are: ")
    assert set(results["buffer"].partition("are: ")[2].split(", ")) == {"CPU", *on_gpu}
    assert results["shares"] == f"--tensor-split has 3 shares, for the devices {listed}"
    assert results["main"] == f"--main-gpu must be below the number of devices, which are {listed}"
    assert results["row"] == f"{names[0]} cannot split a tensor by rows; choose --split-mode layer"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_everything_stays_in_host_memory(path):
    placement = Placement(((".*", "CPU"),), (3,) * 99, 5, "row")
    with closing(Model(path, placement=placement)) as model:
        assert not model.is_on_gpu
    with pytest.raises(UsageError, match="there is no buffer 'CUDA0'; there are: CPU"):
        Model(path, placement=Placement((("exps", "CUDA0"),)))


@pytest.mark.parametrize(
    ("typed", "pairs"),
    [
        ("exps=CPU", [("exps", "CPU")]),
        (
            r"\.ffn_.*=CPU,blk\.1=RPC0[127.0.0.1:50052]",
            [(r"\.ffn_.*", "CPU"), (r"blk\.1", "RPC0[127.0.0.1:50052]")],
        ),
        # llama.cpp would end the first pattern at its comma
        (r"blk\.[0-9]{1,2}\.=CPU,x=Vulkan0", [(r"blk\.[0-9]{1,2}\.", "CPU"), ("x", "Vulkan0")]),
        ("a(?=b)=CPU", [("a(?=b)", "CPU")]),
        (r"\(?x=CPU", [(r"\(?x", "CPU")]),
        ("[[:alpha:]]=CPU", [("[[:alpha:]]", "CPU")]),
    ],
)
def test_override_pairs_are_separated_by_commas(typed, pairs):
    assert parse_overrides(typed) == pairs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_tensor": ("exps",)}, "--override-tensor takes PATTERN=BUFFER, such as ffn_down=CPU, got"),
        ({"override_tensor": ("a=CPU,b",)}, "takes PATTERN=BUFFER, such as ffn_down=CPU, got 'a=CPU,b'"),
        ({"override_tensor": ("=CPU",)}, "takes PATTERN=BUFFER"),
        ({"override_tensor": ("",)}, "takes PATTERN=BUFFER"),
        ({"override_tensor": ("ok=CPU", "(=CPU")}, "--override-tensor: '(' is not a regular expression"),
        ({"override_tensor": ("[z-a]=CPU",)}, "'[z-a]' is not a regular expression (bad character range"),
        ({"override_tensor": ("(?i)x=CPU",)}, "'(?i)x' is not a regular expression (llama.cpp does not know"),
        ({"override_tensor": ("x{9999999999999}=CPU",)}, "is not a regular expression"),
        ({"tensor_split": ""}, "--tensor-split takes a share for each device, such as 3,1, got ''"),
        ({"tensor_split": "1,x"}, "takes a share for each device, such as 3,1, got '1,x'"),
        ({"tensor_split": "1,-1"}, "takes a share for each device"),
        ({"tensor_split": "nan"}, "takes a share for each device"),
        ({"tensor_split": "0,0"}, "--tensor-split needs a share above 0, got '0,0'"),
        ({"n_cpu_moe": -1}, "--n-cpu-moe must be at least 0, got -1"),
        ({"main_gpu": -1}, "--main-gpu must be at least 0, got -1"),
        ({"split_mode": "tensor"}, "--split-mode must be none, layer or row, got 'tensor'"),
    ],
)
def test_invalid_placement_options_are_refused_without_a_model(options, words):
    with pytest.raises(UsageError) as caught:
        RunOptions(**options)
    assert words in str(caught.value)


def test_shares_are_separated_by_commas_or_slashes():
    assert parse_shares("3,1") == parse_shares("3/1") == (3, 1)


def test_pattern_that_only_python_supports_raises_model_error(path):
    # RunOptions refuses patterns that only Python supports. It does not know the patterns that a later Python
    # may add, so such a pattern would reach Placement
    with pytest.raises(ModelError, match="cannot load .*regular expression"):
        Model(path, placement=Placement((("(?<=x)y", "CPU"),)))
    assert placement.SPLIT_MODES.index("row") == 2


if __name__ == "__main__":
    client(*sys.argv[1:])
