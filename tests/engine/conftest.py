"""Fixtures that hide the patch from kvtool, or let the device edit the cache."""

from __future__ import annotations

import pytest

from kvtool.llama.context import Context


@pytest.fixture
def unpatch(monkeypatch):
    """Return a function unpatch(), which hides the patch from kvtool until the test ends."""

    def hide():
        for module in ("kvtool.engine.sizes", "kvtool.llama.model"):
            monkeypatch.setattr(f"{module}.is_patched", lambda: False)

    return hide


@pytest.fixture
def unpatched(unpatch):
    unpatch()


@pytest.fixture
def edits_on_device(monkeypatch):
    """Make the device move and merge cells by computing a graph. Otherwise the CPU may edit host memory.

    The fixture's value is a list with the number of moves of each edit.
    """
    apply, n_moves = Context.apply, []

    def on_the_device(self, moves, *args, **kwargs):
        n_moves.append(len(moves))
        apply(self, moves, *args, force_graph=True, **kwargs)

    monkeypatch.setattr(Context, "apply", on_the_device)
    return n_moves
