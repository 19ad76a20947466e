"""The laboratory's programs can be imported. Their own tests, in lab/, run with `make test-long`."""

from __future__ import annotations

from pathlib import Path

from tests import fork_server

ROOT = Path(__file__).parents[2]


def test_every_module_of_the_laboratory_can_be_imported():
    files = (path.relative_to(ROOT) for path in (ROOT / "lab").rglob("*.py") if "tests" not in path.parts)
    names = sorted(".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files)
    code = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = fork_server.run_python("-c", code, *names, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(names) > 50
