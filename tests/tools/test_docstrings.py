"""Docstrings name only things that exist: classes, their members, and everything in backticks."""

from __future__ import annotations

import ast
import builtins
import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "kvtool").rglob("*.py"))


def assigned(node):
    """Return the names of the variables and attributes that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


def members(node):
    """Return the names that a class defines, and the names that its methods assign."""
    defined = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            defined.add(part.name)
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            defined |= assigned(part)
    return defined


class Names(NamedTuple):
    """Names that the package defines.

    trees: the syntax tree of each file.
    classes: the members of each class.
    bases: the base classes of each class.
    known: all names.
    """

    trees: dict[Path, ast.Module]
    classes: dict[str, set[str]]
    bases: dict[str, set[str]]
    known: set[str]

    def has(self, name, member):
        return member in self.classes.get(name, ()) or any(
            self.has(base, member) for base in self.bases.get(name, ())
        )


@pytest.fixture(scope="module")
def names():
    """Names that the package defines.

    They are computed only in test workers that need them.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    classes, bases, known = {}, {}, set(dir(builtins))
    for node in chain.from_iterable(map(ast.walk, trees.values())):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, set()).update(members(node))
            bases.setdefault(node.name, set()).update(getattr(base, "id", "") for base in node.bases)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        if isinstance(node, (ast.Name, ast.arg, ast.Attribute)):
            known.add(getattr(node, "id", None) or getattr(node, "arg", None) or node.attr)
    return Names(trees, classes, bases, known)


def texts(tree):
    """Yield all docstrings, including the docstrings of constants."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
                    yield part.value.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_only_existing_things(names, path):
    for text in texts(names.trees[path]):
        for name, member in re.findall(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]+)\b", text):
            assert name not in names.classes or names.has(name, member), f"{name}.{member}"
        for name in re.findall(r"\b[A-Z][a-z]\w*(?:Error|Context|Policy|End|OfMemory)\b", text):
            assert name in names.classes or name in names.known, name
        for name in re.findall(r"`([A-Za-z_]+)`", text):
            assert name in names.known, name
