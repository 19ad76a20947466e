"""Models that several tests of chats load."""

from __future__ import annotations

import pytest

from kvtool.llama.loaded.model import Model


@pytest.fixture(scope="module")
def model(talker):
    model = Model(talker)
    yield model
    model.close()


@pytest.fixture(scope="module")
def real_model(smol):
    """A model whose chat template has special tokens."""
    model = Model(smol)
    yield model
    model.close()
