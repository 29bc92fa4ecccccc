from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_server import LlamaServer
from stub_upstream import StubUpstream

sys.path.insert(0, str(Path(__file__).parents[1] / "kserve"))  # its double of Serving serves these tests too


@pytest.fixture
def stub() -> Iterator[StubUpstream]:
    with StubUpstream() as running:
        yield running


@pytest.fixture
def other_stub() -> Iterator[StubUpstream]:
    with StubUpstream() as running:
        yield running


@pytest.fixture(scope="session")
def llama() -> Iterator[LlamaServer]:
    """A real llama.cpp server with a small real model."""
    with LlamaServer() as running:
        yield running
