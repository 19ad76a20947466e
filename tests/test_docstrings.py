"""What docstrings name is there: classes, their members, and whatever stands in backticks."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "kvtool").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def assigned(node):
    """The names that a statement gives something to, as variables or as attributes."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


def members(node):
    """What a class defines, and what its methods set."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            found.add(part.name)
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            found |= assigned(part)
    return found


CLASSES, BASES, NAMES = {}, {}, set(dir(builtins))
for tree in TREES.values():
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            CLASSES.setdefault(node.name, set()).update(members(node))
            BASES.setdefault(node.name, set()).update(getattr(base, "id", "") for base in node.bases)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            NAMES.add(node.name)
        if isinstance(node, (ast.Name, ast.arg, ast.Attribute)):
            NAMES.add(getattr(node, "id", None) or getattr(node, "arg", None) or node.attr)


def has(name, member):
    return member in CLASSES.get(name, ()) or any(has(base, member) for base in BASES.get(name, ()))


def texts(tree):
    """Docstrings, those behind a constant too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
                    yield part.value.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_docstring_names_is_there(path):
    for text in texts(TREES[path]):
        for name, member in re.findall(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]+)\b", text):
            assert name not in CLASSES or has(name, member), f"{name}.{member}"
        for name in re.findall(r"\b[A-Z][a-z]\w*(?:Error|Context|Policy|End|OfMemory)\b", text):
            assert name in CLASSES or name in NAMES, name
        for name in re.findall(r"`([A-Za-z_]+)`", text):
            assert name in NAMES, name
