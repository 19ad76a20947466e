"""One-line messages for errors in a user's own code."""

from __future__ import annotations

import importlib.util

from kvtool.errors import where


def failing_import(path):
    spec = importlib.util.spec_from_file_location("mine", path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except (SyntaxError, ArithmeticError, ImportError) as error:
        return where(error)


def test_a_syntax_error_names_its_place_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("\n\nx = (\n")
    assert failing_import(path) == "SyntaxError: '(' was never closed (mine.py, line 3)"


def test_an_error_names_the_innermost_place_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f():\n    return 1 / 0\n\nexec('f()')\n")
    assert failing_import(path) == "ZeroDivisionError: division by zero (mine.py, line 2)"


def test_error_of_a_missing_import_does_not_name_the_import_system(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("\nfrom importlib import import_module\nimport_module('no_such_module_at_all')\n")
    assert "frozen" not in failing_import(path)
