"""Install the wheels of dist/ in empty environments without a compiler on their PATH, and run kvtool there.

    python tests/tools/check_dist.py dist
    python tests/tools/check_dist.py dist --with pip,variants

Each stage runs in an empty folder, as on a user's machine. It must give the same perplexity as the library of
this checkout. The program installs pipx and uv for this. It needs the package index for kvtool's
dependencies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The tide came in over the flats before sunrise, and nobody saw it but the birds. " * 12
# these variables of the user's environment are kept, because they name the sources of packages
KEPT = ("PIP_", "UV_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "SSL_CERT")
# Windows cannot start a program without SYSTEMROOT
KEPT += ("SYSTEMROOT", "TEMP", "TMP")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "cmake", "ninja")
FOR_MAKE = ("make", "sh", "cat", "echo", "ls", "mktemp", "rm", "seq", "touch")


class Place:
    """An empty folder, and environment variables for processes. Their PATH has no compiler."""

    def __init__(self, folder: Path, tools: tuple[str, ...] = ()) -> None:
        self.folder = folder
        for name in ("bin", "work", "home"):
            (folder / name).mkdir(parents=True)
        for tool in tools:
            (folder / "bin" / tool).symlink_to(shutil.which(tool))
        self.env = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
        self.env |= {"PATH": str(folder / "bin"), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        self.env |= {"KVTOOL_CACHE": str(folder / "cache"), "COLUMNS": "80"}
        compilers = [name for name in COMPILERS if shutil.which(name, path=self.env["PATH"])]
        assert not compilers, f"{compilers} on {self.env['PATH']}"

    def run(
        self,
        *words: object,
        stdin: str = "",
        env: dict[str, str] | None = None,
        codes: tuple[int, ...] = (0,),
    ) -> str:
        """Run a command, which must end with one of these exit codes. Return its stdout."""
        done = subprocess.run(
            list(map(str, words)),
            cwd=self.folder / "work",
            env={**self.env, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in codes:
            sys.exit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def nll(place: Place, kvtool: list[object], model: str, policy: str, **env: str) -> float:
    (place.folder / "work" / "text.txt").write_text(TEXT)
    budget = [] if policy == "full" else ["--budget", 64]
    command = ["perplexity", "text.txt", "-m", model, "--policy", policy, *budget, "-t", 1, "--json"]
    return float(json.loads(place.run(*kvtool, *command, env=env))["nll"])


def library_of(place: Place, kvtool: list[object]) -> dict[str, Any] | None:
    """Return what doctor says of the library. If there is none, doctor's exit code is 1."""
    return json.loads(place.run(*kvtool, "doctor", "--json", codes=(0, 1)))["library"]


def check(place: Place, kvtool: list[object], model: str, expected: dict[str, float]) -> None:
    """Check an installed kvtool: doctor finds no fault, perplexities are right, and a chat gets a reply."""
    library = library_of(place, kvtool)
    assert library["portable"], library
    assert library["digest"] == library["digest_wanted"], library
    for policy, value in expected.items():
        actual = nll(place, kvtool, model, policy)
        # kernels for another kind of CPU add numbers in a different order
        assert math.isclose(actual, value, rel_tol=0.01), f"{policy}: {actual}, not {value}"
    reply = place.run(*kvtool, "chat", "-m", model, "-t", 1, "-n", 8, "--temp", 0, stdin="Hello!\n")
    assert reply.strip(), "no reply"


def new_environment(folder: Path) -> Path:
    """Create a virtual environment. Return the path of its Python."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def with_pip(place: Place, wheels: list[Path]) -> list[object]:
    python = new_environment(place.folder / "env")
    place.run(python, "-m", "pip", "install", "-q", *wheels)
    return [python.parent / "kvtool"]


def with_pip_by_name(place: Place, wheels: list[Path]) -> list[object]:
    python = new_environment(place.folder / "env")
    place.run(python, "-m", "pip", "install", "-q", "--find-links", wheels[0].parent, "kvtool[cpu]")
    return [python.parent / "kvtool"]


def with_pipx(place: Place, wheels: list[Path]) -> list[object]:
    python = new_environment(place.folder / "tools")
    place.run(python, "-m", "pip", "install", "-q", "pipx")
    wheel, library = wheels
    place.run(python, "-m", "pipx", "install", "--python", sys.executable, wheel)
    place.run(python, "-m", "pipx", "inject", "kvtool", library)
    return [place.folder / "home/.local/bin/kvtool"]


def with_uv(place: Place, wheels: list[Path]) -> list[object]:
    python = new_environment(place.folder / "tools")
    place.run(python, "-m", "pip", "install", "-q", "uv")
    wheel, library = wheels
    place.run(python.parent / "uv", "tool", "install", "-p", sys.executable, "--with", library, wheel)
    return [place.folder / "home/.local/bin/kvtool"]


def with_build(place: Place, wheels: list[Path]) -> list[object]:
    """Install kvtool's wheel alone. `kvtool build` then finds the other wheel in $KVTOOL_WHEELS."""
    from kvtool import policies
    from kvtool.models.catalogue import registry

    python = new_environment(place.folder / "env")
    place.run(python, "-m", "pip", "install", "-q", wheels[0])
    kvtool: list[object] = [python.parent / "kvtool"]
    code = "import kvtool.system.paths as paths; print(paths.checkout(), paths.__file__)"
    root, _, file = place.run(python, "-c", code).strip().partition(" ")
    assert root == "None", root
    assert Path(file).resolve().is_relative_to(place.folder.resolve()), file
    assert place.run(*kvtool, "perplexity", "-", stdin=TEXT, codes=(4,)) == ""
    doctor = place.run(*kvtool, "doctor", codes=(1,))
    assert "problem: there is no llama.cpp yet\n  fix it with: kvtool build" in doctor
    listed = place.run(*kvtool, "models", "list", "--all", env={"COLUMNS": "200"})
    assert all(name in listed for name in registry()), listed
    policy_list = json.loads(place.run(*kvtool, "policies", "--json"))
    assert {policy["name"] for policy in policy_list} == set(policies.names()), policy_list
    env = {"KVTOOL_WHEELS": str(wheels[1].parent)}
    for start in ("installed: llama.cpp for ", "already installed: llama.cpp for "):
        (line,) = place.run(*kvtool, "build", env=env).splitlines()
        assert line.startswith(start), line
    return kvtool


def with_make(place: Place, wheels: list[Path]) -> list[object]:
    """Run `make setup` in a copy of the checkout. KVTOOL_WHEELS names the folder of the wheels."""
    copy = place.folder / "checkout"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    env = {"KVTOOL_WHEELS": str(wheels[0].parent)}
    place.run("make", "-C", copy, "setup", f"PYTHON={sys.executable}", env=env)
    return [copy / ".venv/bin/kvtool"]


STAGES = {"pip": with_pip, "name": with_pip_by_name, "pipx": with_pipx, "uv": with_uv, "build": with_build}
STAGES["make"] = with_make


def variants(place: Place, kvtool: list[object], model: str, expected: dict[str, float]) -> None:
    """Try the library's parts for different CPUs one by one. Those that run here must agree in perplexity."""
    (installed,) = (place.folder / "env").rglob("kvtool_llama/lib")
    parts = sorted(installed.glob("*ggml-cpu-*"))
    for part in parts:
        away = place.folder / "away"
        away.mkdir()
        for other in parts:
            if other != part:
                other.rename(away / other.name)
        try:
            outcome = "does not run here"
            if library := library_of(place, kvtool):
                assert [device["type"] for device in library["devices"]] == ["cpu"], library
                value = nll(place, kvtool, model, "full")
                assert math.isclose(value, expected["full"], rel_tol=0.01), f"{part.name}: {value}"
                outcome = f"{value:.4f}"
        finally:
            for other in away.iterdir():
                other.rename(installed / other.name)
            away.rmdir()
        print(f"    {part.name}: {outcome}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the two wheels lie")
    parser.add_argument("-m", "--model", default="", help="default: kvtool's")
    parser.add_argument(
        "--with", dest="stages", default=",".join([*STAGES, "variants"]), help="default: %(default)s"
    )
    args = parser.parse_args()
    wheels = sorted(args.folder.absolute().glob("*.whl"))
    names = [wheel.name.partition("-")[0] for wheel in wheels]
    if names != ["kvtool", "kvtool_llama"]:
        parser.error(f"{args.folder} must hold the two wheels of `make dist`, and has {names}")
    checkout: list[object] = [sys.executable, "-m", "kvtool"]
    from kvtool.models.resolve import resolve

    model = args.model or str(resolve(None))
    stages = args.stages.split(",")
    with tempfile.TemporaryDirectory() as folder:
        # the expected values come from the checkout's library, in the user's own environment
        user_place = Place(Path(folder, "here"))
        user_place.env = dict(os.environ)
        expected = {policy: nll(user_place, checkout, model, policy) for policy in ("full", "h2o", "recall")}
        print(f"this checkout: {expected}", flush=True)
        for name, stage in STAGES.items():
            if name not in stages and not (name == "pip" and "variants" in stages):
                continue
            place = Place(Path(folder, name), FOR_MAKE if name == "make" else ())
            kvtool = stage(place, wheels)
            if name in stages:
                check(place, kvtool, model, expected)
                print(f"{name}: installed without a compiler, chats, and computes the same", flush=True)
            if name == "pip" and "variants" in stages:
                variants(place, kvtool, model, expected)


if __name__ == "__main__":
    main()
