"""Docstrings name only things that exist: classes, their members, and everything in backticks."""

from __future__ import annotations

import ast
import builtins
import re
from itertools import chain
from pathlib import Path

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


def texts(tree):
    """Yield all docstrings, including the docstrings of constants."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            for part in node.body:
                if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
                    yield part.value.value


def test_docstrings_name_only_existing_things():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    classes, bases, names = {}, {}, set(dir(builtins))
    for node in chain.from_iterable(map(ast.walk, trees.values())):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, set()).update(members(node))
            bases.setdefault(node.name, set()).update(getattr(base, "id", "") for base in node.bases)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, (ast.Name, ast.arg, ast.Attribute)):
            names.add(getattr(node, "id", None) or getattr(node, "arg", None) or node.attr)

    def has(name, member):
        return member in classes.get(name, ()) or any(has(base, member) for base in bases.get(name, ()))

    for path, text in ((path, text) for path, tree in trees.items() for text in texts(tree)):
        for name, member in re.findall(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]+)\b", text):
            assert name not in classes or has(name, member), f"{path}: {name}.{member}"
        errors = r"\b[A-Z][a-z]\w*(?:Error|Context|Policy|End|OfMemory)\b"
        for name in re.findall(rf"{errors}|(?<=`)[A-Za-z_]+(?=`)", text):
            assert name in names, f"{path}: {name}"
