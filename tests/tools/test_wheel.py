"""kvtool's wheel has the files that an installed kvtool reads. tests/tools/check_dist.py installs it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests import fork_server

ROOT = Path(__file__).parents[2]


def test_wheel_contains_the_package_the_patch_files_models_txt_and_the_web_page(tmp_path):
    fork_server.run_python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT, check=True)
    (path,) = tmp_path.glob("kvtool-*.whl")
    tracked = fork_server.run(
        ["git", "ls-files", "kvtool", "patches"], cwd=ROOT, check=True
    ).stdout.splitlines()
    files = {name if name.startswith("kvtool/") else f"kvtool/{name}": ROOT / name for name in tracked}
    files["kvtool/models.txt"] = ROOT / "models.txt"
    with zipfile.ZipFile(path) as wheel:
        for name, file in files.items():
            assert wheel.read(name) == file.read_bytes(), name
