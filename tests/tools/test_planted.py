"""The faults of `make check-tests` can be planted: their lines and their tests still exist."""

from __future__ import annotations

import pytest

from tests.tools.planted import PLANTED, ROOT


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_line_and_tests_of_a_planted_fault_exist(fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
