"""Imports between the parts of the package ("rooms"). The table of docs/tree.md says which are allowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import fork_server

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvtool"


def module_of(path: Path, root: Path = ROOT) -> str:
    """Return the name under which Python imports a file."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = set(map(module_of, FILES))

ALONE = {
    "kvtool_llama": "llama",
    "llama_cpp": "llama",
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "cli",
    "numba": "kernels",
    "llvmlite": "kernels",
    "gguf": "models",
    "huggingface_hub": "models",
    "jinja2": "chats",
    "starlette": "serve",
    "uvicorn": "serve",
}
"""Packages that only one room may import, and the name of this room."""


def allowed() -> dict[str, set[str]]:
    """Read the table of docs/tree.md: each room, and the rooms that it may import."""
    document = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", document, re.M)
    table: dict[str, set[str]] = {}
    for room, names in rows:
        below = "all above" in names
        table[room] = set(table) if below else set(re.findall(r"`(\w+)`", names))
    return table


def room_of(module: str) -> str:
    """Return the first name after "kvtool." in a module's name. For the package itself, return "kvtool"."""
    return [*module.split("."), "kvtool"][1] if "." in module else "kvtool"


def imports(path: Path, modules: Container[str] = MODULES) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each import of a file.

    This includes imports inside functions and imports for type checking.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ruff's TID252 forbids relative imports
            assert node.level == 0
            module = str(node.module)
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield node.lineno, name if name in modules else module
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def circle(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Return the modules of a circular import, or [] if imports are not circular.

    Each module of the list imports the module before it. The first module is also the last.
    """
    paths = {module_of(path, root): path for path in files}
    graph = {name: {each for _, each in imports(path, paths)} & paths.keys() for name, path in paths.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_table_lists_every_room_below_the_rooms_it_may_import():
    table = allowed()
    rooms = {room_of(module) for module in MODULES} - {"kvtool"}
    assert set(table) == rooms
    for number, (room, below) in enumerate(table.items()):
        assert below <= set(list(table)[:number]), room


def test_each_room_imports_only_what_the_table_allows():
    table, wrong = allowed(), []
    # kvtool/__init__.py is left out: it lists names for users, and imports each name when it is first used
    for path in set(FILES) - {PACKAGE / "__init__.py"}:
        room = room_of(module_of(path))
        for line, module in imports(path):
            package = module.partition(".")[0]
            is_allowed = room_of(module) in {room, "kvtool", *table[room]} if package == "kvtool" else True
            if not is_allowed or ALONE.get(package, room) != room:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_kvtool_does_not_import_lab_nor_benchmarks_import_papers():
    """lab/ may import kvtool/, and lab/papers/ may import lab/benchmarks/, but not the reverse."""
    benchmarks = (ROOT / "lab" / "benchmarks").glob("*.py")
    for name, files in {"lab": FILES, "lab.papers": benchmarks}.items():
        for path in files:
            assert not any(f"{module}.".startswith(f"{name}.") for _, module in imports(path)), path


def test_imports_inside_functions_are_found(tmp_path):
    path = tmp_path / "inner.py"
    path.write_text("def f():\n    from kvtool.cli import chat\n    import llama_cpp.llama_cpp as api\n")
    assert list(imports(path)) == [(2, "kvtool.cli.chat"), (3, "llama_cpp.llama_cpp")]


@pytest.mark.parametrize("room", sorted({room_of(module) for module in MODULES} - {"kvtool"}))
def test_files_of_a_room_have_no_circular_imports(room):
    assert circle(path for path in FILES if room_of(module_of(path)) == room) == []


@pytest.mark.parametrize(
    "back",
    [
        "import room.a",
        "def f():\n    from room.a import A",
        "if TYPE_CHECKING:\n    from room import a",
        "import_module('room.a')",
    ],
)
def test_circular_imports_are_found(tmp_path, back):
    room = tmp_path / "room"
    room.mkdir()
    for name, text in {"a": "from room.b import B", "b": "from room import c", "c": "import os"}.items():
        (room / f"{name}.py").write_text(text)
    assert circle(room.iterdir(), tmp_path) == []
    (room / "c.py").write_text(back)
    assert sorted(set(circle(room.iterdir(), tmp_path))) == ["room.a", "room.b", "room.c"]


def test_build_imports_only_the_standard_library():
    # with -S, Python does not find the packages of the environment
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kvtool.build.__main__, kvtool.build.kernels"
    done = fork_server.run_python("-S", "-c", code, str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")


def test_python_older_than_3_10_can_import_the_build():
    """Files that a build imports must not evaluate `Path | None`, because Python before 3.10 cannot."""
    code = "import sys, kvtool.build.__main__; print(*(name for name in sys.modules if name[:6] == 'kvtool'))"
    done = fork_server.run_python("-c", code, cwd=ROOT, check=True)
    for path in FILES:
        if module_of(path) in done.stdout.split():
            text = path.read_text(encoding="utf-8")
            assert "from __future__ import annotations\n" in text or not re.search(r"\w \| \w", text), path


def test_all_functions_except_kernels_have_return_annotations():
    """Files of kernels are not checked by mypy for annotations: numba's signature has the types."""
    for path in set(FILES) - {PACKAGE / "__init__.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not (node.returns or node.name == "__init__"):
                made_by = [ast.unparse(decorator) for decorator in node.decorator_list]
                assert any(each.startswith("kernel(") for each in made_by), f"{path}: {node.name}"
