"""What README says is there is there, and what is there is in README."""

from __future__ import annotations

import re
from pathlib import Path

from kvtool import policies

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.split("## The tree\n")[1].split("\n\nEvery policy")[0]


def test_everything_in_the_tree_exists():
    folder = ROOT
    for line in TREE.strip("\n").splitlines():
        # what goes on from the line before
        if line.startswith(" " * 12):
            continue
        name = line.split()[0]
        if line.startswith("      "):
            assert (ROOT / "kvtool" / name).exists(), name
        elif name.endswith("/"):
            folder = ROOT / name
            assert folder.is_dir(), name
        else:
            assert all((ROOT / each).exists() for each in line.split()), line


def test_everything_of_the_package_is_in_the_tree():
    for path in (ROOT / "kvtool").iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            assert re.search(rf"\b{re.escape(path.name)}\b", TREE), path.name


def test_every_document_is_in_the_tree():
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in TREE, path.name


def test_every_policy_is_in_the_tables():
    listed = re.findall(r"`(\w+)`", README.split("## What stays\n")[1].split("`kvtool policies` lists")[0])
    document = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in policies.names():
        assert name in listed, name
        assert f"\n| `{name}` |" in document, name
    assert {name for name in listed if name not in policies.names()} <= {"logn"}


def test_what_is_installed_by_hand_is_what_setup_installs():
    upstream = (ROOT / "patches" / "UPSTREAM").read_text(encoding="utf-8")
    by_hand = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    (version,) = set(re.findall(r"llama-cpp-python==([\d.]+)", by_hand))
    assert version in upstream
    by_hand = re.search(r'CMAKE_ARGS="([^"]*)" \\\n', by_hand)[1].split()
    from kvtool.build import wheel as build

    flags = {flag.split("=")[0] for flag in by_hand}
    assert flags >= {"-DCMAKE_PROJECT_llama_cpp_INCLUDE", "-DLLAVA_BUILD"}
    source = Path(build.__file__).read_text(encoding="utf-8")
    for flag in flags:
        assert flag in source, flag
