"""Fixtures of the server's tests. A test file may replace them with its own fixtures of the same name."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvtool.llama.loaded.model import Model
from tests.serve.client_packages import openai


@pytest.fixture(scope="module")
def model(smol):
    """A small model with a real vocabulary."""
    with closing(Model(smol)) as model:
        yield model


@pytest.fixture(scope="module")
def client(server):
    """The official client of the OpenAI API, connected to the test file's `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
