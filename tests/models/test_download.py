"""Models by URL and by repository, from a server on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tests.models.web as server
import tests.tiny as tiny
from kvtool.cli import app
from kvtool.cli import models as cli
from kvtool.config.model import find_model
from kvtool.errors import ModelError
from kvtool.models import catalogue, download, hub, stored, web
from kvtool.models import resolve as resolving
from kvtool.models.fetch import OFFLINE
from kvtool.models.header import read
from kvtool.models.resolve import resolve
from tests import fork_server


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write_llama(path, chat_template=tiny.CHAT_TEMPLATE)
    return path.read_bytes()


@pytest.fixture(scope="module")
def parts(tmp_path_factory, model) -> dict[str, bytes]:
    """The same model in three files, as a dict from each file's name to its bytes."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "whole.gguf").write_bytes(model)
    return {path.name: path.read_bytes() for path in tiny.split(folder / "whole.gguf", folder / "tiny", 3)}


@pytest.fixture
def site():
    with server.serving() as site:
        yield site


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch, site):
    """Begin with empty caches, and use `site` as the server of repositories."""
    from huggingface_hub import constants

    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVTOOL_MODEL", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    # huggingface_hub reads the environment only when it is imported, so set its constants
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "ENDPOINT": site.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": site.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
    }.items():
        monkeypatch.setattr(constants, name, value)


@pytest.fixture
def url(site, model):
    """URL of the model on `site`."""
    site.files["/tiny.gguf"] = model
    return f"{site.url}/tiny.gguf"


@pytest.fixture(params=["URL", "hf:o/r"])
def source(request, site, model, url):
    """Name of the model on `site`: its URL, or its repository."""
    server.add_repository(site, "o/r", {"m.gguf": model})
    return url if request.param == "URL" else request.param


def kvtool(*args: str):
    return CliRunner().invoke(cli.app, args, catch_exceptions=False)


def requests_of(site, word=".gguf", method="GET"):
    return [request for request in site.requests if word in request[1] and request[0] == method]


# models by URL


def test_a_url_is_downloaded_once(site, model):
    site.files["/a/tiny.gguf"] = model
    url = f"{site.url}/a/tiny.gguf"
    progress = []
    path = resolve(url, lambda done, total: progress.append((done, total)))
    assert path.read_bytes() == model
    assert path.name == "tiny.gguf"
    assert path.parent.name == hashlib.sha256(url.encode()).hexdigest()[:16]
    assert progress[-1] == (len(model), len(model))
    assert resolve(url) == path
    assert len(site.requests) == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["tiny.gguf", "url.txt"]


def test_broken_url_download_restarts_from_the_beginning(site, model, url):
    site.breaks_after = 100_000
    with pytest.raises(ModelError) as error:
        resolve(url)
    assert str(error.value) == (
        f"the download of {url} broke off after 97.7 KiB of {len(model) / 1024:.1f} KiB "
        f"(the connection ended); the same command tries again; {OFFLINE}"
    )
    assert web.cached(url) is None
    assert stored.downloads() == []
    assert list(web.urls_dir().iterdir()) == []
    assert resolve(url).read_bytes() == model
    assert [request[2] for request in site.requests] == [None, None]


def test_killed_download_leaves_no_file_with_the_final_name(model, source):
    code = (
        "import os, sys; import huggingface_hub.constants as c; from kvtool.models.resolve import resolve\n"
        "c.HF_HUB_CACHE, c.ENDPOINT, c.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[2:]\n"
        "c.DOWNLOAD_CHUNK_SIZE = 1000\n"
        "resolve(sys.argv[1], lambda done, total: done and os._exit(9))"
    )
    from huggingface_hub import constants

    locations = constants.HF_HUB_CACHE, constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE
    done = subprocess.run([sys.executable, "-c", code, source, *locations])
    assert done.returncode == 9
    remains = stored.downloads()
    assert [(each.name, each.is_whole) for each in remains] == [(source, False)]
    assert not any(path.name.endswith(".gguf") for each in remains for path in each.files)
    assert resolve(source).read_bytes() == model


def test_truncated_download_of_unknown_size_is_found_by_its_header(site, model, url):
    site.says_length = False
    site.breaks_after = 100_000
    with pytest.raises(ModelError, match="truncated"):
        resolve(url)
    assert web.cached(url) is None
    assert resolve(url).read_bytes() == model


def test_download_that_is_not_gguf_is_not_kept(site):
    site.files["/tiny.gguf"] = b"<html>Please sign in</html>"
    site.kind = "text/html"
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a GGUF file \(text/html\)"):
        resolve(f"{site.url}/tiny.gguf")
    assert stored.total(stored.downloads()) < 200


@pytest.mark.parametrize(
    ("path", "message"),
    [("/missing.gguf", "the server answered 404 Not Found"), ("/model.bin", "a URL for -m ends in .gguf")],
)
def test_failing_urls_give_one_line_errors(site, path, message):
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        resolve(site.url + path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/m.gguf",
        "http://HOST/a b/m.gguf",
        "http://HOST/caf\u00e9/m.gguf",
        "http://localhost:port/m.gguf",
        "http://localhost:99999/m.gguf",
        "http://me:secret@HOST/m.gguf",
        "http://HOST/m.gguf ",
    ],
)
def test_urls_that_cannot_be_requested_are_refused_in_one_line(site, url):
    url = url.replace("HOST", site.url.removeprefix("http://"))
    with pytest.raises(ModelError) as error:
        resolve(url)
    assert str(error.value).startswith(f"{url!r} is not a URL for -m: write %20 for a space")
    assert "\n" not in str(error.value)
    assert site.requests == []
    assert not web.urls_dir().exists()


def test_url_cannot_place_its_file_in_another_folder(site, model):
    site.files["/..%2F..%2Ftiny.gguf"] = model
    path = resolve(f"{site.url}/..%2F..%2Ftiny.gguf?download=true")
    assert (path.name, path.parent.parent) == (".._.._tiny.gguf", web.urls_dir())


def test_url_of_any_part_downloads_all_parts_of_a_split_model(site, parts):
    for name, data in parts.items():
        site.files[f"/{name}"] = data
    names = sorted(parts)
    path = resolve(f"{site.url}/{names[1]}")
    assert path.name == names[0]
    info = read(path)
    assert (info.n_part, info.size) == (3, sum(map(len, parts.values())))
    assert resolve(f"{site.url}/{names[2]}") == path
    assert len(site.requests) == 3
    # complete parts are kept after an error
    stored.remove(f"{site.url}/{names[0]}")
    last = site.files.pop(f"/{names[2]}")
    with pytest.raises(ModelError, match="404"):
        resolve(f"{site.url}/{names[1]}")
    assert stored.downloads()[0].files[-1].name == web.URL_FILE
    site.files[f"/{names[2]}"] = last
    assert read(resolve(f"{site.url}/{names[0]}")).n_part == 3
    assert len(site.requests) == 7


def test_unwritable_cache_error_names_the_variable_to_set(tmp_path, monkeypatch, source):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    variable = "HF_HOME" if source == "hf:o/r" else "KVTOOL_CACHE"
    with pytest.raises(
        ModelError, match=rf"cannot store .*gguf in .*file.*set \${variable} to another folder"
    ):
        resolve(source)


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("source", "fails", "error"),
    [
        ("URL", "kvtool.models.fetch.os.fsync", DISK_FULL),
        ("hf:o/r", "huggingface_hub.hf_hub_download", DISK_FULL),
        # huggingface_hub's library in Rust reports a full disk in this way
        ("hf:o/r", "huggingface_hub.hf_hub_download", RuntimeError(f"I/O (os error {errno.ENOSPC})")),
    ],
    indirect=["source"],
)
def test_full_disk_is_reported(monkeypatch, source, fails, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(fails, full)
    with pytest.raises(
        ModelError, match=r"^the disk is full .*: there is no room for .*gguf in .*; free some"
    ):
        resolve(source)


def test_local_file_is_resolved_without_importing_download_modules(tmp_path, model):
    path = tmp_path / "mine.gguf"
    path.write_bytes(model)
    code = (
        "import sys; from kvtool.models.resolve import resolve; resolve(sys.argv[1]); "
        "print({'huggingface_hub', 'urllib.request', 'kvtool.models.hub'} & set(sys.modules))"
    )
    done = fork_server.run_python("-c", code, path, check=True)
    assert done.stdout == "set()\n"


def test_two_processes_download_once(site, model, url):
    code = "import sys; from kvtool.models.resolve import resolve; print(resolve(sys.argv[1]))"
    command = [sys.executable, "-c", code, url]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second,
    ):
        printed = first.communicate()[0]
        assert printed == second.communicate()[0]
    assert Path(printed.strip()).read_bytes() == model
    assert len(site.requests) == 1


# models by repository


def test_repository_references_are_parsed_or_refused():
    assert hub.parse("hf:o/r") == hub.Reference("o/r")
    assert hub.parse("hf:o/r@v1.0:q8_0") == hub.Reference("o/r", "v1.0", "q8_0")
    assert hub.parse("o/r:Q4_0") == hub.Reference("o/r", None, "Q4_0")
    assert str(hub.parse("o/r@refs/pr/1:Q4_0")) == "hf:o/r@refs/pr/1:Q4_0"
    for text in ("o/r", "o/r.gguf", "./a:b", "/o/r:Q4", "o/r/f:Q4", "name"):
        assert hub.parse(text) is None
    # a revision must not lead out of the repository's folder
    outside = [f"hf:o/r@{each}:Q4" for each in ("/tmp", "..", ".", "a/../../b", "../a", "a/..", "a//b")]
    for text in ("hf:", "hf:o", "hf:o/r/f", "hf:../r", "hf:o/r:", *outside):
        with pytest.raises(ModelError, match="a repository is hf:OWNER/REPO"):
            hub.parse(text)


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (["a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf"], "", "a-Q4_K_M.gguf"),
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], "", "a-Q8_0.gguf"),
        (["b.gguf", "a-f16.gguf", "README.md"], "", "a-f16.gguf"),
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "b-Q4_K.gguf"], "q4_k", "b-Q4_K.gguf"),
        (["a-Q8_0-00002-of-00002.gguf"], "Q8_0", None),
        (["a-IQ4_NL.gguf", "a.q4_0.gguf"], "Q4_0", "a.q4_0.gguf"),
        (["a-IQ2_M.gguf", "a-Q4_K_M.gguf"], "Q2_M", None),
        (["Q8_0/a-00002-of-00002.gguf", "Q8_0/a-00001-of-00002.gguf"], "Q8_0", "Q8_0/a-00001-of-00002.gguf"),
        (["mmproj-Q8_0.gguf", "a-imatrix-Q8_0.gguf"], "", None),
        (["a.gguf", "b.gguf"], "b.gguf", "b.gguf"),
        (["a.gguf", "mmproj-a.gguf"], "mmproj-a.gguf", "mmproj-a.gguf"),
        (["a-00001-of-00002.gguf"], "a-00002-of-00002.gguf", "a-00001-of-00002.gguf"),
        (["a.gguf"], "b.gguf", None),
        (["a-Q8_0.gguf"], "Q4_0", None),
    ],
)
def test_file_of_a_quantization_is_chosen(names, quant, expected):
    assert hub.choose(names, quant) == expected


def test_repository_download_is_cached(site, model):
    server.add_repository(site, "o/r", {"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": b"GGUF", "README.md": b""})
    path = resolve("hf:o/r")
    assert path.read_bytes() == model
    assert path.name == "m-Q4_K_M.gguf"
    n_request = len(site.requests)
    assert resolve("o/r:q4_k_m") == resolve("hf:o/r") == path
    assert len(site.requests) == n_request
    # other programs find the file in huggingface_hub's cache
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache("o/r", "m-Q4_K_M.gguf") == str(path)


def test_cached_quantization_does_not_replace_the_default(site, model):
    server.add_repository(site, "o/r", {"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model})
    assert resolve("hf:o/r:Q8_0").name == "m-Q8_0.gguf"
    assert resolve("hf:o/r").name == "m-Q4_K_M.gguf"


def test_listed_names_tell_two_files_of_one_quantization_apart(site, model):
    server.add_repository(site, "o/r", {"a-Q8_0.gguf": model, "b-Q8_0.gguf": model})
    for name in ("hf:o/r:b-Q8_0.gguf", "hf:o/r"):
        resolve(name)
    listed = [download.name for download in stored.downloads()]
    assert listed == ["hf:o/r:Q8_0", "hf:o/r:b-Q8_0.gguf"]
    assert [resolve(name).name for name in listed] == ["a-Q8_0.gguf", "b-Q8_0.gguf"]


def test_token_is_not_sent_to_the_host_of_a_redirect(site, model):
    server.add_repository(site, "o/r", {"m.gguf": model})
    resolve("hf:o/r")
    assert {token for *_, token in requests_of(site, "/api/")} == {"Bearer hf_secret"}
    assert [token for *_, token in requests_of(site, "/store/")] == [None]


def test_broken_repository_download_is_resumed(site, model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    server.add_repository(site, "o/r", {"m.gguf": model})
    site.breaks_after = 100_000
    progress = []
    path = resolve("hf:o/r", lambda done, total: progress.append((done, total)))
    assert path.read_bytes() == model
    assert [request[2] for request in requests_of(site, "/store/")] == [None, "bytes=100000-"]
    assert progress[0] == (0, None)
    first = next(step for step in progress if step[0])
    assert (first, progress[-1]) == ((10_000, len(model)), (len(model), len(model)))


def test_repository_download_includes_all_parts(site, parts):
    server.add_repository(site, "o/r", {f"Q8_0/{name}": data for name, data in parts.items()})
    path = resolve("hf:o/r:Q8_0")
    assert path.name == min(parts)
    assert read(path).n_part == 3
    # a part that was deleted is downloaded again
    path.with_name(max(parts)).unlink()
    assert read(resolve("hf:o/r:Q8_0")).n_part == 3


def test_revision_or_commit_of_a_repository_is_downloaded(site, model):
    server.add_repository(site, "o/r", {"m.gguf": b"GGUF"})
    server.add_repository(site, "o/r", {"m.gguf": model}, commit="f" * 40, revision="v2")
    assert resolve("hf:o/r@v2").read_bytes() == model
    assert [download.name for download in stored.downloads()] == ["hf:o/r@v2:m.gguf"]
    assert resolve("hf:o/r@" + "f" * 40 + ":m.gguf").read_bytes() == model


def error_of(code, kind):
    return (code, {"X-Error-Code": kind, "X-Error-Message": "no"}, b"{}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:o/none", "there is no repository o/none, or it is private"),
        ("hf:o/gated", "o/gated is gated: accept its terms"),
        ("hf:o/r@v9", "o/r has no revision 'v9'"),
        ("hf:o/r:Q5_K_M", "o/r has no Q5_K_M; it has Q4_0, Q8_0, plain.gguf"),
        ("hf:o/empty", "o/empty has no GGUF file"),
        ("hf:o/cut", "o/cut does not have all parts of a-00001-of-00002.gguf: no a-00002-of-00002.gguf"),
        ("o/r", "unknown model 'o/r' (and no such file). See `kvtool models list`. A repository is hf:o/r."),
    ],
)
def test_failing_repositories_give_one_line_errors(site, source, message):
    server.add_repository(site, "o/r", {"a-Q8_0.gguf": b"", "a-Q4_0.gguf": b"", "plain.gguf": b""})
    server.add_repository(site, "o/empty", {"model.safetensors": b""})
    server.add_repository(site, "o/cut", {"a-00001-of-00002.gguf": b""})
    server.add_repository(site, "o/gated", {"a.gguf": b""})
    site.errors["/o/gated/resolve/main/a.gguf"] = error_of(403, "GatedRepo")
    del site.redirects["/o/gated/resolve/main/a.gguf"]
    site.errors["/api/models/o/none"] = error_of(404, "RepoNotFound")
    site.errors["/api/models/o/r/revision/v9"] = error_of(404, "RevisionNotFound")
    with pytest.raises(ModelError) as error:
        resolve(source)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_cached_file_is_used_if_the_server_cannot_be_asked(site, model, monkeypatch):
    from huggingface_hub import constants

    server.add_repository(site, "o/r", {"m-Q8_0.gguf": model})
    path = resolve("hf:o/r:Q8_0")
    # the server may also have Q4_K_M, but it cannot be asked, so the cached file is used
    site.errors["/api/models/o/r"] = (503, {}, b"")
    assert resolve("hf:o/r") == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("hf:o/r") == path
    with pytest.raises(ModelError, match=r"hf:o/r:Q4_0 is not in .*hub, and \$HF_HUB_OFFLINE forbids"):
        resolve("hf:o/r:Q4_0")


def test_unreachable_repository_server_is_reported(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match="cannot download hf:o/r: .*without a network") as error:
        resolve("hf:o/r")
    reason = str(error.value).partition("hf:o/r: ")[2]
    assert reason.startswith("no connection (Connection refused); the same command tries again; without a")
    with pytest.raises(ModelError) as error:
        resolve("http://127.0.0.1:1/m.gguf")
    assert str(error.value).endswith(reason)


@pytest.mark.parametrize("name", ["hf:o/r", "hf:o/r:Q8_0", "http://127.0.0.1:1/m.gguf", "tiny"])
def test_download_is_announced_before_the_first_connection(monkeypatch, name, capsys):
    from huggingface_hub import constants

    nowhere = "http://127.0.0.1:1"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    template = nowhere + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for module in (catalogue, download, resolving):
        monkeypatch.setattr(module, "registry", lambda: {"tiny": entry_of()})
    # without a network, a download must fail at once and not wait for another try
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits"))
    with pytest.raises(ModelError, match="no connection"):
        find_model(name)
    assert capsys.readouterr().err == f"downloading {name}\n"


def test_python_programs_get_no_line_of_a_download(url):
    code = "import kvtool.models.resolve as models, sys; models.resolve(sys.argv[1])"
    done = fork_server.run_python("-c", code, url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_draft_model_download_is_announced(site, model, tmp_path):
    (tmp_path / "m.gguf").write_bytes(model)
    server.add_repository(site, "o/draft", {"d.gguf": model})
    arguments = ["generate", "x", "--raw", "-m", str(tmp_path / "m.gguf"), "--policy", "full", "-n", "1"]
    done = CliRunner().invoke(app, [*arguments, "--draft", "hf:o/draft"], catch_exceptions=False)
    assert done.stderr.startswith("downloading hf:o/draft\n")


def test_serve_downloads_and_names_its_model_once(site, model, monkeypatch):
    from kvtool.serve.http import server as http

    def serve(site, opened, listening, ready):
        with opened():
            raise ModelError("ends here")

    monkeypatch.setattr(http, "serve", serve)
    server.add_repository(site, "o/r", {"m.gguf": model})
    arguments = ["serve", "-m", "hf:o/r", "--policy", "streamingllm", "--port", "0", "-c", "100000"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    first, *lines = done.stderr.splitlines()
    assert first == "downloading hf:o/r"
    assert lines.count("hf:o/r: m.gguf") == 1
    assert sum("is above the model's trained length" in line for line in lines) == 1


# models.txt


def entry_of(sha256=None, size=None):
    line = f"tiny | hf:o/r | tiny.gguf | {sha256 or '-'} | {size or '-'} | MIT | a note"
    return catalogue.parse(line)["tiny"]


@pytest.mark.parametrize("is_known", [False, True])
def test_model_of_models_txt_is_stored_in_kvtools_cache(site, model, is_known):
    server.add_repository(site, "o/r", {"tiny.gguf": model})
    entry = entry_of(*((hashlib.sha256(model).hexdigest(), len(model)) if is_known else ()))
    assert stored.of_entry(entry) is None
    assert download.pull(entry).read_bytes() == model
    assert [path.name for path in catalogue.models_dir().iterdir()] == ["tiny.gguf"]
    # if the file has another size, it is not the model, so the model is downloaded again
    if is_known:
        entry.path.write_bytes(b"GGUF")
        assert download.pull(entry).read_bytes() == model


def test_download_must_have_the_hash_of_models_txt(site, model):
    server.add_repository(site, "o/r", {"tiny.gguf": model})
    with pytest.raises(ModelError, match=r"tiny: the download has sha256 .* instead of 0000"):
        download.pull(entry_of("0" * 64))
    assert list(catalogue.models_dir().iterdir()) == []


def test_offline_message_about_models_txt_names_kvtools_folder(site, model, monkeypatch):
    server.add_repository(site, "o/r", {"tiny.gguf": model})
    resolve("hf:o/r")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as error:
        download.pull(entry_of())
    line = f"tiny.gguf is not in {catalogue.models_dir()}, and $HF_HUB_OFFLINE forbids a download; unset it; "
    assert str(error.value) == line + OFFLINE


def test_failing_server_of_models_txt_gives_a_one_line_error(site, monkeypatch):
    # huggingface_hub waits 23 s before its last try
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    site.errors["/o/r/resolve/main/tiny.gguf"] = (503, {}, b"")
    with pytest.raises(ModelError, match=r"cannot download tiny\.gguf: .*503.*without a network") as error:
        download.pull(entry_of())
    assert "\n" not in str(error.value)


# kvtool models


def test_pull_names_the_file_on_stderr_and_prints_the_path(site, model):
    server.add_repository(site, "o/r", {"m-Q4_K_M.gguf": model})
    result = kvtool("pull", "hf:o/r")
    path = hub.cached(hub.Reference("o/r"))
    assert result.stdout == f"{path}\n"
    assert result.stderr == "downloading hf:o/r\nhf:o/r: m-Q4_K_M.gguf\n"
    second_pull = json.loads(kvtool("pull", "hf:o/r", "--json").stdout)
    assert (second_pull["size"], second_pull["sha256"]) == (len(model), hashlib.sha256(model).hexdigest())


def test_pull_of_a_file_prints_its_path(model, tmp_path):
    (path := tmp_path / "own.gguf").write_bytes(model)
    result = kvtool("pull", str(path))
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{path}\n", "")


def test_list_shows_cached_files_and_rm_deletes_them(site, model, parts):
    server.add_repository(site, "o/r", {"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model, "n.gguf": model})
    for name, data in parts.items():
        site.files[f"/{name}"] = data
    url = f"{site.url}/{min(parts)}"
    for name in ("hf:o/r", "hf:o/r:Q8_0", "hf:o/r:n.gguf", url):
        kvtool("pull", name)
    listed = {row["name"]: row for row in json.loads(kvtool("list", "--json").stdout) if row["cached_bytes"]}
    assert list(listed) == [url, "hf:o/r:Q4_K_M", "hf:o/r:Q8_0", "hf:o/r:n.gguf"]
    assert listed["hf:o/r:Q8_0"]["cached_bytes"] == listed["hf:o/r:Q8_0"]["size"] == len(model)
    assert Path(listed["hf:o/r:Q8_0"]["path"]).read_bytes() == model
    text = kvtool("list").stdout
    assert f"hf:o/r:Q8_0    {len(model) / 1024:.1f} KiB  yes" in re.sub(" {4,}", "    ", text)
    # the three names share one file
    assert f"{len(model) / 1024:.1f} KiB in {hub.cache_folder()}" in text

    several = pytest.raises(ModelError, match=r"name one: hf:o/r:Q4_K_M, hf:o/r:Q8_0, hf:o/r:n\.gguf")
    with several:
        stored.remove("hf:o/r")
    assert kvtool("rm", "o/r:q8_0").stdout == "deleted hf:o/r:Q8_0: 0 B\n"
    assert stored.remove(listed["hf:o/r:n.gguf"]["path"])[0].name == "hf:o/r:n.gguf"
    assert json.loads(kvtool("rm", "hf:o/r", "--json").stdout)["freed_bytes"] == len(model)
    assert list(hub.cache_folder().glob("models--*")) == []
    size = sum(map(len, parts.values()))
    assert f"{size / 1024:.1f} KiB" in kvtool("rm", f"{site.url}/{max(parts)}").stdout
    assert stored.downloads() == []
    with pytest.raises(ModelError, match="hf:o/r is not downloaded"):
        stored.remove("hf:o/r")


def test_rm_deletes_the_remains_of_a_killed_download(site, model):
    server.add_repository(site, "o/r", {"m.gguf": model})
    site.files["/m.gguf"] = model
    for name in ("hf:o/r", f"{site.url}/m.gguf"):
        whole = resolve(name).resolve()
        stored.remove(name)
        whole.parent.mkdir(parents=True)
        whole.with_name(f"{whole.name}.incomplete").write_bytes(model[:100_001])
        if name.startswith("http"):
            (whole.parent / web.URL_FILE).write_text(name)
        assert [(download.name, download.is_whole) for download in stored.downloads()] == [(name, False)]
        assert "in part" in kvtool("list").stdout
        assert stored.remove(name)[1] > 100_000
        assert stored.downloads() == []


def test_rm_deletes_nothing_outside_of_the_caches(tmp_path, model):
    path = tmp_path / "mine.gguf"
    path.write_bytes(model)
    with pytest.raises(ModelError, match=r"mine\.gguf is not in a cache, and kvtool deletes nothing else"):
        stored.remove(str(path))
    with pytest.raises(ModelError, match="unknown model 'nope'"):
        stored.remove("nope")
    assert path.exists()


@pytest.mark.parametrize("place", ["/", "../../../"])
def test_rm_follows_no_revision_out_of_the_cache(tmp_path, site, model, place, monkeypatch):
    server.add_repository(site, "o/r", {"m.gguf": model})
    resolve("hf:o/r")
    (mine := tmp_path / "mine").mkdir()
    (mine / "m.gguf").write_bytes(model)
    folder = f"{mine}" if place == "/" else f"{place}mine"
    with pytest.raises(ModelError, match="a repository is hf:OWNER/REPO"):
        stored.remove(f"hf:o/r@{folder}:m.gguf")
    # nor would `remove` delete the file if the reference were accepted
    monkeypatch.setattr(hub, "parse", lambda text: hub.Reference("o/r", folder, "m.gguf"))
    with pytest.raises(ModelError, match=r"m\.gguf is not in a cache, and kvtool deletes nothing else"):
        stored.remove("hf:o/r@x")
    assert (mine / "m.gguf").read_bytes() == model


def test_rm_keeps_the_target_of_a_link_that_the_user_made(tmp_path, site, model, monkeypatch):
    (mine := tmp_path / "mine.gguf").write_bytes(model)
    server.add_repository(site, "o/r", {"m.gguf": model})
    in_hub = resolve("hf:o/r")
    monkeypatch.setattr(stored, "registry", lambda: {"tiny": entry_of()})
    (link := entry_of().path).parent.mkdir(parents=True)
    for target in (mine, in_hub):
        link.symlink_to(target)
        assert stored.remove("tiny")[1] == 0
        assert not link.is_symlink()
        assert target.read_bytes() == model
    # the user has replaced a file of a repository by a link
    in_hub.unlink()
    in_hub.symlink_to(mine)
    assert stored.remove("hf:o/r")[1] == 0
    assert not in_hub.is_symlink()
    assert mine.read_bytes() == model
