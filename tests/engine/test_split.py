"""A model in several GGUF files behaves like the same model in one file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from itertools import chain

import pytest

import tests.models.web as server
import tests.tiny as tiny
from kvtool.errors import ModelError
from kvtool.models.download import sha256
from kvtool.models.header import read, read_file
from kvtool.models.resolve import resolve
from kvtool.models.split import part_names
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import kvtool


@pytest.fixture(scope="module")
def split_paths(tmp_path_factory, chat_model):
    return tiny.split(chat_model, tmp_path_factory.mktemp("made") / "chat-F32", 3)


@pytest.fixture
def parts(tmp_path, split_paths):
    return [shutil.copy(path, tmp_path / path.name) for path in split_paths]


def generate(model):
    args = ["-m", model, "-p", "tell me", "-n", 24, "-t", 1, "--temp", 0, "--policy", "h2o", "--budget", 16]
    return kvtool("generate", *args)


# names of the parts


def test_part_names_lists_all_parts():
    assert part_names("a-00002-of-00003.gguf") == [f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "name",
    [
        *("a-00001-of-00001.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf"),
        *("a-1-of-3.gguf", "a.gguf"),
    ],
)
def test_part_names_of_a_single_file_lists_only_itself(name):
    assert part_names(name) == [name]


# headers of the parts


def test_header_of_parts_equals_that_of_the_single_file(parts, chat_model):
    whole, info = read(chat_model), read(parts[0])
    assert (info.n_part, whole.n_part) == (3, 1)
    assert info.size == sum(path.stat().st_size for path in parts)
    for name in ("architecture", "n_layer", "n_head_kv", "n_ctx_train", "chat_template", "tokenizer"):
        assert getattr(info, name) == getattr(whole, name)
    assert info.plain_layers == whole.plain_layers
    whole = read_file(chat_model).tensors
    assert dict(chain.from_iterable(read_file(path).tensors.items() for path in parts)) == whole


def test_any_part_resolves_to_the_first_part(parts):
    for path in parts:
        assert resolve(str(path)) == parts[0]


def test_the_hash_covers_all_parts(parts):
    data = b"".join(path.read_bytes() for path in parts)
    progress = []
    digest = sha256(parts[0], lambda done, total: progress.append((done, total)))
    assert digest == hashlib.sha256(data).hexdigest()
    assert progress[-1] == (len(data), len(data))
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"!")
    assert sha256(parts[0]) != digest


def change(path, name, value):
    """Overwrite the low two bytes of the number that follows `name` in the header."""
    with path.open("r+b") as file:
        data = file.read()
        offset = data.index(name.encode()) + len(name) + 4
        file.seek(offset)
        file.write(value.to_bytes(2, "little"))


SECOND = "chat-F32-00002-of-00003.gguf"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a, b, c: b.unlink(), f"{SECOND} of the 3 parts of the model is missing; all have to be in "),
        (lambda a, b, c: (b.unlink(), c.unlink()), f"{SECOND} and 1 more of the 3 parts of the model is "),
        (lambda a, b, c: os.truncate(b, b.stat().st_size - 1000), f"{SECOND} is truncated"),
        (lambda a, b, c: shutil.copy(c, b), f"{SECOND} is not part 2 of 3 of a model; download it again"),
        (lambda a, b, c: change(a, "split.tensors.count", 99), " instead of 99: they are not of one model"),
        (lambda a, b, c: a.rename(a.with_name("chat.gguf")), "chat.gguf is the first of 3 parts, and its"),
        (lambda a, b, c: change(a, "split.count", 4), "is the first of 4 parts, and its name does not say"),
    ],
)
def test_inconsistent_parts_are_refused_with_one_line(parts, spoil, message):
    spoil(*parts)
    path = parts[0] if parts[0].exists() else parts[0].with_name("chat.gguf")
    with pytest.raises(ModelError) as error:
        read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_reading_another_part_names_the_first_part(parts):
    with pytest.raises(
        ModelError, match=r"not the first part of its model; name the first, chat-F32-00001-of"
    ):
        read(parts[1])


def test_missing_first_part_is_named(parts):
    parts[0].unlink()
    with pytest.raises(ModelError) as error:
        resolve(str(parts[2]))
    assert str(error.value) == (
        f"{parts[0].name}, the first part of the model, is missing; it has to be in {parts[0].parent}"
    )


def test_single_file_may_have_the_name_of_a_part(tmp_path, chat_model):
    path = shutil.copy(chat_model, tmp_path / "a-00001-of-00002.gguf")
    assert read(path).n_part == 1
    assert sha256(path) == sha256(chat_model)


def test_models_show_says_how_many_files(parts):
    result = run_kvtool("models", "show", parts[1])
    assert " in 3 files" in result.stdout
    assert result.stderr.endswith(": reading the first part, chat-F32-00001-of-00003.gguf\n")
    done = run_kvtool("models", "show", parts[0], "--json")
    assert (json.loads(done.stdout)["parts"], done.stderr) == (3, "")


# texts and chats of a model in parts


def test_split_model_generates_the_text_of_the_single_file(parts, chat_model):
    whole = generate(chat_model)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert len(whole.stdout) > 10
    assert generate(parts[0]).stdout == generate(parts[2]).stdout == whole.stdout


def test_a_missing_part_ends_with_one_line(parts):
    parts[1].unlink()
    assert_one_line(generate(parts[0]), 3, "is missing")


def test_chat_with_a_downloaded_model_continues_offline(parts, tmp_path):
    """A chat downloads the parts. The next chat continues the session after the server has stopped."""
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "KVTOOL_CACHE": str(tmp_path / "cache")}

    def chat(*options, **more):
        defaults = ["-t", 1, "--temp", 0, "-n", 8, "--session", tmp_path / "chat.kvs"]
        return kvtool("chat", *defaults, *options, stdin="hello\n", env=environment | more)

    with server.serving() as site:
        server.add_repository(site, "o/r", {path.name: path.read_bytes() for path in parts})
        first = chat("-m", "o/r:f32", "--policy", "h2o", "--budget", "64", HF_ENDPOINT=site.url)
        assert (first.returncode, first.stderr) == (
            0,
            "downloading o/r:f32\no/r:f32: chat-F32-00001-of-00003.gguf\n",
        )
        assert len([path for _, path, *_ in site.requests if path.startswith("/store/")]) == 3
    resumed = chat()
    assert (resumed.returncode, resumed.stderr) == (0, "")
    # if the last part has changed, the model is no longer the one of the session, so the session is refused
    last = next((tmp_path / "hf").rglob("*-00003-of-00003.gguf"))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert_one_line(chat(), 9, "SHA-256")
