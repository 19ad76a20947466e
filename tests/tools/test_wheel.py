"""kvtool from a wheel, in an environment outside the checkout, as users without a checkout install it.

kvtool's wheel is real. The wheel of kvtool-llama has no library: it refers to the library that the tests use.
It has the key of this machine's build, so nothing is compiled.
"""

from __future__ import annotations

import json
import os
import sysconfig
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool import __version__, policies
from kvtool.build import pack, sources
from kvtool.build import wheel as build
from kvtool.llama.libllama.library import api, library_path
from kvtool.models.catalogue import registry
from tests import forked

ROOT = Path(__file__).parents[2]

STAND_IN = f"""\
UPSTREAM = "9.9"
__path__ = [{str(Path(api.__file__).parent)!r}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An environment with kvtool (from a wheel) and its dependencies, but without kvtool-llama."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-input", "wheel", "-q", "--no-deps"]
    done = forked.run_python(*pip, "--no-build-isolation", "-w", folder, ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob(f"kvtool-{__version__}-*.whl")
    # a new environment, because the environment of the tests contains the checkout
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    rest = folder / "rest"
    rest.mkdir()
    ours = ("kvtool", "_kvtool", "__editable__", "llama_cpp")
    for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(packages).iterdir():
            if not path.name.startswith(ours) and path.suffix != ".pth":
                (rest / path.name).symlink_to(path)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(forked.run([python, "-c", code], check=True).stdout.strip())
    (site / "rest.pth").write_text(f"{rest}\n")
    left_out = ("PYTHONPATH", "CMAKE_ARGS", "KVTOOL_MODEL")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    # NUMBA_DISABLE_JIT saves a minute of compiling kernels
    env |= {"KVTOOL_CACHE": str(folder / "cache"), "COLUMNS": "200", "NUMBA_DISABLE_JIT": "1"}

    def run(*words):
        return forked.run([python, *words], cwd=folder, env=env)

    # pip has no index here, so it fails if a dependency is missing
    done = run("-m", "pip", "install", "-q", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(run=run, folder=folder, site=site, kvtool=folder / "env" / "bin" / "kvtool")


@pytest.fixture(scope="module")
def before(place):
    """Output of the commands while kvtool-llama is not installed."""
    (place.folder / "text.txt").write_text("The tide came in over the flats before sunrise.\n" * 9)
    return SimpleNamespace(
        perplexity=place.run(place.kvtool, "perplexity", "text.txt"),
        doctor=place.run(place.kvtool, "doctor"),
        models=place.run(place.kvtool, "models", "list", "--all"),
        policies=place.run(place.kvtool, "policies", "--json"),
    )


@pytest.fixture(scope="module")
def built(place, before):
    """Result of `kvtool build`. The cache has a wheel for this machine."""
    key = build.wheel_key(sources.patches_dir(), "")
    folder = place.folder / "cache" / "wheels" / key
    folder.mkdir(parents=True)
    name = f"{pack.PACKAGE}-{pack.VERSION}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{pack.PACKAGE}/__init__.py", STAND_IN)
        metadata = f"Metadata-Version: 2.1\nName: {pack.DISTRIBUTION}\nVersion: {pack.VERSION}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: kvtool\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}.dist-info/RECORD", "")
        wheel.writestr(f"{name}.dist-info/{pack.RECORD_OF_BUILD}", json.dumps({"key": key}))
    code = "kernel_dir().mkdir(parents=True); stamp().touch(); kernel_library().touch()"
    assert place.run("-c", f"from kvtool.build.kernels import *; {code}").returncode == 0
    return place.run(place.kvtool, "build")


def test_kvtool_is_imported_from_the_wheel_and_not_the_checkout(place):
    stdout = place.run(
        "-c", "import kvtool.system.paths; print(kvtool.__file__, kvtool.system.paths.checkout())"
    ).stdout
    assert stdout == f"{place.site / 'kvtool' / '__init__.py'} None\n"


def test_wheel_contains_patch_files_models_txt_and_web_page(place):
    packed = place.site / "kvtool"
    assert (packed / "models.txt").read_bytes() == (ROOT / "models.txt").read_bytes()
    for path in (ROOT / "patches").iterdir():
        if path.is_file():
            assert (packed / "patches" / path.name).read_bytes() == path.read_bytes(), path.name
    web = Path("serve", "http", "web")
    for path in (ROOT / "kvtool" / web).iterdir():
        assert (packed / web / path.name).read_bytes() == path.read_bytes(), path.name


def test_missing_llama_cpp_error_says_how_to_build_it(before):
    assert before.perplexity.returncode == 4
    assert before.perplexity.stdout == ""
    assert before.perplexity.stderr == "kvtool: there is no llama.cpp yet; build it: kvtool build\n"
    assert before.doctor.returncode == 1
    assert "problem: there is no llama.cpp yet\n  fix it with: kvtool build\n" in before.doctor.stdout
    assert "fix it with: kvtool build" in before.doctor.stdout


def test_models_and_policies_are_listed_without_llama_cpp(before):
    for name in registry():
        assert name in before.models.stdout
    assert {policy["name"] for policy in json.loads(before.policies.stdout)} == set(policies.names())


def test_build_installs_llama_cpp_and_prints_one_line(built):
    assert built.returncode == 0, built.stderr
    (line,) = built.stdout.splitlines()
    assert line.startswith("installed: llama.cpp for ")
    assert line.endswith("; kvtool doctor shows details")


def test_doctor_finds_no_problem_after_the_build(place, built):
    report = json.loads(place.run(place.kvtool, "doctor", "--json").stdout)
    (wheel,) = (place.folder / "cache" / "wheels").glob("*/*.whl")
    library = report["library"]
    assert library["build"] == wheel.parent.name
    assert library["path"] == str(library_path())
    assert library["version"] == "9.9"
    # this digest is computed from the patch files in the wheel
    assert library["digest_wanted"] == sources.patch_digest(ROOT / "patches")
    # ignore "different patch files": the library of the tests may have been built by hand from edited files
    assert [each for each in report["problems"] if "different patch files" not in each["wrong"]] == []


def test_a_second_build_changes_nothing(place, built):
    again = place.run(place.kvtool, "build", "--cpu")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("already installed: llama.cpp for ")


def test_perplexity_runs_after_the_build(place, built, tiny_model):
    (place.folder / "text.txt").write_text("The tide came in over the flats before sunrise.\n" * 9)
    done = place.run(
        place.kvtool, "perplexity", "text.txt", "-m", tiny_model(), "--policy", "full", "-c", "512", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["perplexity"] > 1
